"""States of a GradScaler: saved, loaded, set and counted; its calls in right and wrong orders; several optimizers."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement

SOURCE = "torch.amp.GradScaler"
FORMS: tuple[dict[str, bool], ...] = ({"foreach": False}, {"foreach": True}, {"fused": True})
SETTINGS = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 3}
STEPS = "..!...!!.....!.."
"""Steps of a run: a point for finite gradients, an exclamation mark for one that is infinite on one rank."""


def model(rank: Rank) -> DistributedDataParallel:
    """Return a layer whose gradient is the average of the inputs, 1.5 on two ranks."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, 128.0)
    return DistributedDataParallel(layer.to(rank.device))


def backward(rank: Rank, scaler: Any, one: Any, infinite: bool) -> None:
    """Run a step's backward, in which the last rank has an infinite gradient or none has."""
    x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
    if infinite and rank.index == rank.size - 1:
        x[0, 1] = math.inf
    one.zero_grad()
    scaler.scale(one(x).sum()).backward()


class Right:
    """What a scaler's documentation says of its scale after each step."""

    def __init__(self) -> None:
        self.scale, self.growth, self.backoff, self.interval = SETTINGS.values()
        self.count = 0.0

    def update(self, infinite: bool) -> None:
        """Count a step."""
        self.count = 0.0 if infinite else self.count + 1
        if infinite:
            self.scale *= self.backoff
        elif self.count == self.interval:
            self.scale, self.count = self.scale * self.growth, 0.0

    def state(self) -> dict[str, float]:
        """Return the state of such a scaler."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth,
            "backoff_factor": self.backoff,
            "growth_interval": self.interval,
            "_growth_tracker": self.count,
        }


def handed_on(how: str, scaler: Any, rank: Rank) -> Any:
    """Return a scaler that has a scaler's state."""
    if how == "pickled":
        return pickle.loads(pickle.dumps(scaler))
    other = torch.amp.GradScaler(rank.device.type, init_scale=2.0, growth_interval=1)
    if how == "used":  # it has a scale and a count of its own
        one = model(rank)
        sgd = torch.optim.SGD(one.parameters(), lr=1.0)
        backward(rank, other, one, False)
        other.step(sgd)
        other.update()
    state = json.loads(json.dumps(scaler.state_dict()))
    other.load_state_dict(state)
    assert state == scaler.state_dict() == other.state_dict()
    return other


@requirement(
    "REPL-SCALE-5480",
    "The scale grows after growth_interval consecutive steps with finite gradients and shrinks after others, by the "
    "factors that are set.",
    source=f"{SOURCE}: 'growth_interval unskipped iterations occur consecutively', set_growth_factor, "
    "set_growth_interval, set_backoff_factor",
)
@requirement(
    "REPL-SCALE-5481",
    "A GradScaler that was pickled, or whose state another one loads, goes on there at any step.",
    source=f"{SOURCE}: state_dict, load_state_dict: 'a Python float containing the current scale'",
)
@pytest.mark.world(2)
def test_states(world: World) -> None:
    """Hand the state on before each step to a new scaler, a used or a pickled one, and set each factor on the way."""

    def body(rank: Rank) -> None:
        for how, form in zip(("new", "used", "pickled"), FORMS, strict=True):
            one, right, value = model(rank), Right(), 128.0
            scaler = torch.amp.GradScaler(rank.device.type, **SETTINGS)  # type: ignore[arg-type]
            sgd: Any = torch.optim.SGD(one.parameters(), lr=1.0, **form)
            assert scaler.is_enabled()
            for step, event in enumerate(STEPS):
                what = f"{how}, {form}, step {step}"
                if step == 8:
                    scaler.set_growth_factor(2.0)
                    scaler.set_backoff_factor(0.25)
                    scaler.set_growth_interval(2)
                    right.growth, right.backoff, right.interval = 2.0, 0.25, 2
                found = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
                assert found == (right.growth, right.backoff, right.interval), what
                backward(rank, scaler, one, event == "!")
                scaler.step(sgd)
                scaler.update()
                right.update(event == "!")
                assert scaler.state_dict() == right.state(), f"{what}: {scaler.state_dict()}"
                assert scaler.get_scale() == right.scale, what
                value -= 0.0 if event == "!" else 1.5
                assert one.module.weight.tolist() == [[value] * 2], what
                scaler = handed_on(how, scaler, rank)
                assert scaler.get_scale() == right.scale, what
        off = torch.amp.GradScaler(rank.device.type, enabled=False)
        off.load_state_dict({})
        off.load_state_dict(right.state())
        assert (off.state_dict(), off.get_scale(), off.is_enabled()) == ({}, 1.0, False)
        with pytest.raises(RuntimeError, match="empty"):
            scaler.load_state_dict(off.state_dict())
        assert scaler.state_dict() == right.state()

    world.run(body)


@requirement(
    "REPL-SCALE-5482",
    "Of several optimizers with one GradScaler, those with finite gradients step, while one with others shrinks the "
    "scale once.",
    source=f"{SOURCE}: step, update: 'If any optimizer steps were skipped'",
)
@requirement(
    "REPL-SCALE-5483",
    "A GradScaler refuses calls in a wrong order between two updates, or with a closure, and goes on as before.",
    source=f"{SOURCE}: unscale_: 'twice for a given optimizer between each step triggers a RuntimeError'; step",
)
@requirement(
    "REPL-SCALE-5484",
    "step of a GradScaler forwards arguments to the optimizer, whose result it returns, also if it is disabled.",
    source=f"{SOURCE}: step: 'Returns the return value of optimizer.step(*args, **kwargs)', enabled",
)
@pytest.mark.world(2)
def test_several_optimizers(world: World) -> None:
    """Two models, one with an infinity on one rank in turn, unscaled by hand or not; refused calls come between."""

    class Told(torch.optim.SGD):
        """Return what step is given."""

        def step(self, *args: Any, **options: Any) -> Any:
            super().step()
            return args, options

    def body(rank: Rank) -> None:
        for form, unscales in itertools.product(FORMS, itertools.product((False, True), repeat=2)):
            models = [model(rank), model(rank)]
            optimizers: Any = [Told(models[0].parameters(), lr=1.0, **form), Told(models[1].parameters(), lr=1.0)]
            scaler = torch.amp.GradScaler(rank.device.type, init_scale=64.0, growth_interval=1)
            scale, values = 64.0, [128.0, 128.0]
            for step, infinite in enumerate(((), (0,), (1,), (0, 1), ())):
                what = f"{form}, {unscales}, step {step}"
                for number, one in enumerate(models):
                    backward(rank, scaler, one, number in infinite)
                with pytest.raises(RuntimeError, match="Closure"):
                    scaler.step(optimizers[0], closure=lambda: 0.0)
                for number, (one, sgd) in enumerate(zip(models, optimizers, strict=True)):
                    if unscales[number]:
                        scaler.unscale_(sgd)
                        with pytest.raises(RuntimeError, match="already been called"):
                            scaler.unscale_(sgd)
                        assert number in infinite or one.module.weight.grad.tolist() == [[1.5, 1.5]], what
                    result = scaler.step(sgd, 1, other=2)
                    fused = "fused" in form and number == 0  # it is called to see itself that it may not step
                    assert result == (None if number in infinite and not fused else ((1,), {"other": 2})), what
                    with pytest.raises(RuntimeError, match="already been called"):
                        scaler.step(sgd)
                    with pytest.raises(RuntimeError, match="after step"):
                        scaler.unscale_(sgd)
                    values[number] -= 0.0 if number in infinite else 1.5
                scaler.update()
                scale *= 0.5 if infinite else 2.0
                assert scaler.get_scale() == scale, f"{what}: {scaler.get_scale()}"
                assert [one.module.weight[0, 0].item() for one in models] == values, what
                assert not any(hasattr(sgd, name) for sgd in optimizers for name in ("grad_scale", "found_inf")), what
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.update()
            off = torch.amp.GradScaler(rank.device.type, enabled=False)
            assert off.step(optimizers[0], 1, other=2) == ((1,), {"other": 2})

    world.run(body)
