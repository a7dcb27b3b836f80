# all_to_all_single refuses an input that is not contiguous
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 strided_input_all_to_all_single.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


given = torch.stack([torch.arange(float(size)) + 10 * rank, torch.full((size,), -1.0)], dim=1)
into = torch.full((size,), -1.0)
observed: object = "nothing"
try:
    dist.all_to_all_single(into, given[:, 0])
    observed = into.tolist()
except (ValueError, RuntimeError) as e:
    observed = f"{type(e).__name__}: {e}"
report([10.0 * sender + rank for sender in range(size)], observed)
