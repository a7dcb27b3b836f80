# after t_, unsqueeze_ or squeeze_, the result of a functional collective silently has its old shape
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_transposed_in_place.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


found, right = {}, {}
for name in "t_", "unsqueeze_", "squeeze_":
    arguments = [] if name == "t_" else [0]
    given = torch.ones(1, 3)
    total = functional.all_reduce(given, "sum", dist.group.WORLD)
    getattr(given, name)(*arguments)
    getattr(total, name)(*arguments)
    found[name], right[name] = tuple(total.shape), tuple(given.shape)
report(right, found)
