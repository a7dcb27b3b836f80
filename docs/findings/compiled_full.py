# In compiled code, torch.full with a tensor of integers, truths or complex numbers silently makes floats
# https://github.com/pytorch/pytorch/pull/166554
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_full.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def fill(number: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(number)
    return torch.full((2,), number)


compiled = torch.compile(fill, backend="eager")
report(*(str(function(torch.tensor(1 + rank))) for function in (fill, compiled)))
