# a compiled functional broadcast silently has no gradient
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_broadcast_gradient.py
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


def tripled(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = functional.broadcast(x, 0, dist.group.WORLD) * 3
    return result


def gradient(function: object) -> object:
    """Return the gradient of the sum of the results."""
    x = torch.ones(2, requires_grad=True)
    function(x).sum().backward()  # type: ignore[operator]
    return None if x.grad is None else x.grad.tolist()


# uncompiled, it is of the right kind, although each rank has its own: functional_broadcast_gradient
report(gradient(tripled), gradient(torch.compile(tripled, backend="aot_eager")))
