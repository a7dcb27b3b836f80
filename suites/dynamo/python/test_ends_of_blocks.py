"""Modes of a block or of a called object begin and end in compiled code where they do in uncompiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness import Rank, World, requirement
from suites.dynamo.objects import summed, unlike


class Tens(TorchFunctionMode):
    """Multiplies by ten where torch.add is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.mul(args[0], 10) if func is torch.add else func(*args, **(kwargs or {}))


@torch.compiler.disable
def _unseen(x: torch.Tensor) -> torch.Tensor:
    """Return what is given, which the compiler does not see."""
    return x


def _whole(x: torch.Tensor) -> torch.Tensor:
    with Tens():
        x = torch.add(x, 1)
    return torch.add(x, 1)


def _broken(x: torch.Tensor) -> torch.Tensor:
    with Tens():
        x = _unseen(torch.add(x, 1))
        x = torch.add(x, 1)
    return torch.add(x, 1)


@requirement(
    "DYN-MODE-3754",
    "In compiled code, a torch function mode is off after its block, also if the graph breaks in the block.",
    source="torch.overrides.TorchFunctionMode; torch.compile: the compiled function does what the function does",
)
@pytest.mark.parametrize("block", [_whole, _broken], ids=["whole", "broken"])
@pytest.mark.world(2)
def test_function_modes(world: World, block: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Add within the block and after it, to a sum over ranks."""
    cases = {"block": (lambda x: block(summed(x)), ())}
    for wrong in world.run(lambda rank: unlike(rank, cases)):
        assert not wrong, "\n".join(wrong)


def _as_entered(x: torch.Tensor) -> tuple[bool, ...]:
    with torch.no_grad():
        with torch.enable_grad():
            inner = x * 2
        outer = x * 3
    return inner.requires_grad, outer.requires_grad, (x * 4).requires_grad


def _before(x: torch.Tensor) -> tuple[bool, ...]:
    on = torch.enable_grad()
    with torch.no_grad():
        with on:
            inner = x * 2
        outer = x * 3
    return inner.requires_grad, outer.requires_grad, (x * 4).requires_grad


@requirement(
    "DYN-MODE-3755",
    "In compiled code, a gradient mode leaves at its end the mode in which it was entered, wherever it was made.",
    source="torch.enable_grad; torch.no_grad: context managers; torch.compile",
)
@pytest.mark.parametrize("way", [_as_entered, _before], ids=["as it is entered", "before"])
@pytest.mark.world(2)
def test_made_elsewhere(world: World, way: Callable[[torch.Tensor], tuple[bool, ...]]) -> None:
    """Turn gradients on within no_grad, for a product of a sum over ranks, by a context made there or before."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, tuple[bool, ...]]:
        return summed(x), way(x.clone().requires_grad_())

    for wrong in world.run(lambda rank: unlike(rank, {"way": (step, ())})):
        assert not wrong, "\n".join(wrong)


CALLABLES: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "function": lambda layer: lambda x: layer(x),
    "method": lambda layer: layer.forward,
    "module": lambda layer: layer,
    "partial": lambda layer: functools.partial(layer),
    "builtin": lambda layer: torch.neg,
}
"""What a gradient mode is given as a decorator, of a layer."""


@requirement(
    "DYN-MODE-3756",
    "In compiled code, no_grad() takes as a decorator whatever can be called, which then has no gradient.",
    source="torch.no_grad: 'Also functions as a decorator'; torch.compile",
)
@pytest.mark.parametrize("kind", CALLABLES)
@pytest.mark.world(2)
def test_decorated_callables(world: World, kind: str) -> None:
    """Call a decorated layer, or what stands for it, beside a sum over ranks."""

    def body(rank: Rank) -> list[str]:
        layer = nn.Linear(2, 2, device=rank.device)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
            x.requires_grad_()
            decorated = torch.no_grad()(CALLABLES[kind](layer))
            return summed(x.detach()), decorated(x).requires_grad

        return unlike(rank, {kind: (step, ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
