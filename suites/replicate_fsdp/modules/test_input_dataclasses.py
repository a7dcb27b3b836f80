"""Dataclasses that a managed module takes, whose fields are computed or initialized in a way of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement


@dataclass
class Plain:
    """Floats and a number."""

    x: torch.Tensor
    factor: float = 2.0

    def result(self) -> torch.Tensor:
        return self.x * self.factor


@dataclass
class Derived:
    """Floats, and others that are made of them."""

    x: torch.Tensor
    y: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.y = self.x

    def result(self) -> torch.Tensor:
        return self.x + self.y


@dataclass
class Doubled:
    """Floats that are doubled."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = 2 * self.x

    def result(self) -> torch.Tensor:
        return self.x


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {"plain": Plain, "derived": Derived, "initialized": Doubled}


class Weighted(nn.Module):
    """A weight that multiplies the result of a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, given: Any) -> torch.Tensor:
        result: torch.Tensor = self.weight * given.result()
        return result


@requirement(
    "RFSDP-CAST-3804",
    "A forward is given a dataclass whose tensors alone are cast, also if its fields are made in __post_init__.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: cast_forward_inputs",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2)
def test_cast_dataclasses(world: World, kind: str) -> None:
    """Give a dataclass to a module that has a param_dtype, in each way to manage it."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for manage in ways(rank).values():
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model: Any = manage(Weighted().to(rank.device), mp_policy=policy)
            found.append(model(KINDS[kind](torch.full((2,), 1.0, device=rank.device))))
        return [(str(y.dtype), y.tolist()) for y in found]

    assert_on_ranks([[("torch.bfloat16", [2.0, 2.0])] * 3] * 2, world.run(body))
