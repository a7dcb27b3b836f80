# Compiled code cannot catch the IndexError of popleft() of an empty deque: it is an internal error
# https://github.com/pytorch/pytorch/pull/195010
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_popleft_empty.py
# It exits with 1 where the defect is there.

import sys
from collections import deque
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


def step(x: torch.Tensor) -> torch.Tensor:
    batches = deque([1, 2])
    while True:
        try:
            x = x + batches.popleft()
        except IndexError:
            return x


def told(call: Callable[..., torch.Tensor]) -> object:
    try:
        return call(torch.ones(1) * rank).item()
    except Exception as error:
        return type(error).__name__ + ": " + str(error).strip().splitlines()[0]


report(told(step), told(torch.compile(step, backend="eager")))
