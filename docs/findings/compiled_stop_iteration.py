# A StopIteration of next() in a generator silently ends it in compiled code: it is no RuntimeError (before torch 2.14)
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_stop_iteration.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Iterator
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


def pairs(numbers: Iterator[int]) -> Iterator[int]:
    while True:
        yield next(numbers) + next(numbers)


def step(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    try:
        return x * sum(pairs(iter([1, 2, 3])))
    except RuntimeError:  # as PEP 479 says
        return x - 1


compiled = torch.compile(step, backend="eager")
report(*(function(torch.ones(1)).item() for function in (step, compiled)))
