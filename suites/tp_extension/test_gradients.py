"""Gradients under FSDP over tensor parallelism are those of one device on the whole batch."""

from __future__ import annotations

import pytest

from fixtures.models import TwoLayers, batch
from harness import Rank, World, requirement
from harness.oracles.baseline import Step, assert_same_training, train
from harness.stacks import tp_extension

STEPS, ROWS_PER_PART = 3, 2


def train_on_rank(rank: Rank) -> list[Step]:
    module = tp_extension.apply(TwoLayers(), rank)
    parts = tp_extension.parts(rank.size)
    shared = max(parts) + 1
    batches = [batch(ROWS_PER_PART * shared, step).part(parts[rank.index], shared) for step in range(STEPS)]
    return train(module, batches, scale=shared, gradients=tp_extension.gradients, parameters=tp_extension.parameters)


@requirement(
    "TP-GRAD-01",
    "A model under FSDP over tensor parallelism trains as it does on one device.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(1, 2, 3, 4)
def test_gradients_are_those_of_the_whole_batch(world: World) -> None:
    """Three steps of SGD on ranks equal three steps on one device, bit for bit."""
    ranks = world.run(train_on_rank)
    parts = tp_extension.parts(world.size)
    alone = train(TwoLayers(), [batch(ROWS_PER_PART * (max(parts) + 1), step) for step in range(STEPS)])
    assert_same_training(alone, ranks, parts)
