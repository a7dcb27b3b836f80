"""Calls that FSDP1 refuses: in a forward, in a backward, while parameters are whole, or of a module inside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from fixtures.wrapped import STRATEGIES, Outer, Weight, inputs, own, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


def entered(context: Any) -> None:
    """Enter a context and leave it."""
    with context:
        pass


CALLS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda model: model.clip_grad_norm_(1.0),
    "no_sync": lambda model: entered(model.no_sync()),
    "apply": lambda model: model.apply(lambda module: None),
    "summon": lambda model: entered(FullyShardedDataParallel.summon_full_params(model)),
}


class Calling(Outer):
    """Such a module, which calls a function in its forward and in its backward."""

    function: Callable[[str], None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result, as if it called nothing."""
        self.function("forward")
        y = super().forward(x)
        y.register_hook(lambda gradient: self.function("backward"))
        return y + 0


@requirement(
    "TP-CALLS-4302",
    "FSDP raises an error for clip_grad_norm_, no_sync, apply or summon_full_params in a forward, in a backward or "
    "while parameters are whole, and trains on.",
    source=f"{SOURCE}: clip_grad_norm_, no_sync, apply, summon_full_params",
)
@requirement(
    "TP-CALLS-4303",
    "FSDP raises an error for clip_grad_norm_ or no_sync of a module inside another FSDP module.",
    source=f"{SOURCE}: clip_grad_norm_, no_sync",
)
@pytest.mark.world(2)
def test_refused_calls(world: World) -> None:
    """Make each call at each of these times, then train."""

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {original=}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            inner = wrapped(rank, Weight(4, 3.0), **options)
            module = Calling(8, 5.0, inner)
            model = wrapped(rank, module, **options)
            seen: list[tuple[str, str]] = []

            def refused(when: str, model: Any = model, seen: Any = seen) -> None:
                for name, call in CALLS.items():
                    with pytest.raises((ValueError, AssertionError)):
                        call(model)
                    seen.append((when, name))

            module.function = refused
            model(inputs(rank)).sum().backward()
            with FullyShardedDataParallel.summon_full_params(model):
                refused("whole")
            assert seen == [(when, name) for when in ("forward", "backward", "whole") for name in CALLS], what
            for name in "clip", "no_sync":
                with pytest.raises(RuntimeError, match="root"):
                    CALLS[name](inner)
            module.function = lambda when: None
            model(inputs(rank)).sum().backward()
            assert own(model) == {9.0, 15.0}, f"{what}: {own(model)}"
            for call in CALLS.values():
                call(model)

    world.run(body)
