# In compiled code, list.extend keeps nothing of what an iterator gave before it raised an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_extended_until_error.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Callable
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


class Batches:
    """Batches of which the third can't be read."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count == 3:
            raise ValueError("no such batch")
        return self.count


def step(x: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    items = [rank]
    try:
        items.extend(Batches())
    except ValueError:
        pass
    return items, x + 1


def told(call: Callable[..., object]) -> object:
    try:
        return call(torch.ones(1))[0]
    except Exception as error:
        return type(error).__name__ + ": " + str(error).strip().splitlines()[0]


report(told(step), told(torch.compile(step, backend="eager")))
