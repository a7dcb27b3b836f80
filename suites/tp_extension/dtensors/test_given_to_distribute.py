"""What distribute_tensor and distribute_module do with tensors and modules that they are given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor

from harness import Rank, World, requirement

LAYOUTS: dict[str, list[Placement]] = {"rows": [Shard(0)], "columns": [Shard(1)], "replicas": [Replicate()]}


@requirement(
    "TP-DTENSOR-5383",
    "distribute_tensor leaves the tensor that it is given as it is on every rank.",
    source="torch.distributed.tensor.distribute_tensor: src_data_rank, 'preserve the single-device semantic'",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.world(2)
def test_given_tensor(world: World, layout: str) -> None:
    """Distribute tensors that differ by rank, from each rank, contiguous ones and transposed ones."""

    def body(rank: Rank) -> None:
        for source in range(2):
            for turned in (True, False):
                given = torch.full((4, 2), float(rank.index), device=rank.device)
                given = given.t() if turned else given
                found = distribute_tensor(given, rank.mesh(), LAYOUTS[layout], src_data_rank=source)
                assert found.to_local().eq(source).all(), f"data of rank {source}"
                assert given.eq(rank.index).all(), (
                    f"{turned=}, data of rank {source}: a tensor that was given has become them"
                )

    world.run(body)


@requirement(
    "TP-DTENSOR-5384",
    "A module that distribute_module replicates trains as the plain module does.",
    source="torch.distributed.tensor.distribute_module: 'by default we replicate all module parameters of module "
    "across the mesh'",
)
@pytest.mark.parametrize("shared", ["nothing", "a weight", "a layer"])
@pytest.mark.world(2)
def test_given_module(world: World, shared: str) -> None:
    """Train two layers, of which the second may share the first one's weight or be the first one, for a step."""

    def body(rank: Rank) -> None:
        plain: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
        for parameter in plain.parameters():
            nn.init.ones_(parameter)
        if shared == "a weight":
            plain[2].weight = plain[0].weight
        elif shared == "a layer":
            plain[2] = plain[0]
        plain.to(rank.device)
        model: Any = distribute_module(copy.deepcopy(plain), rank.mesh())
        x = torch.ones(1, 2, device=rank.device)
        for each, given in ((plain, x), (model, distribute_tensor(x, rank.mesh()))):
            each(given).sum().backward()
            torch.optim.Adam(each.parameters(), lr=0.125, eps=0.0).step()
        found = [model[i].weight.full_tensor().tolist() for i in (0, 2)]
        expected = [plain[i].weight.tolist() for i in (0, 2)]
        assert found == expected, f"weights after a step: {found} and not {expected}"

    world.run(body)
