# Compiled, mark_non_differentiable of an argument that an autograd.Function returns is silently ignored
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_marked_argument.py
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


class Scaled(torch.autograd.Function):
    """Gives twice its first argument, and the second as it is, without gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.mark_non_differentiable(mask)
        return x * 2, mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


def step(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = Scaled.apply(x, mask)
    return found


def kept(call: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    return [result.requires_grad for result in call(torch.ones(2, requires_grad=True), torch.ones(2))]


report(kept(step), kept(torch.compile(step, backend="eager")))
