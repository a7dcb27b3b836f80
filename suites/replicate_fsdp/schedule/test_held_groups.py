"""Gradients of a group that await a synchronized backward, which does not use the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp


class Either(nn.Module):
    """Two layers, of which each forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer(), layer()

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the output of the layer of this name."""
        result: torch.Tensor = getattr(self, name)(x)
        return result


@requirement(
    "RFSDP-HELD-5240",
    "The next synchronized backward averages gradients of earlier backwards, whether it uses their groups or not.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync; set_requires_all_reduce: 'gradient "
    "accumulation with only reduce-scatter but not all-reduce for HSDP'",
)
@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.world(2)
def test_other_groups(world: World, switch: str) -> None:
    """Each layer is a group: run a backward of a held back, one of b, and a step of a."""

    def body(rank: Rank) -> dict[str, list[dict[str, float]]]:
        found: dict[str, list[dict[str, float]]] = {}
        for way, managed in ways(rank).items():
            model: Any = Either().to(rank.device)
            for module in (model.a, model.b, model):
                managed(module)
            x = torch.full((1, 2), 1.0 + 2 * rank.index, device=rank.device)
            getattr(model, switch)(False)
            model(x, "a").sum().backward()
            getattr(model, switch)(True)
            found[way] = []
            for name in ("b", "a"):
                model(x, name).sum().backward()
                gradients = replicate_fsdp.gradients(model)
                found[way].append({name: gradient.mean().item() for name, gradient in gradients.items()})
                model.zero_grad()
        return found

    right = [{"a.weight": 2.0, "b.weight": 2.0}, {"a.weight": 2.0}]
    assert_on_ranks([dict.fromkeys(("replicated", "sharded", "hybrid"), right)] * 2, world.run(body))
