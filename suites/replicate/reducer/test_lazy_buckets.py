"""Buckets that are allocated when they are first needed. PyTorch has them since 2.15."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fixtures.layers import alone, layers, row
from fixtures.micro_batches import PATTERNS
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

STEPS = 3
pytestmark = pytest.mark.needs(torch="torch.nn.parallel.DistributedDataParallel(lazy_bucket_allocation)")


@requirement(
    "REPL-BUCKET-01",
    "With lazy_bucket_allocation, gradients over any pattern of synchronized micro-batches are those of one device.",
    source="torch.nn.parallel.DistributedDataParallel: lazy_bucket_allocation",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.world(2)
def test_patterns(world: World, pattern: str, views: bool) -> None:
    """Run three steps, with one bucket for each parameter, and clear gradients between them."""
    options = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": views, "bucket_cap_mb": 1e-6}

    def body(rank: Rank) -> list[Any]:
        model: Any = replicate.apply(layers(rank.device), rank, **options)
        seen = []
        for _ in range(STEPS):
            for sync in pattern:
                model.set_requires_gradient_sync(sync == "+")
                model(row(rank.index).to(rank.device)).sum().backward()
            gradients = replicate.gradients(model)
            seen.append([gradients[name].flatten().tolist() for name in sorted(gradients)])
            model.zero_grad()
        return seen

    right = [[len(pattern) * element for element in gradient] for gradient in alone(2)]
    assert_on_ranks([[right] * STEPS] * 2, world.run(body))


@requirement(
    "REPL-BUCKET-02",
    "With lazy_bucket_allocation, training continues with the right gradients after a step that uses only some layers.",
    source="torch.nn.parallel.DistributedDataParallel: lazy_bucket_allocation, find_unused_parameters",
)
@pytest.mark.world(2)
def test_unused(world: World) -> None:
    """The second of three steps leaves the second layer out on every rank."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.short = layers(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.both[0](x) if self.short else self.both(x)
            return result

    def gradients(model: Any, parts: list[int], device: torch.device | str) -> list[Any]:
        seen = []
        for step in range(STEPS):
            model.short = step == 1
            (model(torch.cat([row(part) for part in parts]).to(device)).sum() / len(parts)).backward()
            seen.append([None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()])
            model.zero_grad()
        return seen

    def body(rank: Rank) -> list[Any]:
        model = replicate.apply(
            Model().to(rank.device), rank, lazy_bucket_allocation=True, find_unused_parameters=True, bucket_cap_mb=1e-6
        )
        return gradients(model, [rank.index], rank.device)

    assert_on_ranks([gradients(Model(), [0, 1], "cpu")] * 2, world.run(body))
