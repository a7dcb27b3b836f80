"""reduce."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import OPS, dtypes_of, for_every_root, repeated, shaped, swept


@requirement(
    "COLL-REDUCE-01",
    "After reduce the destination holds the reduction of all ranks' tensors, whatever the op, dtype or count.",
    source="torch.distributed.reduce",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 5)
def test_destination_has_the_reduction(world: World, op: str, thorough: bool) -> None:
    """Test every dtype at many counts; the last rank is the destination."""
    assert_right(world, swept(Case("reduce", op, root=world.size - 1), dtypes_of(op), thorough))


@requirement(
    "COLL-REDUCE-02",
    "Any rank can be the destination of reduce, given by its global rank or by its rank in the group.",
    source="torch.distributed.reduce",
)
@pytest.mark.world(1, 2, 3, 4)
def test_every_destination(world: World) -> None:
    """Each rank in turn is the destination."""
    assert_right(world, for_every_root(Case("reduce", repeats=2), world.size))


@requirement(
    "COLL-REDUCE-03",
    "Repeated calls of reduce are correct for tensors of any shape or size.",
    source="torch.distributed.reduce",
)
@pytest.mark.world(2, 3)
def test_shapes_and_sizes(world: World, thorough: bool) -> None:
    """Test shapes from none to three dimensions; large tensors, repeated."""
    assert_right(world, [*shaped(Case("reduce", root=1)), *repeated(Case("reduce", root=1), thorough)])
