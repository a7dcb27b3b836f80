# all_to_all refuses tensors of different sizes
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 uneven_all_to_all.py
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


try:
    out = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(out, [torch.ones(peer + 1) for peer in range(size)])
    observed = "no error"
except RuntimeError as e:
    observed = f"RuntimeError: {e}".splitlines()[0]
report("no error", observed)
