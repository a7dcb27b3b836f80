"""Distributed state dicts of some submodules, or of nothing at all."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.dynamo import checkpointed

SOURCE = "torch.distributed.checkpoint.state_dict"
STACKS: dict[str, Any] = {
    "sharded": lambda rank, model: fully_shard(model, mesh=rank.mesh()),
    "replicated": lambda rank, model: DistributedDataParallel(model),
    "checkpointed": lambda rank, model: checkpointed(model),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "model": lambda model, optimizer, **options: get_model_state_dict(model, **options),
    "model of both": lambda model, optimizer, **options: get_state_dict(model, optimizer, **options)[0],
    "optimizer": lambda model, optimizer, **options: get_optimizer_state_dict(model, optimizer, **options)["state"],
    "optimizer of both": lambda model, optimizer, **options: get_state_dict(model, optimizer, **options)[1]["state"],
}
"""What state is asked for, of which function."""


class Parts(nn.Module):
    """Modules whose names begin alike, and of which none is called."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.one_more = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.deep = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is given."""
        return x


def parts(factor: float) -> Any:
    """Return a model with weights and a buffer of whole numbers times a factor."""
    model = Parts()
    with torch.no_grad():
        for i, value in enumerate(model.state_dict().values(), start=1):
            value.copy_(torch.arange(value.numel()).view(value.shape) * factor + i)
    return model


def values(state: Any) -> dict[str, Any]:
    """Return whole values by name."""
    tensors = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
    return {name: one.tolist() for name, one in tensors.items()}


@requirement(
    "RFSDP-DICT-4407",
    "get_model_state_dict gives the state of given submodules, by names with their prefixes or without.",
    source=f"{SOURCE}: get_model_state_dict, get_state_dict: submodules; StateDictOptions.keep_submodule_prefixes",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_given_submodules(world: World, stack: str) -> None:
    """Choose one module or two; then one that is deeper; a name that begins like another one is not chosen with it."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        model = parts(2.0).to(rank.device)
        chosen = [("one",), ("one_more", "deep"), ("deep.1",)]
        modules = [{model.get_submodule(name) for name in names} for names in chosen]
        right = values(model.state_dict())
        put = STACKS[stack](rank, model)
        for names, of in zip(chosen, modules, strict=True):
            own = {key: value for key, value in right.items() if key.startswith(tuple(f"{name}." for name in names))}
            for keep in (True, False):
                options = StateDictOptions(keep_submodule_prefixes=keep)
                without = {
                    key[len(next(n for n in names if key.startswith(f"{n}."))) + 1 :]: v for key, v in own.items()
                }
                assert values(get_model_state_dict(put, submodules=of, options=options)) == (own if keep else without)
            sgd = torch.optim.SGD(put.parameters(), lr=0.5)
            assert values(get_state_dict(put, sgd, submodules=of)[0]) == own

    world.run(body)


@requirement(
    "RFSDP-DICT-4408",
    "set_model_state_dict takes a state for each of some submodules, and leaves the others as they are.",
    source=f"{SOURCE}: set_model_state_dict: 'Dict[nn.Module, Dict[str, ValueType]]'; StateDictOptions.strict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_states_for_submodules(world: World, stack: str) -> None:
    """Give one module's state, then those of two others, whole."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        model, other = parts(2.0).to(rank.device), parts(-3.0)
        modules = {name: model.get_submodule(name) for name in ("one", "one_more", "deep.1")}
        right, new = values(model.state_dict()), values(other.state_dict())
        put = STACKS[stack](rank, model)
        options = StateDictOptions(strict=False, full_state_dict=True)
        for names in ("one",), ("one_more", "deep.1"):
            given = {modules[n]: other.get_submodule(n).to(rank.device).state_dict() for n in names}
            set_model_state_dict(put, given, options=options)  # type: ignore[arg-type]
            right |= {key: v for key, v in new.items() if key.startswith(tuple(f"{name}." for name in names))}
            assert values(get_model_state_dict(put)) == right, names

    world.run(body)


@requirement(
    "RFSDP-DICT-4409",
    "An empty state is refused on each rank for a model or an optimizer that has one, and so is a call without "
    "optimizers.",
    source=f"{SOURCE}: set_model_state_dict, set_optimizer_state_dict, get_optimizer_state_dict; "
    "StateDictOptions.strict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_nothing(world: World, stack: str) -> None:
    """Give nothing in each call; an empty state that need not be complete changes nothing."""

    def body(rank: Rank) -> None:
        model = STACKS[stack](rank, parts(2.0).to(rank.device))
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        right = values(get_model_state_dict(model))
        for call in (
            lambda: set_model_state_dict(model, {}),
            lambda: set_optimizer_state_dict(model, sgd, {}),
            lambda: set_optimizer_state_dict(model, [], {}),
            lambda: get_optimizer_state_dict(model, []),
        ):
            with pytest.raises(RuntimeError, match=r"empty|not passed"):
                call()
        result = set_model_state_dict(model, {}, options=StateDictOptions(strict=False))
        assert not result.unexpected_keys
        assert values(get_model_state_dict(model)) == right

    world.run(body)


@requirement(
    "RFSDP-DICT-4606",
    "A state dict that is asked for some submodules has their parameters alone, in that of optimizers as well.",
    source="torch.distributed.checkpoint.state_dict: get_model_state_dict, get_optimizer_state_dict, get_state_dict: "
    "submodules: 'only return the model parameters that belong to the submodules'",
)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.world(2)
def test_submodules(world: World, function: str) -> None:
    """Ask for one submodule, or for two of three, of a model that is sharded, replicated or neither."""

    def body(rank: Rank) -> list[list[str]]:
        found = []
        for way in ("alone", "sharded", "replicated"):
            model: Any = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in "abc")).to(rank.device)
            if way != "alone":
                ways(rank)[way](model)
            adam = torch.optim.Adam(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            for names in ("a", "bc"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # submodules are deprecated
                    state = FUNCTIONS[function](model, adam, submodules=set(map(model.get_submodule, names)))
                found.append(sorted(state))
        return found

    right = [["a.bias", "a.weight"], ["b.bias", "b.weight", "c.bias", "c.weight"]] * 3
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "RFSDP-STATE-4884",
    "After an evaluation, the state dict of any part of a managed module has shards, whose values the part also loads.",
    source="torch.distributed.fsdp.fully_shard; torch.nn.Module.state_dict, load_state_dict",
)
@pytest.mark.parametrize("way", ["sharded", "hybrid", "replicated"])
@pytest.mark.world(2)
def test_states_of_parts(world: World, way: str) -> None:
    """Take the state of each module in turn, twice the values of which it loads after another evaluation."""

    def body(rank: Rank) -> None:
        inner = nn.Sequential(OrderedDict(a=nn.Linear(2, 3), b=nn.Sequential(nn.Linear(3, 2, bias=False))))
        model: Any = nn.Sequential(inner, nn.Linear(2, 2)).to(rank.device)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        x = torch.ones(1, 2, device=rank.device)
        names = [name for name, module in model.named_modules() if dict(module.named_parameters())]
        ways(rank)[way](model)
        for name in names:
            part = model.get_submodule(name)
            right = {key: [1.0] * p.numel() for key, p in part.named_parameters()}
            with torch.no_grad():
                model(x)
            state = part.state_dict()
            assert {key: type(value) for key, value in state.items()} == dict.fromkeys(right, DTensor), name
            assert {key: value.full_tensor().flatten().tolist() for key, value in state.items()} == right, name
            with torch.no_grad():
                before = model(x).tolist()
                part.load_state_dict({key: value * 2 for key, value in state.items()})
                found = {key: value.full_tensor().flatten().tolist() for key, value in part.state_dict().items()}
                assert found == {key: [2.0] * len(values) for key, values in right.items()}, name
                assert model(x).tolist() != before, name
                part.load_state_dict({key: value / 2 for key, value in part.state_dict().items()})
                assert model(x).tolist() == before, name

    world.run(body)
