"""States of optimizers that are loaded into others, which have taken another number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fixtures.states import SAVED, assert_equal, copied, whole
from harness import Rank, World, requirement

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.5, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.5, momentum=0.5, centered=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
}
"""Optimizers with states of tensors that are sharded, and of scalars."""
STEPS = {"Adam": (0, 3)}
"""Steps of an optimizer that loads, if not three alone; the one that was saved has taken two."""
BUFFER = "momentum_buffer"
OFFLOADED = {"cpu_offload": True}
WAYS = {
    **SAVED,
    "offloaded": (OFFLOADED, OFFLOADED),
    "offloaded-then-not": (OFFLOADED, {}),
    "flat-and-offloaded": (SAVED["flat"][0] | OFFLOADED, SAVED["flat"][1] | OFFLOADED),
    "from-rank-0-and-offloaded": (SAVED["full-from-rank-0"][0], SAVED["full-from-rank-0"][1] | OFFLOADED),
}
"""Options of saving and of loading."""


def stepped(rank: Rank, make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded layer with an optimizer that has taken steps."""
    model: Any = fully_shard(nn.Linear(2, 3).to(rank.device), mesh=rank.mesh())
    optimizer = make(model.parameters())
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@requirement(
    "RFSDP-DICT-4885",
    "set_optimizer_state_dict replaces every value of an optimizer's state, however many steps that has taken.",
    source="torch.distributed.checkpoint.state_dict: set_optimizer_state_dict, StateDictOptions.full_state_dict, "
    "broadcast_from_rank0, flatten_optimizer_state_dict",
)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.world(2)
def test_other_steps(world: World, how: str) -> None:
    """Load states after two steps into optimizers that have taken another number of them."""

    def body(rank: Rank) -> None:
        saving, loading = (StateDictOptions(**options) for options in WAYS[how])
        for name, steps in ((each, steps) for each in OPTIMIZERS for steps in STEPS.get(each, (3,))):
            make = OPTIMIZERS[name]
            model, saved = stepped(rank, make, 2)
            state = copied(get_optimizer_state_dict(model, saved, options=saving))
            other, loaded = stepped(rank, make, steps)
            set_optimizer_state_dict(other, loaded, state, options=loading)
            right, found = (whole(each.state_dict()) for each in (saved, loaded))
            assert_equal(right["state"], found["state"], f"{name} after {steps} steps")

    world.run(body)


@requirement(
    "RFSDP-DICT-7005",
    "Each call of get_optimizer_state_dict returns the settings and states that the optimizer has at that time.",
    source="torch.distributed.checkpoint.state_dict: get_optimizer_state_dict; torch.optim.Optimizer: param_groups",
)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.world(2)
def test_changed_settings(world: World, how: str) -> None:
    """Change rates by a schedule, another number by hand and a group's members, with a step or none between calls."""

    def body(rank: Rank) -> None:
        options = StateDictOptions(**WAYS[how][0])
        model: Any = fully_shard(nn.Linear(2, 3).to(rank.device), mesh=rank.mesh())
        sgd = torch.optim.SGD([{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (4.0, 8.0), strict=True)])
        schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
        for turn in range(6):
            for group in sgd.param_groups:
                group["momentum"] = turn / 8
                if turn == 3:
                    group["nesterov"], group["added"] = True, 2.0
            if turn % 3:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1.0 + turn)
                sgd.step()
                schedule.step()
            states = [whole(sgd.state[group["params"][0]]) for group in sgd.param_groups]
            found: Any = get_optimizer_state_dict(model, sgd, options=options)
            if not found:
                continue  # a rank that gets none of a full state that is offloaded
            flat = "flatten_optimizer_state_dict" in WAYS[how][0]
            for number, (name, state) in enumerate(zip(("weight", "bias"), states, strict=True)):
                for key, right in sgd.param_groups[number].items():
                    if key != "params":
                        kept = found[f"param_groups.{name}.{key}"] if flat else found["param_groups"][number][key]
                        assert kept == right, f"turn {turn}: {key} of {name} is {kept} and not {right}"
                if state:
                    own = found[f"state.{name}.{BUFFER}"] if flat else found["state"][name][BUFFER]
                    assert torch.equal(state[BUFFER], whole(own)), f"turn {turn}: {name}"

    world.run(body)
