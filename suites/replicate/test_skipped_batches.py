"""Batches that a training loop gives up under composable DDP."""

from __future__ import annotations

import pytest

from fixtures.skipped import WAYS, Fragile, average_gradients, gradients_of_steps
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
        return gradients_of_steps(model, rank, way, replicate.gradients)

    assert_on_ranks([average_gradients(world.size)] * world.size, world.run(body))
