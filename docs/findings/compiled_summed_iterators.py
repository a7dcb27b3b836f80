# In compiled code, sum, any or all of an iterator does not consume it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_summed_iterators.py
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


def step(x: torch.Tensor) -> tuple[torch.Tensor, list[int], bool, list[int]]:
    batches, others = iter([1, 2]), iter([0, 1, 2])
    total, found = sum(batches), any(others)
    return x * total, list(batches), found, list(others)


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    total, *rest = call(torch.ones(1) + rank)
    outcomes.append((total.item(), *rest))
report(*outcomes)
