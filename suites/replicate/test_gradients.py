"""Gradients under composable DDP are those of one device on the whole batch."""

from __future__ import annotations

import pytest

from fixtures.models import TwoLayers, batch
from harness import Rank, World, requirement
from harness.oracles.baseline import Step, assert_same_training, train
from harness.stacks import replicate

STEPS, ROWS_PER_RANK = 3, 2


def train_on_rank(rank: Rank) -> list[Step]:
    module = replicate.apply(TwoLayers(), rank)
    batches = [batch(ROWS_PER_RANK * rank.size, step).part(rank.index, rank.size) for step in range(STEPS)]
    return train(module, batches, scale=rank.size)


@requirement(
    "REPL-GRAD-01",
    "After backward, every rank holds the average over ranks of the gradients of their parts of the batch.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.world(1, 2, 3, 4)
def test_gradients_are_those_of_the_whole_batch(world: World) -> None:
    """Three steps of SGD on ranks equal three steps on one device, bit for bit."""
    ranks = world.run(train_on_rank)
    alone = train(TwoLayers(), [batch(ROWS_PER_RANK * world.size, step) for step in range(STEPS)])
    assert_same_training(alone, ranks)
