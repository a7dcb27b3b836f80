"""gather and scatter."""

from __future__ import annotations

import pytest
import torch

from harness import World, requirement
from harness.oracles.collectives import COMPLEX, Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import DTYPES, for_every_root, repeated, shaped, swept


@requirement(
    "COLL-GATHER-01",
    "After gather the destination holds every rank's tensor, in group order, whatever the dtype or count.",
    source="torch.distributed.gather",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_gather(world: World, thorough: bool) -> None:
    """Test every real dtype at many counts; the last rank is the destination."""
    real = [dtype for dtype in DTYPES if not dtype.is_complex]
    assert_right(world, swept(Case("gather", root=world.size - 1), real, thorough))


@requirement(
    "COLL-GATHER-02",
    "gather accepts complex tensors.",
    source="torch.distributed.gather",
)
@pytest.mark.parametrize("dtype", COMPLEX, ids=["complex64", "complex128"])
@pytest.mark.world(2)
def test_gather_complex(world: World, dtype: torch.dtype) -> None:
    """gather accepts what all_gather and scatter accept."""
    assert_right(world, [Case("gather", dtype=dtype)])


@requirement(
    "COLL-GATHER-03",
    "Any rank can be the destination of gather, for tensors of any shape or size.",
    source="torch.distributed.gather",
)
@pytest.mark.world(1, 2, 3, 4)
def test_gather_roots_and_shapes(world: World, thorough: bool) -> None:
    """Each rank in turn is the destination, given by either rank; all shapes; large tensors."""
    base = Case("gather", repeats=2)
    assert_right(world, [*for_every_root(base, world.size), *shaped(base), *repeated(base, thorough)])


@requirement(
    "COLL-SCATTER-01",
    "After scatter each rank holds its own tensor of the source's list, whatever the dtype or count.",
    source="torch.distributed.scatter",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_scatter(world: World, thorough: bool) -> None:
    """Test every dtype at many counts; the last rank is the source."""
    assert_right(world, swept(Case("scatter", root=world.size - 1), DTYPES, thorough))


@requirement(
    "COLL-SCATTER-02",
    "Any rank can be the source of scatter, for tensors of any shape or size.",
    source="torch.distributed.scatter",
)
@pytest.mark.world(1, 2, 3, 4)
def test_scatter_roots_and_shapes(world: World, thorough: bool) -> None:
    """Each rank in turn is the source, given by either rank; all shapes; large tensors."""
    base = Case("scatter", repeats=2)
    assert_right(world, [*for_every_root(base, world.size), *shaped(base), *repeated(base, thorough)])
