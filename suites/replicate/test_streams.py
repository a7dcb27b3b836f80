"""Training on a stream of its own under composable DDP."""

from __future__ import annotations

import pytest

from fixtures import late_inputs
from harness import Rank, World, requirement
from harness.stacks import replicate


@requirement(
    "REPL-STREAM-01",
    "On another than the default stream a training step comes after what was queued there, and what is queued there "
    "afterwards comes after it.",
    source="torch/distributed/_composable/replicate.py",
)
@pytest.mark.world(2)
def test_late_inputs(world: World) -> None:
    """Three steps; gradients are those of one device."""

    def body(rank: Rank) -> list[late_inputs.Step]:
        model = replicate.apply(late_inputs.model(), rank)
        return late_inputs.on_a_stream(rank, model, replicate.gradients)

    assert world.run(body) == [late_inputs.on_one_device(world.size)] * world.size
