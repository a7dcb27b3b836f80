"""Managed modules that take dual numbers, which carry a derivative forward beside each value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement

KINDS = {"one-group": (False, False), "nested": (True, False), "trained-input": (False, True)}
"""Whether layers have groups of their own, and whether the input requires a gradient."""


@requirement(
    "RFSDP-FUNC-4701",
    "Dual numbers give the output of a managed module the derivative that one device has.",
    source="torch.autograd.forward_ad; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2)
def test_dual_numbers(world: World, kind: str) -> None:
    """Pass each rank's number and a derivative of 1 through two layers, which multiply by 3."""
    nested, trained = KINDS[kind]

    def body(rank: Rank) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for way, managed in ways(rank).items():
            model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(rank.device)
            for layer in model:
                nn.init.constant_(layer.weight, 3.0)  # type: ignore[arg-type]
                if nested:
                    managed(layer)
            managed(model)
            x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=trained)
            try:
                with forward_ad.dual_level():
                    output = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
                    assert output.tangent is not None
                    found[way] = output.primal.item(), output.tangent.item()
            except RuntimeError as error:
                found[way] = str(error).splitlines()[0]
        return found

    assert_on_ranks(
        [dict.fromkeys(("replicated", "sharded", "hybrid"), (9.0 + 9 * r, 9.0)) for r in range(2)], world.run(body)
    )
