"""The cost of a training step on each stack, and how much of its communication is hidden behind compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness import World, requirement
from harness.bench.measuring.stepping import timed_on
from harness.bench.measuring.steps import BUCKETS, SYNCED, Step, accumulating, bucketed
from harness.plugin.perf import Perf
from harness.profiles.obeyed import in_force

timed = requirement(
    "PERF-STEP-01",
    "A timed training step gives correct gradients.",
    source="torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp",
)
alike = requirement(
    "PERF-STEP-02",
    "Every rank launches the same number of collectives in a timed training step.",
    source="torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp",
)


@timed
@alike
@pytest.mark.world(2, 4, record=False, exclusive="measured", timeout=180)
@pytest.mark.each_choice
def test_steps(world: World, eager_step: Step, perf: Perf) -> None:
    """Time eager steps; with ``--perf-more overlap``, also with more compute to hide communication behind."""
    perf.keep(*timed_on(world, eager_step, perf.effort))


@timed
@alike
@pytest.mark.world(2, record=False, exclusive="measured", timeout=300)
def test_compiled_steps(world: World, compiled_step: Step, perf: Perf) -> None:
    """Compile with Inductor if time is measured and the profile claims it; otherwise only trace."""
    generates = not in_force().claims.lacks_features("dynamo", ["inductor"])
    compiler = "inductor" if perf.enabled and generates else "aot_eager"
    perf.keep(*timed_on(world, replace(compiled_step, compiler=compiler), perf.effort))


@timed
@alike
@pytest.mark.parametrize("synced", [True, False], ids=["every", "last"])
@pytest.mark.parametrize("stack", SYNCED)
@pytest.mark.world(2, record=False, exclusive="measured")
@pytest.mark.each_choice
def test_accumulation(world: World, stack: str, synced: bool, perf: Perf) -> None:
    """Of four micro-batches, average each or only the last."""
    perf.keep(*timed_on(world, accumulating(stack, synced=synced), perf.effort))


@timed
@alike
@pytest.mark.parametrize("capacity", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.world(2, record=False, exclusive="measured")
def test_buckets(world: World, capacity: float, perf: Perf) -> None:
    """Use one bucket for the whole model, or several."""
    perf.keep(*timed_on(world, bucketed(capacity), perf.effort))
