"""The cost of the other collectives."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.bench.measuring.collectives import HAVE_IN_PLACE, Timed, timed_on
from harness.plugin.perf import Perf
from suites.perf.sweeps import BANDWIDTH, OTHERS, RANKS, SIZES, described

CASES = [
    *(Timed(collective, size) for collective in OTHERS for size in SIZES),
    *(Timed(collective, BANDWIDTH, place="in") for collective in HAVE_IN_PLACE),
    *(Timed(collective, BANDWIDTH, mode="async", in_flight=4) for collective in OTHERS[:6:2]),
]


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
@pytest.mark.parametrize("timed", CASES, ids=described)
@pytest.mark.world(*RANKS, record=False, warm=True, exclusive="measured")
def test_collectives(world: World, timed: Timed, perf: Perf) -> None:
    """Time float32 at three sizes."""
    perf.keep(timed_on(world, timed, perf.effort))
