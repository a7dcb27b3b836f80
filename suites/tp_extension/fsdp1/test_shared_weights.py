"""Weights that modules share, under FSDP1: their training, their states under every name, and functions applied."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fixtures.wrapped import STRATEGIES, whole, wrapped
from harness import Rank, World, assert_same_all, dyadic, requirement

NAMES = ["first.weight", "middle.weight", "middle.bias", "last.weight"]
"""What a state dict has; the first and the last are one weight."""
WAYS = [(strategy, original, inner) for strategy in STRATEGIES for original in (False, True) for inner in (False, True)]
"""The strategy, whether there are original parameters, and whether the layer between is wrapped by itself."""


class Tied(nn.Module):
    """Three layers, of which the last has the weight of the first, transposed."""

    def __init__(self, key: str = "") -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(dyadic(*parameter.shape, key=f"{key}{name}", dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        result: torch.Tensor = self.last(self.middle(self.first(x)))
        return result


def made(rank: Rank, way: tuple[Any, bool, bool], key: str = "") -> Any:
    """Return the module, wrapped."""
    strategy, original, inner = way
    model, options = Tied(key), {"sharding_strategy": strategy, "use_orig_params": original}
    if inner:
        model.middle = wrapped(rank, model.middle, **options)
    return wrapped(rank, model, **options)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, parts: list[int], device: torch.device) -> None:
    """Train a step on these parts of a batch."""
    optimizer.zero_grad()
    for part in parts:
        (model(dyadic(2, 3, key=(number, part), dtype=torch.float32).to(device)).sum() / len(parts)).backward()
    optimizer.step()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def alone(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """Train on one device; returns the module, its optimizer, and what trains the step of a number."""
    model = Tied()
    optimizer = momentum(model)

    def train(number: int) -> None:
        step(model, optimizer, number, [0, 1], torch.device("cpu"))

    for number in range(steps):
        train(number)
    return model, optimizer, train


def plain(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, as copies on the host."""
    return {name: value.detach().cpu().clone() for name, value in state.items()}


@requirement(
    "TP-TIED-01",
    "FSDP1 trains a weight that modules share as one device does, and has it once among its parameters.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: use_orig_params; test_fsdp_core.py; "
    "test_fsdp_flatten_params.py",
)
@pytest.mark.world(2)
def test_trained(world: World) -> None:
    """Compare parameters after two steps; a function that is applied sees the weight in both modules."""

    def body(rank: Rank) -> None:
        right = {name: p.detach() for name, p in alone(2)[0].named_parameters()}
        for way in WAYS:
            model = made(rank, way)
            optimizer = momentum(model)
            for number in range(2):
                step(model, optimizer, number, [rank.index], rank.device)
            assert_same_all(right, whole(model), f"{way}: parameter")

            def halve(module: nn.Module) -> None:
                if isinstance(module, nn.Linear) and module.bias is None:
                    with torch.no_grad():
                        module.weight.mul_(0.5)

            model.apply(halve)
            quarter = {name: p / 4 if name == "first.weight" else p for name, p in right.items()}
            assert_same_all(quarter, whole(model), f"{way}: applied to parameter")

    world.run(body)


@requirement(
    "TP-TIED-02",
    "A state dict of FSDP1 has a weight that modules share under each of its names, and loads it from them.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.state_dict; torch.nn.Module.state_dict; "
    "test_fsdp_state_dict.py",
)
@pytest.mark.world(2)
def test_states(world: World) -> None:
    """Save full, sharded and local states, and load them into a module with other numbers."""

    def body(rank: Rank) -> None:
        right = {name: p.detach() for name, p in alone(0)[0].named_parameters()}
        values = right | {"last.weight": right["first.weight"]}
        for way, kind in itertools.product(WAYS, StateDictType):
            what = f"{way}, {kind}"
            if kind == StateDictType.LOCAL_STATE_DICT and way[1]:
                continue  # with original parameters there are none that can be loaded
            model, other = made(rank, way), made(rank, way, "other")
            with FullyShardedDataParallel.state_dict_type(model, kind):
                saved = model.state_dict()
                if kind == StateDictType.FULL_STATE_DICT:
                    assert list(saved) == NAMES, what
                    assert_same_all(values, plain(saved), f"{what}: saved")
                elif kind == StateDictType.SHARDED_STATE_DICT:
                    assert sorted(saved) == sorted(NAMES), what
                    assert type(saved["last.weight"]) is type(saved["first.weight"]), what
                saved = copy.copy(saved)
            with FullyShardedDataParallel.state_dict_type(other, kind):
                other.load_state_dict(saved)
            assert_same_all(right, whole(other), f"{what}: loaded")
            with FullyShardedDataParallel.summon_full_params(other):
                assert other.first.weight is other.last.weight, what

    world.run(body)


@requirement(
    "TP-TIED-03",
    "An optimizer's state of FSDP1 has a weight that modules share once, and training goes on from it when loaded.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict; test_fsdp_optim_state.py; "
    "torch.distributed.checkpoint.state_dict; test_state_dict.py: test_shared_weight",
)
@pytest.mark.world(2)
def test_optimizers(world: World) -> None:
    """Save after two steps, by FSDP1's function or by get_state_dict, load into another model, and train two more."""

    def body(rank: Rank) -> None:
        model, optimizer, train = alone(2)
        numbers = dict(enumerate(name for name, _ in model.named_parameters()))
        states = {numbers[i]: each["momentum_buffer"].clone() for i, each in optimizer.state_dict()["state"].items()}
        states = dict(sorted(states.items()))
        for number in range(2, 4):
            train(number)
        right = {name: p.detach() for name, p in model.named_parameters()}
        for way, full in itertools.product(WAYS, (None, True, False)):
            what = f"{way}, {'by its function' if full is None else f'get_state_dict, {full=}'}"
            model, other = made(rank, way), made(rank, way, "other")
            optimizer, fresh = momentum(model), momentum(other)
            for number in range(2):
                step(model, optimizer, number, [rank.index], rank.device)
            if full is None:
                saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                other.load_state_dict(copy.copy(model.state_dict()))
                fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, fresh, saved))
            else:
                options = StateDictOptions(full_state_dict=full)
                named, saved = get_state_dict(model, optimizer, options=options)
                assert sorted(named) == sorted(NAMES), what
                set_state_dict(other, fresh, model_state_dict=named, optim_state_dict=saved, options=options)
            assert sorted(saved["state"]) == sorted(states), what
            if full is not False:
                found = {name: each["momentum_buffer"] for name, each in saved["state"].items()}
                assert_same_all(states, plain(dict(sorted(found.items()))), f"{what}: momentum of")
            for number in range(2, 4):
                step(other, fresh, number, [rank.index], rank.device)
            assert_same_all(right, whole(other), f"{what}: parameter")

    world.run(body)
