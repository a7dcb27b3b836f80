"""Sharded modules that are converted to another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness import Rank, World, requirement


@requirement(
    "RFSDP-CAST-6205",
    "A sharded model that is converted to another dtype, before its first step or later, trains on in its new dtype.",
    source="torch.nn.Module.to; torch/distributed/fsdp/_fully_shard/_fully_shard.py: FSDPModule",
)
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.world(2)
def test_converted(world: World, when: str) -> None:
    """Convert weights of one from float32 to float64, before a step or after it."""

    def body(rank: Rank) -> None:
        layer = nn.Linear(4, 4, device=rank.device)
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(1)
        model: Any = fully_shard(layer, mesh=rank.mesh())
        if when == "later":
            model(torch.ones(1, 4, device=rank.device)).sum().backward()
            model.zero_grad()
        model.to(torch.float64)
        output = model(torch.ones(1, 4, dtype=torch.float64, device=rank.device))
        output.sum().backward()
        assert (output.dtype, output.tolist()) == (torch.float64, [[5.0] * 4])
        found: Any = layer.weight.grad
        assert found.full_tensor().tolist() == [[1.0] * 4] * 4
        assert found.dtype == torch.float64

    world.run(body)
