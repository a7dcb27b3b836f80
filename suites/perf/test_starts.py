"""The cost of cold starts."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.bench.measuring.starts import timed_on
from harness.plugin.perf import Perf


@requirement(
    "PERF-START-01",
    "The first all_reduce of fresh ranks, of a new group or of a group made again gives correct values.",
    source="torch.distributed.init_process_group; torch.distributed.new_group",
)
@pytest.mark.needs(collective="all_reduce", dtype="float32", op="SUM")
@pytest.mark.world(2, record=False, warm=False, exclusive="measured")
def test_starts(world: World, perf: Perf) -> None:
    """Time the first collective of fresh ranks, of a new group, and of the default group made again."""
    perf.keep(*timed_on(world, perf.effort))
