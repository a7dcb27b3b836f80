# Compiled code that asks `thing is OTHER` silently keeps the answer for other objects of the same class
# https://github.com/pytorch/pytorch/issues/196173
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_identity.py
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


class Missing:
    """The class of a default that stands for no argument."""


MISSING = Missing()


def step(x: torch.Tensor, scale: Missing) -> torch.Tensor:
    return x * 2 if scale is MISSING else x


expected, observed = [], []
for found, call in (expected, step), (observed, torch.compile(step, backend="eager")):
    for scale in MISSING, Missing(), MISSING:
        result = call(torch.ones(1), scale)
        dist.all_reduce(result)
        found.append((result / size).item())
report(expected, observed)
