# Compiled code ignores set_materialize_grads(False): backward silently has zeros for outputs without gradient
# https://github.com/pytorch/pytorch/issues/118396
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_materialized_gradients.py
# It exits with 1 where the defect is there.

import sys
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


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> torch.Tensor:
        return first * 2 if second is None else first * 100


def step(x: torch.Tensor) -> torch.Tensor:
    return Two.apply(x)[0]


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    x = torch.full((2,), float(rank), requires_grad=True)
    call(x).sum().backward()
    assert x.grad is not None
    dist.all_reduce(x.grad)
    outcomes.append(x.grad.tolist())
report(*outcomes)
