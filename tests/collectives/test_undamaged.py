"""The tests that find damages pass where there is none.

The suites have said so already of most of them, so this is the nightly job's.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fixtures.faults.collectives.catalog import CATALOG
from harness import World
from tests.collectives import found, found_relatives
from tests.collectives.broken import changed
from tests.collectives.finding import Finding

ONCE = list(
    {
        f"{f.test.__module__}.{f.test.__name__}{f.size}{f.arguments}": f for f in (*found.FOUND, *found_relatives.FOUND)
    }.values()
)


def of_size(size: int) -> pytest.MarkDecorator:
    """A parameter for every test in a world of a size."""
    some = [finding for finding in ONCE if finding.size == size]
    names = [f"{f.test.__name__}-{'-'.join(map(str, f.arguments.values()))}" for f in some]
    return pytest.mark.parametrize("finding", some, ids=[name.replace(" ", "") for name in names])


@pytest.mark.nightly
@pytest.mark.world(1)
@of_size(1)
def test_alone(world: World, finding: Finding) -> None:
    """Passes with one rank."""
    finding.run_undamaged(world)


@pytest.mark.nightly
@pytest.mark.world(2)
@of_size(2)
def test_two(world: World, finding: Finding) -> None:
    """Passes with two ranks."""
    finding.run_undamaged(world)


@pytest.mark.nightly
@pytest.mark.world(3)
@of_size(3)
def test_three(world: World, finding: Finding) -> None:
    """Passes with three ranks."""
    finding.run_undamaged(world)


@pytest.mark.nightly
@pytest.mark.world(4)
@of_size(4)
def test_four(world: World, finding: Finding) -> None:
    """Passes with four ranks."""
    finding.run_undamaged(world)


@pytest.mark.nightly
@pytest.mark.world(6)
@of_size(6)
def test_six(world: World, finding: Finding) -> None:
    """Passes with six ranks."""
    finding.run_undamaged(world)


def test_damages_are_taken_back() -> None:
    """After a damage a process has torch's own functions again."""
    right = dist.all_reduce
    with changed(CATALOG["AVG does not divide"]):
        assert dist.all_reduce is not right
    assert dist.all_reduce is right
