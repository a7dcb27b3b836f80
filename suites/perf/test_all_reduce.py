"""The cost of all_reduce: sizes, dtypes, ops, in and out of place, asynchronous, in subgroups."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.bench.measuring.collectives import Timed, timed_on
from harness.bench.measuring.sweeps import FORMS, RANKS, SUBGROUPS, VALUES, described
from harness.plugin.perf import Perf

timed = requirement(
    "PERF-ALLREDUCE-01",
    "all_reduce gives correct values at every size while it is timed.",
    source="nccl-tests: doc/PERFORMANCE.md",
)
possible = requirement(
    "PERF-ALLREDUCE-02",
    "A timed all_reduce takes at least as long as a copy of the data that it receives.",
    source="nccl-tests: doc/PERFORMANCE.md",
)


@timed
@possible
@pytest.mark.needs(collective="all_reduce", dtype="float32", op="SUM")
@pytest.mark.world(*RANKS, record=False, warm=True, exclusive="measured")
def test_sizes(world: World, size: int, perf: Perf) -> None:
    """Time float32 from 8 B to the largest size, with more sizes around 1 MiB."""
    perf.keep(timed_on(world, Timed("all_reduce", size), perf.effort))


@timed
@possible
@pytest.mark.parametrize("timed", VALUES, ids=described)
@pytest.mark.world(2, record=False, warm=True, exclusive="measured")
def test_dtypes_and_ops(world: World, timed: Timed, perf: Perf) -> None:
    """Time other dtypes and reductions, small or large."""
    perf.keep(timed_on(world, timed, perf.effort))


@timed
@possible
@pytest.mark.parametrize("timed", FORMS, ids=described)
@pytest.mark.world(2, record=False, warm=True, exclusive="measured")
def test_forms(world: World, timed: Timed, perf: Perf) -> None:
    """Time asynchronous calls, several calls in flight, and calls out of place."""
    perf.keep(timed_on(world, timed, perf.effort))


@timed
@possible
@pytest.mark.parametrize("timed", SUBGROUPS, ids=described)
@pytest.mark.world(4, record=False, warm=True, exclusive="measured")
def test_subgroups(world: World, timed: Timed, perf: Perf) -> None:
    """Time a group of two of four ranks."""
    perf.keep(timed_on(world, timed, perf.effort))
