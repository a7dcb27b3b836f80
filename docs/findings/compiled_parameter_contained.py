# In compiled code, `weight in list(module.parameters())` silently compares elements where it must be True
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_parameter_contained.py
# It exits with 1 where the defect is there. A list of the tensor itself is mended in 2.14.

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


layer = torch.nn.Linear(2, 2)


def step(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    return x + 1, layer.weight in list(layer.parameters())


def told(call: Callable[..., tuple[torch.Tensor, bool]]) -> str:
    try:
        return str(call(torch.ones(2))[1])
    except Exception as error:
        return type(error).__name__ + ": " + str(error).strip().splitlines()[0]


report(told(step), told(torch.compile(step, backend="eager")))
