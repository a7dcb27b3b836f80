"""Batches that a training loop gives up under composable DDP."""

from __future__ import annotations

import pytest

from fixtures.skipped import WAYS, Fragile, skip, train
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate


@requirement(
    "REPL-SKIP-01",
    "A batch that is given up, before its backward or because its forward raised, changes no later gradient.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.parametrize("unused", [False, True], ids=["plain", "find-unused"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(2, 3)
def test_skipped(world: World, way: str, unused: bool) -> None:
    """Give up the first batch, and one between two steps."""

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        model = replicate.apply(Fragile(), rank, find_unused_parameters=unused)
        seen = []
        for _ in range(2):
            skip(model, rank.device, way)
            train(model, rank.device, 1.0 + rank.index)
            seen.append({name: each.flatten().tolist() for name, each in replicate.gradients(model).items()})
            model.zero_grad()
        return seen

    average = (world.size + 1) / 2
    right = {"first.weight": [2 * average] * 4, "second.weight": [2 * average] * 4}
    assert_on_ranks([[right] * 2] * world.size, world.run(body))
