"""Modules of one group, given in a list, of which one is called alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"


@requirement(
    "RFSDP-STEP-01",
    "A forward uses the parameters as the last optimizer step left them.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_called_alone(world: World) -> None:
    """Take two steps of two layers in a list; before each ends, call one of them without gradients."""

    def trained(model: nn.Sequential, alone: int) -> list[float]:
        x = torch.ones(1, 2, device=next(model.parameters()).device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        outputs = []
        for _ in range(2):
            model(x).sum().backward()
            with torch.no_grad():
                outputs.append(model[alone](x).sum().item())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                outputs.append(model(x).sum().item())
        return outputs

    def body(rank: Rank) -> dict[str, list[float]]:
        found = {}
        for way, managed in ways(rank).items():
            for alone in range(2):
                model: Any = nn.Sequential(layer(), layer()).to(rank.device)
                managed([model[0], model[1]])
                managed(model)
                found[f"{way}, {alone}"] = trained(model, alone)
        return found

    right = [trained(nn.Sequential(layer(), layer()), alone) for alone in range(2)]
    assert_on_ranks(
        [{f"{way}, {alone}": right[alone] for way in ("replicated", "sharded", "hybrid") for alone in range(2)}] * 2,
        world.run(body),
    )
