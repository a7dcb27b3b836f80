# Code that is compiled for 0.0 silently keeps it for -0.0, and the other way round
# https://github.com/pytorch/pytorch/pull/192604
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_signed_zero.py
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


def signed(x: torch.Tensor, sign: float) -> torch.Tensor:
    return torch.copysign(x, sign)


# The guard of a number compares it by ==, and 0.0 == -0.0. For NaN there is a guard of its own.
compiled = torch.compile(signed, backend="eager")
outcomes: list[list[float]] = [[], []]
for zero in 0.0, -0.0:
    for call, outcome in zip((signed, compiled), outcomes, strict=True):
        result = call(torch.ones(1), zero)
        dist.all_reduce(result)
        outcome.append((result / size).item())
report(*outcomes)
