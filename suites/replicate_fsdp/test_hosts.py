"""Replication on FSDP2 over ranks of several hosts."""

from __future__ import annotations

import pytest

from fixtures.models import TwoLayers, batch
from harness import Rank, World, requirement
from harness.oracles.baseline import Step, assert_same_training, train
from harness.stacks import replicate_fsdp

STEPS, ROWS_PER_RANK = 3, 2


def train_on_rank(rank: Rank, dimension: str) -> list[Step]:
    """Train on a dimension of a mesh of hosts and their ranks; each group of ranks has a batch of its own."""
    mesh = rank.mesh(2, 2, names=("host", "local"))
    group, place = (rank.host, rank.index % 2) if dimension == "local" else (rank.index % 2, rank.host)
    module = replicate_fsdp.apply(TwoLayers(), rank, **{replicate_fsdp.MESH: mesh[dimension]})
    batches = [batch(2 * ROWS_PER_RANK, step + STEPS * group).part(place, 2) for step in range(STEPS)]
    return train(module, batches, scale=2, gradients=replicate_fsdp.gradients, parameters=replicate_fsdp.parameters)


@requirement(
    "RFSDP-HOST-01",
    "Replicas within a host, or one on each host, train as one device does on the batch of these ranks.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.parametrize("dimension", ["host", "local"])
@pytest.mark.world(4, hosts=2)
def test_replicas_of_hosts(world: World, dimension: str) -> None:
    """Two groups of two replicas, each with its own batch; three steps of SGD, bit for bit."""
    ranks = world.run(train_on_rank, dimension)
    groups = ((0, 1), (2, 3)) if dimension == "local" else ((0, 2), (1, 3))
    for number, group in enumerate(groups):
        alone = train(TwoLayers(), [batch(2 * ROWS_PER_RANK, step + STEPS * number) for step in range(STEPS)])
        assert_same_training(alone, [ranks[rank] for rank in group])
