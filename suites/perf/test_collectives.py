"""The cost of the other collectives."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.bench.measuring.collectives import Timed, timed_on
from harness.bench.measuring.sweeps import COLLECTIVES, RANKS, described
from harness.plugin.perf import Perf


@requirement(
    "PERF-COLLECTIVES-01",
    "Every collective gives correct values while it is timed.",
    source="nccl-tests: doc/PERFORMANCE.md",
)
@requirement(
    "PERF-COLLECTIVES-02",
    "A timed collective takes at least as long as a copy of the data that it receives.",
    source="nccl-tests: doc/PERFORMANCE.md",
)
@pytest.mark.parametrize("timed", COLLECTIVES, ids=described)
@pytest.mark.world(*RANKS, record=False, warm=True, exclusive="measured")
def test_collectives(world: World, timed: Timed, perf: Perf) -> None:
    """Time float32 at three sizes."""
    perf.keep(timed_on(world, timed, perf.effort))
