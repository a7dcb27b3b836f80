"""broadcast."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import DTYPES, for_every_root, repeated, shaped, swept


@requirement(
    "COLL-BROADCAST-01",
    "After broadcast every rank holds the source's tensor, whatever the dtype or count.",
    source="torch.distributed.broadcast",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_every_rank_has_the_source_tensor(world: World, thorough: bool) -> None:
    """Test every dtype at many counts, any bits; the last rank is the source."""
    assert_right(world, swept(Case("broadcast", root=world.size - 1), DTYPES, thorough))


@requirement(
    "COLL-BROADCAST-02",
    "Any rank can be the source of broadcast, given by its global rank or by its rank in the group.",
    source="torch.distributed.broadcast",
)
@pytest.mark.world(1, 2, 3, 4)
def test_every_source(world: World) -> None:
    """Each rank in turn is the source, in two calls with different data."""
    assert_right(world, for_every_root(Case("broadcast", repeats=2), world.size))


@requirement(
    "COLL-BROADCAST-03",
    "Repeated calls of broadcast are correct for tensors of any shape or size.",
    source="torch.distributed.broadcast",
)
@pytest.mark.world(2, 3)
def test_shapes_and_sizes(world: World, thorough: bool) -> None:
    """Tensors have up to three dimensions; large tensors are sent repeatedly."""
    assert_right(world, [*shaped(Case("broadcast", root=1)), *repeated(Case("broadcast", root=1), thorough)])
