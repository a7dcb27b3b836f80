"""The cost of the messages of real models: buckets of DistributedDataParallel and units of FSDP."""

from __future__ import annotations

import pytest

from harness import World, requirement, unsupported
from harness.bench.measuring.collectives import timed_on
from harness.bench.measuring.payloads import Payload
from harness.bench.measuring.sweeps import RANKS
from harness.plugin.perf import Perf, room_for
from harness.results import TooLittleMemory


@requirement(
    "PERF-MODELS-01",
    "A bucket or a unit of a model's size is reduced or gathered with correct values while it is timed.",
    source="torch.nn.parallel.DistributedDataParallel: bucket_cap_mb; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.world(*RANKS, record=False, warm=True, exclusive="measured", timeout=300)
def test_models(world: World, payload: Payload, perf: Perf, pytestconfig: pytest.Config) -> None:
    """Time one message; with ``--perf-more models``, those of all models that fit into memory."""
    timed, room = payload.timed(world.size), room_for(pytestconfig, world)
    if timed.bytes > room:
        unsupported(TooLittleMemory(timed.payload, timed.bytes, room))
    perf.keep(timed_on(world, timed, perf.effort))
