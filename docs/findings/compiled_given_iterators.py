# An iterator over a tuple or a range that compiled code has read is as full as before: batches come again
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_given_iterators.py
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


def total(x: torch.Tensor, batches: Iterator[int]) -> torch.Tensor:
    for batch in list(batches):
        x = x + batch
    return x


outcomes = []
for call in total, torch.compile(total, backend="eager"):
    batches = iter(range(rank, 6, size))
    outcomes.append((call(torch.zeros(1), batches).item(), list(batches)))
report(*outcomes)
