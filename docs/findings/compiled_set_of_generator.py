# Compiled code silently loses the elements of a generator that set.union or difference gets (before torch 2.14)
# https://github.com/pytorch/pytorch/pull/186042
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_set_of_generator.py
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


def step(x: torch.Tensor, names: list[str]) -> tuple[torch.Tensor, list[str]]:
    dist.all_reduce(x)
    return x, sorted({"a"}.union(name for name in names))


compiled = torch.compile(step, backend="eager")
report(*(function(torch.ones(1), ["b", "c"])[1] for function in (step, compiled)))
