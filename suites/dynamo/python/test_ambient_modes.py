"""Modes that are on where compiled code is called, and that its own modes change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def _off(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    with torch.autocast(x.device.type, enabled=False):
        return _summed(y.float() @ w)


def _on_again(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = _summed(x @ w)
        with torch.autocast(x.device.type, torch.bfloat16):
            return y @ w


def _other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.float16):
        return _summed(x @ w)


STEPS: list[Step] = [_off, _on_again, _other]


@requirement(
    "DYN-MODE-5000",
    "Compiled code that is called with autocast on or off casts what uncompiled code casts, whatever its own autocast "
    "excludes.",
    source="torch.autocast; torch.compile: the compiled function does what the function does",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(2)
def test_autocast(world: World, backend: str) -> None:
    """Turn autocast off, on again, or to another dtype; with gradients and without."""

    def seen(step: Any, rank: Rank, ambient: bool, trained: bool) -> list[Any]:
        # a number that bfloat16 and float16 round
        x = torch.full((2, 2), 1 + 2.0**-12, device=rank.device)
        w = torch.full((2, 2), 1.5, device=rank.device, requires_grad=trained)
        with torch.autocast(rank.device.type, torch.bfloat16, enabled=ambient):
            y = step(x, w)
        if trained:
            y.float().sum().backward()
        # a compiled backward casts as its forward was called; an uncompiled one casts as each operation was called
        return [str(y.dtype), y.tolist(), None if w.grad is None or ambient else w.grad.tolist()]

    def body(rank: Rank) -> list[str]:
        wrong = []
        for step in STEPS:
            compiled = dynamo.compiled(step, backend=backend)[0]
            for ambient, trained in ((True, True), (True, False), (False, True)):
                right, found = (seen(each, rank, ambient, trained) for each in (step, compiled))
                if found != right:
                    what = f"{step.__name__.strip('_')}, {ambient=}, {trained=}"
                    wrong.append(f"{what}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
