"""Settings of a replicated module with every kind of value: set twice, unset again, on parents and on children."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from fixtures.managed import ways
from fixtures.streams import keep_busy
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch.distributed.fsdp.FSDPModule"


def step(rank: Rank, model: Any) -> dict[str, list[float]]:
    """Run one backward in which each gradient of rank r is r + 1, and return and clear the gradients."""
    model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
    gradients = {name: gradient.flatten().tolist() for name, gradient in replicate_fsdp.gradients(model).items()}
    model.zero_grad()
    return gradients


def total(size: int) -> float:
    """Return the sum over ranks of the gradients of :func:`step`."""
    return size * (size + 1) / 2


@requirement(
    "RFSDP-DIV-02",
    "Summed gradients are divided by any gradient divide factor: one, a fraction, or the number of ranks.",
    source=f"{SOURCE}.set_gradient_divide_factor",
)
@pytest.mark.parametrize("factor", [1.0, 0.5, "ranks"])
@pytest.mark.parametrize("when", ["before-the-first-forward", "after-it"])
@pytest.mark.world(1, 2, 3)
def test_any_factor(world: World, factor: float | str, when: str) -> None:
    """Set the factor before the first of two steps, or between them."""
    divisor = float(world.size if factor == "ranks" else factor)

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        model: Any = replicate_fsdp.apply(layer(), rank)
        steps = [] if when == "before-the-first-forward" else [step(rank, model)]
        model.set_gradient_divide_factor(divisor)
        return [*steps, *(step(rank, model) for _ in range(2 - len(steps)))]

    by = [divisor] * 2 if when == "before-the-first-forward" else [float(world.size), divisor]
    expected = [{"weight": [total(world.size) / each] * 4} for each in by]
    assert_on_ranks([expected] * world.size, world.run(body))


@requirement(
    "RFSDP-DIV-03",
    "If the gradient divide factor is set again, the last one counts.",
    source=f"{SOURCE}.set_gradient_divide_factor",
)
@pytest.mark.parametrize("between", [False, True], ids=["at-once", "step-between"])
@pytest.mark.world(1, 2)
def test_factor_set_twice(world: World, between: bool) -> None:
    """Set 4, then 0.5, with or without a step between."""

    def body(rank: Rank) -> dict[str, list[float]]:
        model: Any = replicate_fsdp.apply(layer(), rank)
        model.set_gradient_divide_factor(4.0)
        if between:
            step(rank, model)
        model.set_gradient_divide_factor(0.5)
        return step(rank, model)

    assert_on_ranks([{"weight": [total(world.size) / 0.5] * 4}] * world.size, world.run(body))


@requirement(
    "RFSDP-DIV-04",
    "A gradient divide factor is that of its own module, and not of the modules inside it or around it.",
    source=f"{SOURCE}: set_gradient_divide_factor, set_reduce_scatter_divide_factor",
)
@pytest.mark.parametrize("name", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
@pytest.mark.world(2)
def test_factor_of_one_module(world: World, name: str) -> None:
    """Set it for a model, for its layer, and for both, in models that have run a step or not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.own = layer(), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.child(x) + self.own * x
            return result

    everyone = total(2)
    given: list[tuple[dict[str, float], list[float]]] = [
        ({"": 4.0}, [2.0, 4.0]),
        ({"child": 0.5}, [0.5, 2.0]),
        ({"": 4.0, "child": 0.5}, [0.5, 4.0]),
        ({"child": 0.5, "": 4.0}, [0.5, 4.0]),
    ]

    def body(rank: Rank) -> None:
        for factors, divisors in given:
            for started in (False, True):
                model: Any = replicate_fsdp.apply(Model(), rank)
                if started:
                    step(rank, model)
                for where, factor in factors.items():
                    getattr(model.get_submodule(where), name)(factor)
                right = {"child.weight": [everyone / divisors[0]] * 4, "own": [everyone / divisors[1]] * 2}
                for _ in range(2):
                    assert step(rank, model) == right, f"{factors}, {started=}"

    world.run(body)


@requirement(
    "RFSDP-SYNC-03",
    "Of several calls of a switch of synchronization on a module and on its parent, the last one counts.",
    source=f"{SOURCE}: set_requires_gradient_sync, set_requires_all_reduce, recurse",
)
@pytest.mark.parametrize("switch", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize("order", ["parent-last", "child-last"])
@pytest.mark.parametrize("started", [False, True], ids=["before-the-first-forward", "after-it"])
@pytest.mark.world(2)
def test_last_switch(world: World, switch: str, order: str, started: bool) -> None:
    """Switch a parent on and its first child off, in both orders; then switch all off twice and on again."""

    def body(rank: Rank) -> list[list[str]]:
        model: Any = replicate_fsdp.apply(nn.Sequential(layer(), layer()), rank)
        if started:
            step(rank, model)
        calls = [(model[0], False), (model, True)]
        synced = []
        for module, on in calls if order == "parent-last" else reversed(calls):
            getattr(module, switch)(on)
        synced.append(sorted(step(rank, model)))
        for on in (False, False, True):
            getattr(model, switch)(on)
            synced.append(sorted(step(rank, model)))
        return synced

    both = ["0.weight", "1.weight"]

    expected = [both if order == "parent-last" else ["1.weight"], [], [], both]
    assert_on_ranks([expected] * 2, world.run(body))


SWITCHES = [(name, on) for name in ("set_requires_gradient_sync", "set_requires_all_reduce") for on in (False, True)]
"""Calls of both switches."""


@requirement(
    "RFSDP-SYNC-4887",
    "set_requires_gradient_sync switches the all-reduce as well, so of calls of both switches the last one counts.",
    source=f"{SOURCE}.set_requires_gradient_sync: 'this controls both reduce-scatter and all-reduce together'; "
    "set_requires_all_reduce",
)
@pytest.mark.parametrize("way", ["replicated", "hybrid"])
@pytest.mark.world(2)
def test_both_switches(world: World, way: str) -> None:
    """Call the switches in every order of two; gradients are synchronized if neither is off."""

    def body(rank: Rank) -> None:
        model: Any = ways(rank)[way](layer().to(rank.device))
        reduced = all_reduced = True
        for calls in itertools.product(SWITCHES, repeat=2):
            for name, on in calls:
                getattr(model, name)(on)
                all_reduced, reduced = on, (reduced if name == "set_requires_all_reduce" else on)
            assert bool(step(rank, model)) == (reduced and all_reduced), f"{calls}"
            model.set_requires_gradient_sync(True)
            model.set_requires_all_reduce(True)
            reduced = all_reduced = True
            step(rank, model)  # what was not reduced is by now

    world.run(body)


@requirement(
    "RFSDP-SYNC-04",
    "set_requires_all_reduce with recurse=False applies to its own module only.",
    source=f"{SOURCE}: set_requires_all_reduce, recurse",
)
@pytest.mark.world(2)
def test_all_reduce_of_one_module(world: World) -> None:
    """Switch a parent with its own weight off and on again, around a child."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.own = layer(), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.child(x) + self.own
            return result

    def body(rank: Rank) -> list[list[str]]:
        model: Any = replicate_fsdp.apply(Model(), rank)
        synced = []
        for on in (False, True):
            model.set_requires_all_reduce(on, recurse=False)
            synced.append(sorted(step(rank, model)))
        return synced

    assert_on_ranks([[["child.weight"], ["child.weight", "own"]]] * 2, world.run(body))


@requirement(
    "RFSDP-UNUSED-03",
    "With set_reduce_scatter_unused_params switched off again, a parameter that no rank uses has no gradient.",
    source=f"{SOURCE}.set_reduce_scatter_unused_params",
)
@requirement(
    "RFSDP-UNUSED-04",
    "set_reduce_scatter_unused_params applies to inner modules if recurse=True, and otherwise to its own module only.",
    source=f"{SOURCE}.set_reduce_scatter_unused_params: recurse",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
@pytest.mark.parametrize("recurse", [False, True], ids=["own-module", "recurse"])
@pytest.mark.world(2)
def test_unused_switched_off(world: World, recurse: bool) -> None:
    """Switch it on with recursion and off with or without; a model and its child have an unused weight each."""

    class Part(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) if self.inner else x) * self.used

    def body(rank: Rank) -> list[list[str]]:
        model: Any = replicate_fsdp.apply(Part(Part()), rank)
        seen = []
        for on, recursively in ((True, False), (True, True), (False, recurse)):
            model.set_reduce_scatter_unused_params(on, recurse=recursively)
            seen.append(sorted(step(rank, model)))
        return seen

    last = ["inner.used", "used"] if recurse else ["inner.unused", "inner.used", "used"]
    expected = [["inner.used", "unused", "used"], ["inner.unused", "inner.used", "unused", "used"], last]
    assert_on_ranks([expected] * 2, world.run(body))


@requirement(
    "RFSDP-STREAM-03",
    "After set_post_optim_event, the next forward uses the parameters that the optimizer wrote on another stream.",
    source=f"{SOURCE}.set_post_optim_event",
)
@pytest.mark.world(2)
def test_post_optim_event(world: World) -> None:
    """Run three steps of SGD, each on a busy stream of its own that the module gets an event of."""

    def body(rank: Rank) -> list[float]:
        model: Any = replicate_fsdp.apply(layer(), rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        outputs = []
        for _ in range(3):
            output = model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum()
            outputs.append(output.detach())
            output.backward()
            stream = torch.Stream(device=rank.device)
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                keep_busy(rank.device)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                model.set_post_optim_event(stream.record_event())
        torch.accelerator.synchronize()
        return [float(output) for output in outputs]

    expected = [[4 * (1.0 + rank) * (1.0 - 0.75 * done) for done in range(3)] for rank in range(2)]
    assert_on_ranks(expected, world.run(body))


@requirement(
    "RFSDP-EVENT-01",
    "Training gives the numbers of one device if set_post_optim_event gets an event after each optimizer step.",
    source=f"{SOURCE}.set_post_optim_event",
)
@pytest.mark.world(1, 2)
def test_event_of_each_step(world: World) -> None:
    """Run three steps of SGD, each followed by an event of the current stream, and a forward without a new event."""

    def body(rank: Rank) -> list[float]:
        model: Any = replicate_fsdp.apply(layer(), rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
        outputs = []
        for _ in range(3):
            output = model(x).sum()
            outputs.append(float(output.detach()))
            output.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.set_post_optim_event(current_event(rank.device))
        return [*outputs, *(float(model(x).sum().detach()) for _ in range(2))]

    mean = (world.size + 1) / 2
    weights = [1 - 0.5 * mean * done for done in (0, 1, 2, 3, 3)]
    assert_on_ranks([[4 * (1.0 + rank) * each for each in weights] for rank in range(world.size)], world.run(body))


def current_event(device: torch.device) -> Any:
    """Return an event of the current stream of a device; the host has events that do nothing."""
    return torch.cpu.Event() if device.type == "cpu" else torch.accelerator.current_stream().record_event()
