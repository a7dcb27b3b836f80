# all_to_all_single reads a channels-last input as it lies in memory
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 channels_last_all_to_all_single.py
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


parts = [(torch.arange(4.0) + 100 * rank + 10 * receiver).reshape(1, 2, 2, 1) for receiver in range(size)]
given = torch.cat(parts).contiguous(memory_format=torch.channels_last)
into = torch.full((size, 2, 2, 1), -1.0)
observed: object = "nothing"
try:
    dist.all_to_all_single(into, given)
    observed = into.flatten().tolist()
except (ValueError, RuntimeError) as e:
    observed = f"{type(e).__name__}: {e}"
report([100.0 * sender + 10 * rank + i for sender in range(size) for i in range(4)], observed)
