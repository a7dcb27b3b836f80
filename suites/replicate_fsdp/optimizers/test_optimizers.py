"""Optimizers and gradient scalers, of sharded and of replicated parameters."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp

Made = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    name: getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
}
"""The optimizers that count their steps."""
FORMS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def layer(rank: Rank, manage: Callable[..., Any]) -> Any:
    """Create a managed layer of eight weights, which are 1, and two biases, which are 0."""
    module = nn.Linear(4, 2, device=rank.device, dtype=torch.float32)
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)
    return manage(module)


def give(model: Any, *values: float) -> None:
    """Set the gradients of the parameters in their order."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.grad = torch.full_like(parameter, value)


def give_all(optimizer: torch.optim.Optimizer) -> None:
    """Set the gradients of an optimizer's parameters to ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def step_dtypes(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    """Return the dtypes in which an optimizer counts the steps of its parameters."""
    return {state["step"].dtype for state in optimizer.state.values()}


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return whole parameters on the host."""
    return {name: replicate_fsdp.whole(p).detach().cpu().clone() for name, p in model.named_parameters()}


@requirement(
    "RFSDP-OPTIM-3200",
    "An optimizer counts all of its steps, whatever the default dtype is.",
    source="torch.optim: Adam, AdamW, RAdam; torch.set_default_dtype",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.world(2)
def test_steps_counted(world: World, name: str) -> None:
    """Take step 257, which narrow dtypes cannot represent, with each default dtype, then two more."""

    def body(rank: Rank) -> None:
        for (way, manage), dtype in itertools.product(ways(rank).items(), (torch.bfloat16, torch.half, torch.double)):
            what = f"{way}, {dtype}"
            model = layer(rank, manage)
            torch.set_default_dtype(dtype)
            try:
                optimizer = OPTIMIZERS[name](model.parameters(), lr=2.0**-10)
                give(model, 1.0, 2.0)
                optimizer.step()
                for state in optimizer.state.values():
                    state["step"] += 255
                for count in (257, 258, 259):
                    optimizer.step()
                    steps = [float(state["step"]) for state in optimizer.state.values()]
                    assert steps == [count] * 2, what
            finally:
                torch.set_default_dtype(torch.float32)

    world.run(body)


@requirement(
    "RFSDP-OPTIM-3201",
    "An optimizer with the state of one of another form, as fused, trains on as that one does, up to rounding.",
    source="torch.optim.Optimizer.load_state_dict; torch.optim.Adam: foreach, fused",
)
@requirement(
    "RFSDP-OPTIM-3203",
    "A fused optimizer counts steps in the dtype of fused optimizers, also after it loaded the state of another form.",
    source="torch/optim/optimizer.py: Optimizer.load_state_dict: step, fused",
)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.world(2)
def test_forms_of_states(world: World, name: str) -> None:
    """Save after two steps, load into each other form, and train both for two steps, with two default dtypes."""

    def body(rank: Rank) -> None:
        made: Made = functools.partial(OPTIMIZERS[name], lr=2.0**-3)
        manage = ways(rank)["sharded"]
        for dtype, (old, new) in itertools.product((torch.float32, torch.float64), itertools.permutations(FORMS, 2)):
            what = f"{dtype}, {old} to {new}"
            torch.set_default_dtype(dtype)
            try:
                model, other = layer(rank, manage), layer(rank, manage)
                first = made(model.parameters(), **old)
                for _ in range(2):
                    give(model, 1.0, -2.0)
                    first.step()
                second = made(other.parameters(), **new)
                saved = copy.deepcopy(first.state_dict())  # which has the tensors themselves
                for group in saved["param_groups"]:
                    group |= {"foreach": new.get("foreach"), "fused": new.get("fused")}
                second.load_state_dict(saved)
                if "fused" in new:
                    own = made(layer(rank, manage).parameters(), fused=True)
                    give_all(own)
                    own.step()
                    assert step_dtypes(second) == step_dtypes(own), what
                with torch.no_grad():
                    for p, q in zip(other.parameters(), model.parameters(), strict=True):
                        p.copy_(q)
                for step in range(2):
                    for trained, optimizer in ((model, first), (other, second)):
                        give(trained, 0.5 - step, 3.0)
                        optimizer.step()
                near = 64 * torch.finfo(torch.float32).eps
                for key, value in parameters(model).items():
                    torch.testing.assert_close(parameters(other)[key], value, rtol=near, atol=near, msg=what)
                counts = [[float(s["step"]) for s in each.state.values() if "step" in s] for each in (first, second)]
                assert counts[0] == counts[1], what
            finally:
                torch.set_default_dtype(torch.float32)

    world.run(body)


@requirement(
    "RFSDP-OPTIM-3202",
    "An optimizer of named parameters keeps their names and takes the settings, whether a state that it loads has "
    "names or lacks them.",
    source="torch.optim.Optimizer.load_state_dict: 'param_names'",
)
@pytest.mark.world(2)
def test_names_kept(world: World) -> None:
    """Load states of named and unnamed parameters into optimizers of either, in one group or in two."""

    def body(rank: Rank) -> None:
        for (way, manage), named, saved, apart in itertools.product(ways(rank).items(), *[(True, False)] * 3):
            what = f"{way}, {named=}, {saved=}, {apart=}"
            model = layer(rank, manage)

            def made(rate: float, with_names: bool, model: Any = model, apart: bool = apart) -> torch.optim.Optimizer:
                given = [*(model.named_parameters() if with_names else model.parameters())]
                groups: Any = [{"params": [each], "lr": rate * (i + 1)} for i, each in enumerate(given)]
                return torch.optim.SGD(groups if apart else given, lr=rate, momentum=0.5)

            old, new = made(0.25, saved), made(8.0, named)
            give(model, 1.0, 2.0)
            old.step()
            new.load_state_dict(old.state_dict())
            names = [group.get("param_names") for group in new.param_groups]
            right = [["weight"], ["bias"]] if apart else [["weight", "bias"]]
            assert not named or names == right, f"{what}: {names}"
            assert [group["lr"] for group in new.param_groups] == ([0.25, 0.5] if apart else [0.25]), what
            assert len(new.state) == 2, what

    world.run(body)


SETTINGS: dict[str, dict[str, Any]] = {
    "ASGD": {"lambd": 4.0, "t0": 1},
    "NAdam": {"decoupled_weight_decay": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"lr_decay": 0.25},
    "SGD": {"momentum": 0.5, "dampening": 0.25},
}
"""Options with which a step depends on the steps before."""


@requirement(
    "RFSDP-OPTIM-3500",
    "The forms of an optimizer, as foreach or fused, take the same steps up to rounding.",
    source="torch.optim: foreach, fused",
)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "SGD"])
@pytest.mark.world(2)
def test_forms(world: World, name: str) -> None:
    """Take five steps with options of all kinds; the second parameter gets its first gradient in the third."""

    def body(rank: Rank) -> None:
        forms = [form for form in FORMS if "fused" not in form or name in ("Adam", "AdamW")]
        cases = ((0.0, False), (0.25, False), (0.25, True))
        for (decay, maximize), (way, manage) in zip(cases, ways(rank).items(), strict=True):
            found = []
            for form in forms:
                model = layer(rank, manage)
                words = {"lr": 2.0**-3, "weight_decay": decay, "maximize": maximize, **SETTINGS.get(name, {}), **form}
                optimizer = getattr(torch.optim, name)(model.parameters(), **words)
                for step in range(5):
                    give(model, 1.0 - step, 2.0)
                    if step < 2:
                        model.bias.grad = None
                    optimizer.step()
                found.append(parameters(model))
            near = 64 * torch.finfo(torch.float32).eps
            for form, values in zip(forms, found, strict=True):
                what = f"{way}, {decay=}, {maximize=}, {form}"
                torch.testing.assert_close(values, found[0], rtol=near, atol=near, msg=lambda t, w=what: f"{w}: {t}")

    world.run(body)


@requirement(
    "RFSDP-OPTIM-3501",
    "An optimizer of any form takes parameters on the meta device, and steps once they have memory.",
    source="torch.optim: fused; torch.nn.Module.to_empty",
)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adagrad"])  # which has a state at once
@pytest.mark.world(2)
def test_made_on_meta(world: World, name: str) -> None:
    """Create it before the parameters get memory, and compare two steps with those of one created after that."""

    def body(rank: Rank) -> None:
        for (way, manage), form in zip(ways(rank).items(), FORMS, strict=True):
            if "fused" in form and name not in ("Adam", "AdamW"):
                continue
            right = layer(rank, manage)
            with torch.device("meta"):
                model: Any = nn.Linear(4, 2)
            manage(model)
            early = OPTIMIZERS[name](model.parameters(), lr=2.0**-3, **form)
            model.to_empty(device=rank.device)
            nn.init.ones_(model.weight)
            nn.init.zeros_(model.bias)
            late = OPTIMIZERS[name](right.parameters(), lr=2.0**-3, **form)
            for step in range(2):
                for trained, optimizer in ((model, early), (right, late)):
                    give(trained, 1.0 + step, -2.0)
                    optimizer.step()
            for key, value in parameters(right).items():
                assert torch.equal(parameters(model)[key], value), f"{way}, {form}, {key}"

    world.run(body)


@requirement(
    "RFSDP-SCALE-3200",
    "A fused optimizer with a grad_scale of its own divides gradients by that and by the scale of a GradScaler.",
    source="torch/amp/grad_scaler.py: GradScaler.step: grad_scale; torch.optim.SGD: fused",
)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.world(2)
def test_own_grad_scale(world: World, name: str) -> None:
    """Two steps with a scale of 8 and an own one of 2 or none, with unscale_ and without."""

    def body(rank: Rank) -> None:
        cases = itertools.product((None, 2.0, 0.5), (False, True))
        for (own, unscales), (way, manage) in zip(cases, itertools.cycle(ways(rank).items()), strict=False):
            what = f"{way}, {own=}, {unscales=}"
            results = []
            for scale in (8.0, None):
                model = layer(rank, manage)
                optimizer: Any = OPTIMIZERS[name](model.parameters(), lr=0.5, eps=1.0, fused=scale is not None)
                scaler = torch.amp.GradScaler(rank.device.type, init_scale=scale or 1.0, enabled=scale is not None)
                for step in range(2):
                    scaler.scale(torch.ones((), device=rank.device))
                    give(model, *(g * (step + 1) * (scale or 1 / (own or 1.0)) for g in (1.0, 3.0)))
                    if own and scale:
                        optimizer.grad_scale = torch.tensor(own, device=rank.device)
                    if unscales:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                results.append(parameters(model))
            near = 8 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(*results, rtol=near, atol=near, msg=lambda text, what=what: f"{what}: {text}")

    world.run(body)
