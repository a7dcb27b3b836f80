"""State dicts that are kept in memory, loaded, trained on from, and loaded again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fixtures.rates import SCHEDULES
from fixtures.states import assert_equal, whole
from harness import Rank, World, requirement

Trained = tuple[Any, torch.optim.Optimizer]
WHOLE = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Options with which states are got and set."""

Ways = dict[str, tuple[Callable[[Trained], Any], Callable[[Trained, Any], Any]]]
KEPT: dict[str, Ways] = {
    "models": {
        "module": (lambda of: of[0].state_dict(), lambda of, state: of[0].load_state_dict(state)),
        "state": (lambda of: get_model_state_dict(of[0]), lambda of, state: set_model_state_dict(of[0], state)),
    },
    "optimizers": {
        "optimizer": (lambda of: of[1].state_dict(), lambda of, state: of[1].load_state_dict(state)),
        "state": (
            lambda of: get_optimizer_state_dict(*of),
            lambda of, state: set_optimizer_state_dict(*of, state),
        ),
        "whole state": (
            lambda of: get_optimizer_state_dict(*of, options=WHOLE),
            lambda of, state: set_optimizer_state_dict(*of, state, options=WHOLE),
        ),
        "flat state": (
            lambda of: get_optimizer_state_dict(*of, options=FLAT),
            lambda of, state: set_optimizer_state_dict(*of, state, options=FLAT),
        ),
    },
}
"""How a state of a module and its optimizer is got and set."""


def trained(rank: Rank) -> Trained:
    """Return a sharded layer and its optimizer after a step."""
    made = fully_shard(nn.Linear(2, 3).to(rank.device), mesh=rank.mesh())
    train(of := (made, torch.optim.Adam(made.parameters(), lr=0.5)))
    return of


def train(of: Trained) -> None:
    """Take a step, with gradients of ones."""
    for parameter in of[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    of[1].step()
    of[1].zero_grad()


@requirement(
    "RFSDP-DICT-5380",
    "A state dict that was loaded does not change in the training after it.",
    source="torch.optim.Optimizer.load_state_dict: 'Make a deep copy of value'; torch.nn.Module.load_state_dict: "
    "'Copy parameters and buffers from state_dict into this module'; torch.distributed.checkpoint.state_dict",
)
@pytest.mark.parametrize("of_what", KEPT)
@pytest.mark.world(2)
def test_trained(world: World, of_what: str) -> None:
    """Load a dict, train for a step, and compare the dict with a copy of it."""

    def body(rank: Rank) -> None:
        changed = []
        for name, (got, give) in KEPT[of_what].items():
            of = trained(rank)
            state = copy.deepcopy(got(of))
            before = copy.deepcopy(state)
            give(of, state)
            train(of)
            try:
                assert_equal(whole(before), whole(state), name)
            except AssertionError as e:
                changed.append(str(e))
        assert not changed, "; ".join(changed)

    world.run(body)


@requirement(
    "RFSDP-DICT-7303",
    "States of an optimizer have the dtypes and values after loading with which they were saved.",
    source="torch.optim.Optimizer: state_dict, load_state_dict; torch.distributed.checkpoint.state_dict; "
    "pytorch/pytorch#43706",
)
@pytest.mark.parametrize("kind", ["Adam", "RAdam", "NAdam", "ASGD"])
@pytest.mark.world(2)
def test_dtypes(world: World, kind: str) -> None:
    """Parameters are bfloat16, and states in float32 beside the step count are those of NAdam and ASGD."""

    def body(rank: Rank) -> None:
        wrong = []
        for way, (got, give) in KEPT["optimizers"].items():
            model: Any = fully_shard(nn.Linear(2, 3, dtype=torch.bfloat16).to(rank.device), mesh=rank.mesh())
            trained, loaded = (getattr(torch.optim, kind)(model.parameters(), lr=0.5) for _ in range(2))
            train((model, trained))
            give((model, loaded), copy.deepcopy(got((model, trained))))
            try:
                assert_equal(whole(trained.state_dict()["state"]), whole(loaded.state_dict()["state"]), way)
            except AssertionError:
                found = loaded.state_dict()["state"][0].items()
                wrong.append(f"{way}: {kind} has {', '.join(f'{name} in {value.dtype}' for name, value in found)}")
        assert not wrong, "; ".join(wrong)

    world.run(body)


@requirement(
    "RFSDP-RATE-5381",
    "A schedule loads the same state dict as often as it is given.",
    source="torch.optim.lr_scheduler.LRScheduler.load_state_dict",
)
@pytest.mark.parametrize("which", ["CyclicLR", "others"])
@pytest.mark.world(1)
def test_schedules(world: World, which: str) -> None:
    """Go on after the second epoch, and go back to it twice."""

    def body(rank: Rank) -> None:
        for name in SCHEDULES if which == "others" else [which]:
            if name == "CyclicLR" != which:
                continue
            model, optimizer = trained(rank)
            schedule = SCHEDULES[name](optimizer)
            train((model, optimizer))
            schedule.step()
            state, rate, ends = copy.deepcopy(schedule.state_dict()), optimizer.param_groups[0]["lr"], []
            for turn in range(3):
                if turn:
                    schedule.load_state_dict(state)
                    optimizer.param_groups[0]["lr"] = rate
                schedule.step()
                ends.append(optimizer.param_groups[0]["lr"])
            assert ends[0] == ends[1] == ends[2], f"rates of {name}: {ends}"

    world.run(body)
