"""Behaviours of compiled models that generated programs keep away from, since PyTorch has defects there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import dynamo, replicate


@requirement(
    "DYN-DDP-01",
    "A model with replicated layers that torch.compile was given has a compiled graph after its first step.",
    source="torch.compile: optimizes the given model",
)
@pytest.mark.parametrize("kind", ["torch", "own"])
@pytest.mark.world(2)
def test_replicated_layers(world: World, kind: str) -> None:
    """Two layers, each replicated on its own: of torch.nn, or of a class of the user's."""

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = Own if kind == "own" else nn.Linear
            self.first, self.second = layer(4, 4), layer(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(self.first(x))
            return result

    def body(rank: Rank) -> int:
        model, counter = Model(), dynamo.GraphCounter("eager")
        replicate.apply(model.first, rank)
        replicate.apply(model.second, rank)
        torch.compile(model, backend=counter)(torch.ones(1, 4)).sum().backward()
        return counter.graphs

    assert min(world.run(body)) > 0


@requirement(
    "DYN-DDP-02",
    "torch.compile takes a model under DDP with any size of buckets that DDP takes.",
    source="torch.nn.parallel.DistributedDataParallel: bucket_cap_mb; torch/_dynamo/backends/distributed.py",
)
@pytest.mark.parametrize("megabytes", [0.5, 1, 25])
@pytest.mark.world(2)
def test_bucket_sizes(world: World, megabytes: float) -> None:
    """Below, at and above the size of DDP's first bucket."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) + 1
            return result

    def body(rank: Rank) -> bool:
        model = DistributedDataParallel(Model(), bucket_cap_mb=megabytes)
        counter = dynamo.GraphCounter("eager")
        torch.compile(model, backend=counter)(torch.ones(1, 4)).sum().backward()
        return counter.graphs > 0

    assert world.run(body) == [True, True]
