# In compiled code, `result = yield from generator` silently gives None instead of the value that it returned
# https://github.com/pytorch/pytorch/pull/185769
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_yield_from.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Generator
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


def losses(x: torch.Tensor) -> Generator[torch.Tensor, None, int]:
    yield x * 2
    return 3


def step(x: torch.Tensor) -> tuple[torch.Tensor, list[object]]:
    counts: list[object] = []

    def outer() -> Generator[torch.Tensor, None, None]:
        counts.append((yield from losses(x)))

    total = sum(outer())
    assert isinstance(total, torch.Tensor)
    return total, counts


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    total, counts = call(torch.ones(1))
    dist.all_reduce(total)
    outcomes.append((total.tolist(), counts))
report(*outcomes)
