"""all_reduce."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import OPS, dtypes_of, repeated, shaped, swept


@requirement(
    "COLL-ALLREDUCE-01",
    "After all_reduce every rank holds the reduction of all ranks' tensors, whatever the op, dtype or count.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_every_rank_has_the_reduction(world: World, op: str, thorough: bool) -> None:
    """Compare every dtype at many counts with an exact fold, bit for bit."""
    assert_right(world, swept(Case("all_reduce", op), dtypes_of(op), thorough))


@requirement(
    "COLL-ALLREDUCE-02",
    "Repeated calls of all_reduce are correct for tensors of any shape, including empty or zero-dimensional ones.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.world(1, 2, 3, 4)
def test_shapes(world: World) -> None:
    """Tensors have up to three dimensions, and two calls have different data."""
    assert_right(world, shaped(Case("all_reduce", repeats=2)))


@requirement(
    "COLL-ALLREDUCE-03",
    "Repeated calls of all_reduce are correct for large tensors.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.world(2, 3)
def test_large_and_repeated(world: World, thorough: bool) -> None:
    """Sizes exceed protocol switches, and every call has different data."""
    assert_right(world, repeated(Case("all_reduce"), thorough))
