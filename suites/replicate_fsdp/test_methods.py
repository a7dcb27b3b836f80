"""Methods that register_fsdp_forward_method makes forwards, of one module and not of its class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


class Scale(nn.Module):
    """A weight of two equal numbers, and methods that multiply by it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()

    def times(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        """Return the forward's result times a factor."""
        return (self.weight * x).sum() * factor

    def both(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the forward's result and its negative, times a factor."""
        y = (self.weight * x).sum() * factor
        return y, [-y]


@requirement(
    "RFSDP-METHOD-02",
    "register_fsdp_forward_method makes forwards of the methods of the given module, and of no other of its class.",
    source="torch.distributed.fsdp.register_fsdp_forward_method: 'Registers a method on module'",
)
@pytest.mark.world(2)
def test_modules_of_one_class(world: World) -> None:
    """Three managed modules of one class, of which two have two methods registered, and a plain one, in two steps."""

    def body(rank: Rank) -> None:
        x = torch.full((2,), 1.0 + rank.index, device=rank.device)
        for way, managed in ways(rank).items():
            modules: list[Any] = [managed(Scale(value).to(rank.device)) for value in (1.0, 10.0, 100.0)]
            plain = Scale(1000.0).to(rank.device)
            for module in (*modules[:2], plain):
                for name in ("times", "both"):
                    register_fsdp_forward_method(module, name)
            assert type(modules[0]) is type(modules[2]), way
            for step in range(2):
                for module, value in ((modules[1], 10.0), (modules[0], 1.0), (plain, 1000.0)):
                    what = f"{way}, {value}, step {step}"
                    right = value * 2 * (1 + rank.index)
                    mean = 1.0 + rank.index if module is plain else 1.5
                    scaled = module.times(x, factor=2.0)
                    assert scaled.item() == 2 * right, what
                    scaled.backward()
                    assert gradient(module) == [2 * mean] * 2, what
                    first, (second,) = module.both(x, 4.0)
                    assert (first.item(), second.item()) == (4 * right, -4 * right), what
                    (2 * first + second).backward()
                    assert gradient(module) == [6 * mean] * 2, what
                    module(x).backward()
                    assert gradient(module) == [7 * mean] * 2, what
                    module.zero_grad()
                assert modules[2](x).item() == 200.0 * (1 + rank.index), way
            assert [vars(m).keys() & {"times", "both"} for m in (modules[2], plain)] == [set(), set()], way

    def gradient(module: nn.Module) -> Any:
        return replicate_fsdp.gradients(module)["weight"].tolist()

    world.run(body)
