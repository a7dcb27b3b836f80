# In compiled code, an f-string with a format for a dynamic size is an internal error
# https://github.com/pytorch/pytorch/issues/197093
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_formatted_sizes.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

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


def step(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return x + 1, f"{x.shape[0] / 2:.3f}"


def told(call: Callable[..., Any]) -> list[object]:
    found: list[object] = []
    for count in 3, 4, 12:
        try:
            found.append(call(torch.ones(count))[1])
        except Exception as error:
            found.append(type(error).__name__ + ": " + str(error).strip().splitlines()[0])
    return found


report(told(step), told(torch.compile(step, backend="eager")))
