"""Unsupported uses of FSDP-replicate, which raise an error while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


def inner_first(rank: Rank) -> None:
    model = replicate_fsdp.apply(nn.Sequential(layer(), layer()), rank)
    for module in (model[0], model):  # type: ignore[index]
        module(torch.ones(1, 2, device=rank.device))


def reset_of_inner(rank: Rank) -> None:
    model: Any = replicate_fsdp.apply(nn.Sequential(layer(), layer()), rank)
    model(torch.ones(1, 2, device=rank.device))
    model[0].reset_iter_state()


def two_dtypes(rank: Rank) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = layer(), layer().to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.narrow(self.wide(x).bfloat16())
            return result

    model = replicate_fsdp.apply(Model(), rank, groups=False)
    model(torch.ones(1, 2, device=rank.device)).sum().backward()


WRONG: dict[str, tuple[Callable[[Rank], None], str]] = {
    "inner-module-first": (inner_first, "(?i)root"),
    "reset-of-an-inner-module": (reset_of_inner, "(?i)root"),
    "two-dtypes-in-a-group": (two_dtypes, "(?i)dtype"),
}
"""The unsupported use, and a pattern of the error."""
NEEDS = {
    "reset-of-an-inner-module": pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state"),
}
"""What only newer versions of PyTorch have."""


@requirement(
    "RFSDP-REFUSE-01",
    "Unsupported uses of a replicated module raise an error that names the problem on every rank.",
    source="torch.distributed.fsdp.FSDPModule; torch/distributed/_composable/replicate_with_fsdp.py",
)
@pytest.mark.parametrize("what", [pytest.param(what, marks=NEEDS.get(what, ())) for what in WRONG])
@pytest.mark.world(2)
def test_refused(world: World, what: str) -> None:
    """The error comes before any communication, so that no rank is left waiting."""
    wrong, says = WRONG[what]

    def body(rank: Rank) -> str:
        try:
            wrong(rank)
        except (RuntimeError, TypeError, ValueError, AssertionError) as e:
            return f"{type(e).__name__}: {e}"
        return "no error"

    for message in world.run(body):
        assert re.search(says, message), message
