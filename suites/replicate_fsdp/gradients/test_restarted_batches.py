"""Gradient accumulation that an error ends, and that starts again."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.layers import alone, layers, row, train
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement


class Interrupted(Exception):
    """What interrupts a forward."""


def interrupt(*args: Any) -> None:
    """Interrupt the forward in which this hook is called."""
    raise Interrupted


@requirement(
    "RFSDP-RESET-5241",
    "After an error in a later micro-batch, reset_iter_state discards the gradients of earlier ones.",
    source="torch.distributed.fsdp.FSDPModule.reset_iter_state: 'including HSDP partial-reduce-accumulation state and "
    "no_sync grad-accumulation state'",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.world(2)
def test_restart(world: World, switch: str) -> None:
    """Hold the first micro-batch back, fail in the second one, reset, and run a step."""

    def body(rank: Rank) -> dict[str, list[list[float]]]:
        found = {}
        for way in ("replicated", "hybrid"):
            model: Any = layers(rank.device)
            managed = ways(rank)[way]
            for module in (*model, model):
                managed(module)
            getattr(model, switch)(False)
            model(row(rank.index).to(rank.device)).sum().backward()
            hook = model[1].register_forward_pre_hook(interrupt)
            with pytest.raises(Interrupted):
                model(row(rank.index).to(rank.device))
            hook.remove()
            model.reset_iter_state()
            model.zero_grad()
            getattr(model, switch)(True)
            found[way] = train(model, rank.index)
        return found

    assert_on_ranks([dict.fromkeys(("replicated", "hybrid"), alone(2))] * 2, world.run(body))
