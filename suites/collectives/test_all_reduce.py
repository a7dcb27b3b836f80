"""all_reduce."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import OPS, dtypes_of, repeated, shaped, swept


@requirement(
    "COLL-ALLREDUCE-01",
    "After all_reduce every rank holds the reduction of all ranks' tensors, whatever the op, dtype and count.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_every_rank_has_the_reduction(world: World, op: str, thorough: bool) -> None:
    """Every dtype at many counts, against an exact fold, bit for bit."""
    assert_right(world, swept(Case("all_reduce", op), dtypes_of(op), thorough))


@requirement(
    "COLL-ALLREDUCE-02",
    "all_reduce reduces tensors of any shape, empty and zero-dimensional ones among them, twice as well as once.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.world(1, 2, 3, 4)
def test_shapes(world: World) -> None:
    """Shapes from none to three dimensions, two calls with different data each."""
    assert_right(world, shaped(Case("all_reduce", repeats=2)))


@requirement(
    "COLL-ALLREDUCE-03",
    "all_reduce of large tensors is right every time.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.world(2, 3)
def test_large_and_repeated(world: World, thorough: bool) -> None:
    """Sizes past protocol switches, other data in every call."""
    assert_right(world, repeated(Case("all_reduce"), thorough))
