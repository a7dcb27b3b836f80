"""Modes such as no_grad and autocast end in compiled code where they end in uncompiled code, whatever ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

Mode = Callable[[], AbstractContextManager[Any]]

MODES: dict[str, Callable[[str], Any]] = {
    "no_grad": lambda device: torch.no_grad(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
}
"""Modes by name, for the type of a device."""


def _refused(x: torch.Tensor) -> torch.Tensor:
    """Refuse a batch, as a check of what a rank is given does."""
    raise ValueError("no such batch")


def _scales(mode: Mode) -> Iterator[float]:
    """Give the scales of parts of a batch."""
    with mode():
        yield 2.0
        yield 3.0


def _with(x: torch.Tensor, mode: Mode) -> Any:
    with mode():
        return x * 2


def _with_that_raises(x: torch.Tensor, mode: Mode) -> Any:
    try:
        with mode():
            return _refused(x)
    except ValueError:
        return x


def _stack(x: torch.Tensor, mode: Mode) -> Any:
    with ExitStack() as stack:
        stack.enter_context(mode())
        return x * 2


def _explicit(x: torch.Tensor, mode: Mode) -> Any:
    context = mode()
    context.__enter__()
    y = x * 2
    context.__exit__(None, None, None)
    return y


def _decorated(x: torch.Tensor, mode: Any) -> Any:
    return mode()(lambda given: given * 2)(x)


def _decorated_that_raises(x: torch.Tensor, mode: Any) -> Any:
    check = mode()(_refused)
    try:
        return check(x)
    except ValueError:
        return x


def _generator(x: torch.Tensor, mode: Mode) -> Any:
    for scale in _scales(mode):
        x = x.detach() * scale
    return x


def _generator_left(x: torch.Tensor, mode: Mode) -> Any:
    for scale in _scales(mode):
        x = x.detach() * scale
        break
    return x


WAYS: list[Callable[[torch.Tensor, Any], Any]] = [
    _with,
    _with_that_raises,
    _stack,
    _explicit,
    _decorated,
    _decorated_that_raises,
    _generator,
    _generator_left,
]
"""How code has a mode for a part of what it does."""


@requirement(
    "DYN-MODE-2900",
    "After compiled code has left no_grad or autocast, in whatever way, losses have the gradients and dtypes of "
    "uncompiled code.",
    source="torch.no_grad; torch.autocast; torch.compile: the compiled function does what the function does",
)
@requirement(
    "DYN-MODE-2901",
    "Compiled code that enters a mode and leaves it changes the mode of no code that runs after it.",
    source="torch.no_grad: thread local; torch.autocast; torch.compile",
)
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__.strip("_").replace("_", "-") for way in WAYS])
@pytest.mark.world(2)
def test_left(world: World, way: Callable[[torch.Tensor, Any], Any]) -> None:
    """Leave a mode before the loss is computed, whose gradient is summed over ranks, and look at the modes."""

    def trained(step: Callable[..., Any], rank: Rank) -> list[Any]:
        x = torch.full((2, 2), float(rank.index + 1), device=rank.device)
        w = torch.full((2, 2), 1.5, device=rank.device, requires_grad=True)
        loss = step(x, w)
        seen: list[Any] = [torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type), str(loss.dtype)]
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            if loss.requires_grad:
                loss.float().sum().backward()
            gradient = torch.zeros_like(x) if w.grad is None else w.grad
            seen += (gradient + functional.all_reduce(gradient, "sum", dist.group.WORLD)).flatten().tolist()
        return seen

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, make in MODES.items():

            def step(x: torch.Tensor, w: torch.Tensor, make: Callable[[str], Any] = make) -> torch.Tensor:
                y = way(x, lambda: make(x.device.type))
                return torch.mm(y, w)

            right = trained(step, rank)
            try:
                found = trained(dynamo.compiled(step, backend="eager", fullgraph=False)[0], rank)
            except Exception as error:  # uncompiled code raises none
                found = [repr(error)[:200]]
            torch.set_grad_enabled(True)
            torch.set_autocast_enabled(rank.device.type, False)
            if found != right:
                wrong.append(f"{name}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


DECORATORS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "no_grad, not called": lambda: torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
    "set_grad_enabled(True)": lambda: torch.set_grad_enabled(True),
}
"""Decorators that give a function its own gradient mode."""


def _decorating(decorator: Callable[[], Any], calls: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return a step that decorates a function and calls it so many times, before and after it uses a weight."""

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        def scaled(given: torch.Tensor) -> torch.Tensor:
            return given * w

        before = x * w
        scaled = decorator()(scaled)
        between = x * w
        results = [scaled(x) for _ in range(calls)]
        return [torch.is_grad_enabled(), *(y.requires_grad for y in (before, between, *results, x * w))], between

    return step


@requirement(
    "DYN-MODE-3350",
    "In compiled code, a function that is decorated with a gradient mode has this mode, but the code around it does "
    "not.",
    source="torch.no_grad: 'also functions as a decorator'; torch.set_grad_enabled; torch.compile",
)
@pytest.mark.world(2)
def test_decorated(world: World) -> None:
    """Decorate a function within the code, with gradients or without, and call it never, once or twice."""

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(2, device=rank.device), []
        for name, decorator in DECORATORS.items():
            for calls in range(3):
                step = _decorating(decorator, calls)
                compiled = dynamo.compiled(step, backend="eager")[0]
                for enabled in (True, False) if calls == 1 else (True,):
                    found = []
                    for call in (step, compiled):
                        w = torch.full((2,), rank.index + 1.0, device=rank.device, requires_grad=True)
                        with torch.set_grad_enabled(enabled):
                            asked, y = call(x, w)
                        if y.requires_grad:
                            functional.all_reduce(y, "sum", dist.group.WORLD).sum().backward()
                        found.append((asked, None if w.grad is None else w.grad.tolist()))
                    if found[0] != found[1]:
                        wrong.append(f"{name}, {calls} calls, {enabled=}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class Subtracting(TorchFunctionMode):
    """Subtracts where torch.add is called, and so does the same if it is entered twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sub if func is torch.add else func)(*args, **(kwargs or {}))


BROKEN = MODES | {
    # before 2.13, a graph cannot break twice in a function's mode
    **({} if runs_with("<2.13") else {"function mode": lambda device: Subtracting()}),
    "enable_grad": lambda device: torch.enable_grad(),
    "set_grad_enabled": lambda device: torch.set_grad_enabled(False),
    "autocast to float16": lambda device: torch.autocast(device, dtype=torch.float16),
    "no autocast": lambda device: torch.autocast(device, enabled=False),
    "no autocast to bfloat16": lambda device: torch.autocast(device, torch.bfloat16, False, False),
}
"""Modes that hold on both sides of a graph break."""


@requirement(
    "DYN-MODE-3300",
    "A mode that compiled code enters holds for all of its block, also after the graph breaks there.",
    source="torch.no_grad; torch.autocast; torch.overrides.TorchFunctionMode; torch.compile: fullgraph=False",
)
@pytest.mark.parametrize("mode", BROKEN)
@pytest.mark.world(2)
def test_graph_breaks(world: World, mode: str) -> None:
    """Add and multiply in a block, between its graph breaks, and after it unless the mode changes functions."""

    def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = functional.all_reduce(x, "sum", dist.group.WORLD)
        results = []
        with BROKEN[mode](x.device.type):
            results.append(torch.add(torch.mm(y, w), 1))
            dynamo.graph_break()
            results.append(torch.add(torch.mm(y, w), 3))
            dynamo.graph_break()
            results.append(torch.mm(torch.add(y, w), w))
        return results if mode == "function mode" else [*results, torch.mm(y, w)]

    def body(rank: Rank) -> None:
        x = torch.full((2, 2), float(rank.index + 1), device=rank.device)
        w = torch.full((2, 2), 1.5, device=rank.device, requires_grad=True)
        compiled, _ = dynamo.compiled(step, backend="eager", fullgraph=False)
        with torch.autocast(rank.device.type, torch.bfloat16, enabled=mode.startswith("no autocast")):
            right, *found = [
                [(str(y.dtype), y.requires_grad, y.tolist()) for y in function(x, w)]
                for function in (step, compiled, compiled)
            ]
        assert found == [right, right]

    world.run(body)
