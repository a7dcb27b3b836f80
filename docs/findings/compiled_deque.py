# Compiled code silently ignores the maxlen of a deque that it is given, as long as it runs
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_deque.py
# It exits with 1 where the defect is there.

import sys
from collections import deque
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


def step(x: torch.Tensor, last: deque[float]) -> torch.Tensor:
    last.append(4.0)
    dist.all_reduce(x)
    return x * last[0] * len(last)


compiled = torch.compile(step, backend="eager")
report(*(function(torch.ones(1), deque([1.0, 2.0], maxlen=2)).item() for function in (step, compiled)))
