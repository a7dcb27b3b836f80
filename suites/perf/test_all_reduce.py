"""The cost of all_reduce: sizes, dtypes, ops, in and out of place, asynchronous, in subgroups."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.bench.measuring.collectives import Timed, timed_on
from harness.bench.measuring.sweeps import FORMS, RANKS, VALUES, described, two_levels
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
@pytest.mark.world(4, record=False, warm=True, exclusive="measured")
def test_subgroups(world: World, within: Timed, perf: Perf) -> None:
    """Time a group of two of four ranks."""
    perf.keep(timed_on(world, within, perf.effort))


@timed
@possible
@pytest.mark.world(2, record=False, warm=True, exclusive="measured")
def test_further_dtypes(world: World, further_dtype: Timed, perf: Perf) -> None:
    """Time dtypes that few models send; with ``--perf-more dtypes``, every one that the profile claims."""
    perf.keep(timed_on(world, further_dtype, perf.effort))


@requirement(
    "PERF-HSDP-01",
    "HSDP's reduction on two levels gives every rank its shard of the sum of all ranks.",
    source="torch.distributed.fsdp.fully_shard: mesh",
)
@possible
@pytest.mark.needs(collective="reduce_scatter_tensor", dtype="float32", op="SUM")
@pytest.mark.world(4, record=False, warm=True, exclusive="measured")
def test_two_levels(world: World, gradients: int, perf: Perf) -> None:
    """Time a reduce_scatter within each replica, and an all_reduce between replicas."""
    perf.keep(timed_on(world, two_levels(gradients, world.size, world.spec.hosts), perf.effort))
