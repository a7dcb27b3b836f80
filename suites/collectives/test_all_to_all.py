"""all_to_all and all_to_all_single."""

from __future__ import annotations

import pytest
import torch

from harness import World, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import DTYPES, repeated, shaped, swept


@requirement(
    "COLL-ALLTOALL-01",
    "After all_to_all rank i holds the i-th tensor of every rank's list, in group order.",
    source="torch.distributed.all_to_all",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_of_lists(world: World, thorough: bool) -> None:
    """Test every dtype at many counts."""
    assert_right(world, [*swept(Case("all_to_all"), DTYPES, thorough), *shaped(Case("all_to_all", repeats=2))])


@requirement(
    "COLL-ALLTOALL-02",
    "After all_to_all_single without split sizes rank i holds the i-th equal chunk of every rank's tensor, in "
    "group order.",
    source="torch.distributed.all_to_all_single",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_of_tensors(world: World, thorough: bool) -> None:
    """Test every dtype at many counts; shapes with dimensions after the split one."""
    base = Case("all_to_all_single")
    assert_right(world, [*swept(base, DTYPES, thorough), *shaped(base, [(1,), (3, 5), (2, 0, 3), (1, 4, 2, 3)])])


@requirement(
    "COLL-ALLTOALL-03",
    "all_to_all and all_to_all_single exchange chunks of different sizes, including empty ones.",
    source="torch.distributed.all_to_all_single: input_split_sizes",
)
@pytest.mark.parametrize("collective", ["all_to_all", "all_to_all_single"])
@pytest.mark.world(1, 2, 3, 4)
def test_uneven(world: World, collective: str) -> None:
    """Chunks have 0, 1 or 2 rows, which differ in every call."""
    assert_right(world, shaped(Case(collective, uneven=True, repeats=3), [(1,), (1, 3), (1, 2, 2), (1, 0)]))


@requirement(
    "COLL-ALLTOALL-05",
    "all_to_all_single with split sizes accepts complex tensors.",
    source="torch.distributed.all_to_all_single: an example of it has complex tensors",
)
@pytest.mark.world(2)
def test_uneven_complex(world: World) -> None:
    """Exchange complex64 numbers in uneven chunks."""
    assert_right(world, [Case("all_to_all_single", uneven=True, dtype=torch.complex64, shape=(1, 2))])


@requirement(
    "COLL-ALLTOALL-04",
    "Repeated calls of all_to_all or all_to_all_single are correct for large tensors.",
    source="torch.distributed.all_to_all_single",
)
@pytest.mark.world(2, 3)
def test_large_and_repeated(world: World, thorough: bool) -> None:
    """Sizes exceed protocol switches, and every call has different data."""
    assert_right(world, [*repeated(Case("all_to_all"), thorough), *repeated(Case("all_to_all_single"), thorough)])
