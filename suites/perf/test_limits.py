"""The physical limit of what is timed: memory, and the link if the profile knows it."""

from __future__ import annotations

import pytest

from harness import World, requirement
from harness.bench.measuring.limits import timed_on
from harness.bench.measuring.sweeps import RANKS
from harness.plugin.perf import Perf, link_of


@requirement(
    "PERF-LIMIT-01",
    "Ranks that copy memory at the same time have correct copies.",
    source="torch.Tensor.copy_",
)
@pytest.mark.world(*RANKS, record=False, warm=True, exclusive="measured")
def test_memory(world: World, perf: Perf, pytestconfig: pytest.Config) -> None:
    """Time copies on all ranks at once, to which bandwidths of collectives are compared."""
    perf.keep(*timed_on(world, perf.effort, link_of(pytestconfig)))
