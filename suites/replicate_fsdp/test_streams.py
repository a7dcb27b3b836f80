"""Training on a non-default stream under FSDP-replicate."""

from __future__ import annotations

import pytest

from fixtures import late_inputs
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp


@requirement(
    "RFSDP-STREAM-01",
    "On a non-default stream, a training step runs after the work queued before it.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState",
)
@requirement(
    "RFSDP-STREAM-02",
    "On a non-default stream, work queued after a training step runs after the step.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState",
)
@pytest.mark.world(2)
def test_late_inputs(world: World) -> None:
    """Gradients of three steps equal those of one device."""

    def body(rank: Rank) -> list[late_inputs.Step]:
        model = replicate_fsdp.apply(late_inputs.model(), rank)
        return late_inputs.on_a_stream(rank, model, replicate_fsdp.gradients)

    assert_on_ranks([late_inputs.on_one_device(world.size)] * world.size, world.run(body))
