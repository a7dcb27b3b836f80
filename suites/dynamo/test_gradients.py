"""Compiled training on ranks equals eager training on a single device."""

from __future__ import annotations

import pytest

from fixtures.models import TwoLayers, batch
from harness import Rank, World, requirement
from harness.oracles.baseline import Step, assert_same_training, train
from harness.stacks import dynamo

STEPS, ROWS_PER_RANK = 3, 2


def train_on_rank(rank: Rank, backend: str) -> tuple[int, list[Step]]:
    counter = dynamo.GraphCounter(backend)
    module = dynamo.apply(TwoLayers(), rank, backend=counter)
    batches = [batch(ROWS_PER_RANK * rank.size, step).part(rank.index, rank.size) for step in range(STEPS)]
    steps = train(module, batches, scale=rank.size, gradients=dynamo.gradients, parameters=dynamo.parameters)
    return counter.graphs, steps


@requirement(
    "DYN-GRAD-01",
    "A compiled replicated module trains as the eager one does.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@requirement(
    "DYN-COUNT-02",
    "Every rank compiles a model into the same number of graphs.",
    source="torch.compile: guards",
)
@requirement(
    "DYN-COUNT-03",
    "Compiling a model on ranks produces at least one graph on every rank.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(1, 2, 3, 4)
@pytest.mark.each_choice
def test_compiled_training_is_eager_training(world: World, backend: str) -> None:
    """Three compiled steps on ranks equal three eager steps on one device, bit for bit, from at least one graph."""
    graphs, ranks = zip(*world.run(train_on_rank, backend), strict=True)
    alone = train(TwoLayers(), [batch(ROWS_PER_RANK * world.size, step) for step in range(STEPS)])
    assert_same_training(alone, ranks)
    assert min(graphs) > 0
    assert set(graphs) == {graphs[0]}
