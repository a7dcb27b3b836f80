"""Gradients of several backwards without synchronization, of parameters that a forward combines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp

COMBINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "added": lambda a, b: a + b,
    "concatenated": lambda a, b: torch.cat([a, b]).view(2, 2).sum(0),
    "multiplied": lambda a, b: (torch.stack([a, b]) * 1.0).sum(0),
    "as a matrix": lambda a, b: torch.ones_like(a) @ torch.stack([a, b]),
    "stacked": lambda a, b: torch.stack([a, b]).sum(0),
    "averaged": lambda a, b: 2 * torch.stack([a, b]).mean(0),
}
"""Ways to compute the sum of two parameters with two elements."""


class Two(nn.Module):
    """Two parameters, whose sum multiplies the input."""

    def __init__(self, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in "ab")
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.combine(self.a, self.b) * x).sum()


@requirement(
    "RFSDP-ACCUM-3805",
    "Gradients of backwards without synchronization add up as on one device, however a forward combines parameters.",
    source="torch.nn.parallel.DistributedDataParallel.no_sync; torch.distributed.fsdp: set_requires_gradient_sync",
)
@pytest.mark.parametrize("combined", COMBINED)
@pytest.mark.world(2)
def test_combined_parameters(world: World, combined: str) -> None:
    """Run two backwards without synchronization and one with it, in each way to manage a module."""

    def body(rank: Rank) -> None:
        found = {}
        for way, manage in {"DDP": DistributedDataParallel, **ways(rank)}.items():
            module = Two(COMBINED[combined]).to(rank.device)
            model: Any = manage(module)
            for step in range(3):
                last = step == 2
                if way != "DDP":
                    model.set_requires_gradient_sync(last)
                with model.no_sync() if way == "DDP" and not last else contextlib.nullcontext():
                    model(torch.tensor(1.0 + step + rank.index, device=rank.device)).backward()
            found[way] = {name: each.tolist() for name, each in replicate_fsdp.gradients(module).items()}
        assert found == {way: {"a": [7.5, 7.5], "b": [7.5, 7.5]} for way in found}

    world.run(body)
