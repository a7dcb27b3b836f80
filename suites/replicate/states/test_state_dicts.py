"""State dicts of replicated models and their optimizers by torch.distributed.checkpoint.state_dict, by every option."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

from fixtures.states import check_without_ranks, gradients_of
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

SOURCE = "torch/distributed/checkpoint/state_dict.py"


class Block(nn.Module):
    """A layer, buffers of which one is not saved, a number without dimensions, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.note: Any = torch.zeros(1)

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) * self.scale
        return result


def model_of(fill: float, rank: Rank) -> nn.Sequential:
    """Create a model with two blocks, of which the second has a frozen bias, filled with numbers that all differ."""
    model = nn.Sequential(Block(), Block())
    with torch.no_grad():
        for i, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
            steps = torch.arange(tensor.numel()).reshape(tensor.shape)
            tensor.copy_((fill + i + steps / 64).to(tensor.dtype))
            if name == "1.layer.bias":
                tensor.requires_grad_(False)
    for block in model:
        block.note = torch.full((1,), fill, device=rank.device)
    return model.to(rank.device)


NAMES = [
    f"{i}.{name}"
    for i in range(2)
    for name in ("scale", "level", "count", "layer.weight", "layer.bias", "_extra_state")
]
HOW: dict[str, Callable[[Any], Any]] = {
    "DDP": lambda module: DistributedDataParallel(module, init_sync=False, broadcast_buffers=False),
    "replicate": lambda module: replicate.replicate(module, init_sync=False, broadcast_buffers=False),
    "inner": lambda module: inner(module),
    "compiled": lambda module: torch.compile(HOW["DDP"](module)),
    "around compiled": lambda module: HOW["DDP"](torch.compile(module)),
}


def inner(module: nn.Sequential) -> nn.Sequential:
    """Wrap the blocks of a model one by one."""
    return nn.Sequential(*map(HOW["DDP"], module))


def same(first: Any, second: Any) -> bool:
    return bool(torch.equal(first, second)) if isinstance(first, torch.Tensor) else first == second


@requirement(
    "REPL-STATE-03",
    "The state dict of a replicated model has the names and values of the plain one, under every option.",
    source=f"{SOURCE}: get_model_state_dict, StateDictOptions",
)
@requirement(
    "REPL-STATE-04",
    "Only rank 0 gets a state dict with both full_state_dict and cpu_offload, but all ranks do with one of them.",
    source=f"{SOURCE}: StateDictOptions.cpu_offload, full_state_dict",
)
@requirement(
    "REPL-STATE-05",
    "With ignore_frozen_params, frozen parameters are not in the state dict.",
    source=f"{SOURCE}: StateDictOptions.ignore_frozen_params",
)
@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.world(2)
def test_saved(world: World, how: str) -> None:
    """Compare names, values, memory and devices with the plain module's own state dict."""

    def body(rank: Rank) -> None:
        module = model_of(rank.index, rank)
        plain = module.state_dict()
        model = HOW[how](module)
        assert sorted(plain) == sorted(NAMES)
        for full in (False, True):
            for offload in (False, True):
                for frozen in (False, True):
                    options = StateDictOptions(full_state_dict=full, cpu_offload=offload, ignore_frozen_params=frozen)
                    state = get_model_state_dict(model, options=options)
                    where = (full, offload, frozen)
                    if full and offload and rank.index > 0:
                        assert state == {}, where
                        continue
                    names = [name for name in NAMES if not (frozen and name == "1.layer.bias")]
                    assert sorted(state) == sorted(names), where
                    for name in names:
                        found = state[name]
                        assert same(found.to(rank.device), plain[name]), (where, name)
                        assert found.dtype == plain[name].dtype, (where, name)
                        assert found.shape == plain[name].shape, (where, name)
                        assert found.device.type == ("cpu" if offload else rank.device.type), (where, name)
                        if not (full or offload):
                            assert found.data_ptr() == plain[name].data_ptr(), (where, name)
        default = get_model_state_dict(model)
        assert sorted(default) == sorted(NAMES)
        assert all(parameter.grad is None for parameter in module.parameters())

    world.run(body)


@requirement(
    "REPL-STATE-06",
    "Loading a state dict into a replicated model sets every parameter, buffer and extra state, under every option.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions",
)
@requirement(
    "REPL-STATE-07",
    "With broadcast_from_rank0, every rank gets rank 0's values, whatever the others pass.",
    source=f"{SOURCE}: StateDictOptions.broadcast_from_rank0",
)
@requirement(
    "REPL-STATE-08",
    "Loading with strict=False loads what is there, and returns missing or unexpected names.",
    source=f"{SOURCE}: StateDictOptions.strict",
)
@requirement(
    "REPL-STATE-09",
    "Loading with strict=True raises an error that names a missing or unexpected key.",
    source=f"{SOURCE}: StateDictOptions.strict",
)
@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.world(2)
def test_loaded(world: World, how: str) -> None:
    """Load the state of another model, all of it or with a key too few or too many."""

    def body(rank: Rank) -> None:
        def state() -> dict[str, Any]:
            return {name: value.clone() for name, value in model_of(50.0, rank).state_dict().items()}

        def fresh() -> tuple[nn.Module, Any]:
            module = model_of(rank.index, rank)
            return module, HOW[how](module)

        def check(module: nn.Module, without: str, where: Any) -> None:
            old = model_of(rank.index, rank).state_dict()
            right = {name: old[name] if name == without else value for name, value in state().items()}
            for name, value in module.state_dict().items():
                assert same(value, right[name]), (where, name)
                assert value.device == rank.device, (where, name)

        for full, broadcast in ((False, False), (True, False), (True, True)):
            for strict in (True, False):
                where = (full, broadcast, strict)
                options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=strict)
                module, model = fresh()
                memory = [p.data_ptr() for p in module.parameters()]
                given = {} if broadcast and rank.index > 0 else state()
                result = set_model_state_dict(model, given, options=options)
                check(module, "", where)
                assert [*result.missing_keys, *result.unexpected_keys] == [], where
                assert [p.data_ptr() for p in module.parameters()] == memory, where
                if broadcast:
                    continue
                for key in ("0.layer.weight", "1.scale", "1.level", "0.count", "1.layer.bias"):
                    module, model = fresh()
                    given = {name: value for name, value in state().items() if name != key}
                    if strict:
                        if not full:
                            with pytest.raises(RuntimeError, match=key):
                                set_model_state_dict(model, given, options=options)
                        continue
                    result = set_model_state_dict(model, given, options=options)
                    if not full:
                        assert [missing.endswith(key.split(".", 1)[1]) for missing in result.missing_keys] == [True]
                    check(module, key, (where, key))
                module, model = fresh()
                given = {**state(), "0.other": torch.ones(1)}
                if strict:
                    with pytest.raises(RuntimeError, match="other"):
                        set_model_state_dict(model, given, options=options)
                else:
                    result = set_model_state_dict(model, given, options=options)
                    assert result.unexpected_keys == ["0.other"], where
                    check(module, "", where)
        _, model = fresh()
        with pytest.raises(ValueError, match="full_state_dict must be True"):
            set_model_state_dict(model, state(), options=StateDictOptions(broadcast_from_rank0=True))

    world.run(body)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.5),
    "AdamW with a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.25),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5, weight_decay=0.25),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.5, centered=True, momentum=0.5),
}


def groups_of(module: nn.Sequential) -> list[dict[str, Any]]:
    """Put the blocks' parameters into two groups of different learning rates, the first of which has its own."""
    return [{"params": list(module[1].parameters())}, {"params": list(module[0].parameters()), "lr": 0.125}]


def trained(module: nn.Sequential, model: Any, optimizer: torch.optim.Optimizer, rank: Rank) -> None:
    for number in range(2):
        model(torch.arange(3.0, device=rank.device)[None] + number).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of the groups of an optimizer; a full state dict makes lists of tuples."""
    return [
        {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def flat(states: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists."""
    found: dict[str, Any] = {}
    for key, value in states.items():
        value = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


@requirement(
    "REPL-STATE-10",
    "An optimizer's state dict has the names of the plain model's parameters and the optimizer's own values.",
    source=f"{SOURCE}: get_optimizer_state_dict, flatten_optimizer_state_dict",
)
@requirement(
    "REPL-STATE-11",
    "Asking for the state of an optimizer that has not run changes no parameter, gradient, learning rate or option.",
    source=f"{SOURCE}: get_optimizer_state_dict",
)
@requirement(
    "REPL-STATE-12",
    "An optimizer into which a state dict is loaded continues as the one that it was taken from.",
    source=f"{SOURCE}: set_optimizer_state_dict, set_state_dict",
)
@pytest.mark.parametrize("how", ["DDP", "replicate", "inner"])
@pytest.mark.world(2)
def test_optimizers(world: World, how: str) -> None:
    """Save after two steps, load into a fresh model and optimizer, and compare two more steps, by every option."""

    def body(rank: Rank) -> None:
        for name, make in OPTIMIZERS.items():
            module = model_of(1.0, rank)
            model, optimizer = HOW[how](module), make(groups_of(module))
            before = {key: value.clone() for key, value in module.state_dict().items()}
            options_before = settings(optimizer)
            first = get_optimizer_state_dict(model, optimizer)
            assert all(same(value, before[key]) for key, value in module.state_dict().items()), name
            assert all(p.grad is None for p in module.parameters()), name
            assert settings(optimizer) == options_before, name
            assert [group["lr"] for group in first["param_groups"]] == [0.5, 0.125], name
            model(torch.arange(3.0, device=rank.device)[None]).sum().backward()
            gradients = gradients_of(module)
            for each in (optimizer, make(groups_of(module))):  # the other has not run
                get_optimizer_state_dict(model, each)
                assert str(gradients_of(module)) == str(gradients), name
            optimizer.zero_grad()
            trained(module, model, optimizer, rank)
            parameters = {p: key for key, p in module.named_parameters()}
            own = {parameters[p]: state for p, state in optimizer.state.items()}
            for full in (False, True):
                for offload in (False, True):
                    for flatten in (False, True):
                        for broadcast in (False, True):
                            where = (name, full, offload, flatten, broadcast)
                            if broadcast and (not full or offload):
                                continue
                            options = StateDictOptions(
                                full_state_dict=full,
                                cpu_offload=offload,
                                flatten_optimizer_state_dict=flatten,
                                broadcast_from_rank0=broadcast,
                            )
                            saved, state = get_state_dict(model, optimizer, options=options)
                            if full and offload and rank.index > 0:
                                assert (saved, state) == ({}, {}), where
                                continue
                            check_optimizer(flat(state), own, flatten, where, offload)
                            if full and offload:  # the other rank has nothing to load
                                continue
                            resume(rank, where, make, options, module, optimizer, saved, state)

    def resume(
        rank: Rank,
        where: Any,
        make: Any,
        options: StateDictOptions,
        module: Any,
        optimizer: Any,
        saved: Any,
        state: Any,
    ) -> None:
        saved, state = copy.deepcopy((saved, state))
        if options.broadcast_from_rank0 and rank.index > 0:
            saved, state = {}, {}
        other = model_of(9.0 + rank.index, rank)
        again, fresh = HOW[how](other), make(groups_of(other))
        if options.full_state_dict:
            # PyTorch raises a KeyError if it is to load a full state with flatten_optimizer_state_dict
            options = dataclasses.replace(options, flatten_optimizer_state_dict=False)
            set_model_state_dict(again, saved, options=options)
            set_optimizer_state_dict(again, fresh, state, options=options)
        else:
            set_state_dict(again, fresh, model_state_dict=saved, optim_state_dict=state, options=options)
        for (key, mine), (_, theirs) in zip(module.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(mine, theirs), (where, key)
            one, two = optimizer.state.get(mine, {}), fresh.state.get(theirs, {})
            assert one.keys() == two.keys(), (where, key)
            for part, value in one.items():
                assert same(value, two[part].to(value.device)), (where, key, part)
        assert settings(optimizer) == settings(fresh), where
        before = [p.detach().clone() for p in other.parameters()]
        trained(other, again, fresh, rank)
        copied = model_of(0.0, rank)
        for p, value in zip(copied.parameters(), before, strict=True):
            p.detach().copy_(value)
        twin = make(groups_of(copied))
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        trained(copied, HOW[how](copied), twin, rank)
        for p, right in zip(other.parameters(), copied.parameters(), strict=True):
            assert torch.equal(p, right), where

    def check_optimizer(state: dict[str, Any], own: Any, flatten: bool, where: Any, offload: bool) -> None:
        for key, parts in own.items():
            for part, value in parts.items():
                found = state.pop(f"state.{key}.{part}")
                assert same(found, value.cpu() if offload and isinstance(value, torch.Tensor) else value), (where, key)
        assert not [key for key in state if key.startswith("state.")], where
        lrs = {"0": 0.125, "1": 0.5}
        if flatten:
            for key in own:
                assert float(state[f"param_groups.{key}.lr"]) == lrs[key[0]], (where, key)
        else:
            for number, block in enumerate("10"):
                assert float(state[f"param_groups.{number}.lr"]) == lrs[block], where
                names = [v for k, v in state.items() if k.startswith(f"param_groups.{number}.params.")]
                right = ["scale", "layer.weight", "layer.bias"]
                assert names == [f"{block}.{name}" for name in right], where

    world.run(body)


@requirement(
    "REPL-STATE-13",
    "Several optimizers have one state dict together, which can be loaded into each of them again.",
    source=f"{SOURCE}: get_optimizer_state_dict, optimizers",
)
@requirement(
    "REPL-STATE-14",
    "Loading optimizer state without that of a parameter is an error that names it, unless strict is False.",
    source=f"{SOURCE}: set_optimizer_state_dict, StateDictOptions.strict",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_several_optimizers(world: World, how: str) -> None:
    """Each block has its own optimizer; then the state of one weight is left out."""

    def body(rank: Rank) -> None:
        def made(fill: float) -> tuple[Any, Any, list[torch.optim.Optimizer]]:
            module = model_of(fill, rank)
            both: list[torch.optim.Optimizer] = [
                torch.optim.Adam(module[0].parameters(), lr=0.5),
                torch.optim.SGD(module[1].parameters(), lr=0.25, momentum=0.5),
            ]
            return module, HOW[how](module), both

        module, model, both = made(1.0)
        model(torch.ones(1, 3, device=rank.device)).sum().backward()
        for optimizer in both:
            optimizer.step()
        state = get_optimizer_state_dict(model, both)
        assert sorted(state["state"]) == sorted(k for k, p in module.named_parameters() if p.requires_grad)
        assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.25]
        other, again, loaded = made(3.0)
        set_optimizer_state_dict(again, loaded, state)
        for mine, theirs in zip(both, loaded, strict=True):
            assert str(mine.state_dict()) == str(theirs.state_dict())
        short = copy.deepcopy(state)
        del short["state"]["1.layer.weight"]
        _, again, loaded = made(3.0)
        with pytest.raises(RuntimeError, match=r"1\.layer\.weight"):
            set_optimizer_state_dict(again, loaded, short)
        other, again, loaded = made(3.0)
        set_optimizer_state_dict(again, loaded, short, options=StateDictOptions(strict=False))
        weight = other[0].layer.weight
        assert torch.equal(loaded[0].state[weight]["exp_avg"], both[0].state[module[0].layer.weight]["exp_avg"])

    world.run(body)


@requirement(
    "REPL-SAVED-01",
    "States of a model on one device are got and loaded as those of a distributed one, also without a process group.",
    source=f"{SOURCE}: get_state_dict, set_state_dict, StateDictOptions",
)
@pytest.mark.world(1)
def test_without_ranks(world: World) -> None:
    """Combine full_state_dict, cpu_offload and flattened states, and train on, before and after the group is gone."""

    def body(rank: Rank) -> None:
        check_without_ranks(rank)
        dist.destroy_process_group()
        check_without_ranks(rank)

    world.run(body)


class Prefixed(nn.Module):
    """A model whose names have the prefix of a DDP module's state dict in the middle, alone, or nearly."""

    def __init__(self, deep: int = 2) -> None:
        super().__init__()
        self.weight, self.module_ = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))
        self.register_buffer("submodule", torch.randn(1))
        self.inner = nn.ModuleDict({"module": nn.Linear(2, 2), "module_list": nn.BatchNorm1d(2)})
        self.module = Prefixed(deep - 1) if deep else nn.Linear(2, 2)


@requirement(
    "DDP-PREFIX-01",
    "Stripping a prefix from a state dict strips it once, from the beginning of names alone, in any kind of dict.",
    source="torch.nn.modules.utils.consume_prefix_in_state_dict_if_present",
)
@requirement(
    "DDP-PREFIX-02",
    "A DDP module's state dict without its prefix is that of the plain module, with the versions of its layers.",
    source="torch.nn.modules.utils.consume_prefix_in_state_dict_if_present: _metadata",
)
@pytest.mark.world(1)
def test_prefixes(world: World) -> None:
    """Names that have the prefix several times, in the middle, without its dot, or not at all; nested wrappers."""

    def body(rank: Rank) -> None:
        plain = Prefixed().to(rank.device)
        model: Any = DistributedDataParallel(plain)
        right = plain.state_dict()
        for times, wrapped in enumerate((model, nn.ModuleDict({"module": model})), 1):
            state = wrapped.state_dict()
            for _ in range(times):
                consume_prefix_in_state_dict_if_present(state, "module.")
            assert list(state) == list(right)
            assert all(same(value, right[name]) for name, value in state.items())
            assert state._metadata == right._metadata
            other = Prefixed().to(rank.device)
            other.load_state_dict(state)
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), plain.parameters(), strict=True))
        for prefix in ("module.", "_orig_mod.", "a.module.", "m"):
            given = {f"{prefix}{name}": number for number, name in enumerate(("x", f"y.{prefix}z", f"{prefix}w"))}
            given |= {f"-{prefix}x": 3, f"y{prefix}": 4, prefix.removesuffix(".") + "_": 5}
            stripped = {name[len(prefix) :] if name.startswith(prefix) else name: n for name, n in given.items()}
            consume_prefix_in_state_dict_if_present(given, prefix)
            assert given == stripped, prefix
        empty: dict[str, Any] = {}
        consume_prefix_in_state_dict_if_present(empty, "module.")
        assert empty == {}

    world.run(body)


@requirement(
    "DDP-PREFIX-02",
    "A DDP module's state dict without its prefix is that of the plain module, with the versions of its layers.",
    source="torch.nn.modules.utils.consume_prefix_in_state_dict_if_present: _metadata",
)
@pytest.mark.world(1)
def test_prefix_of_a_child(world: World) -> None:
    """A child called module has a child of the name of its sibling, which comes after it."""

    def body(rank: Rank) -> list[str]:
        plain = nn.ModuleDict({"module": nn.ModuleDict({"layer": nn.Linear(1, 1)}), "layer": nn.Linear(1, 1)})
        state = DistributedDataParallel(plain.to(rank.device)).state_dict()
        consume_prefix_in_state_dict_if_present(state, "module.")
        return sorted(state)

    assert_on_ranks([["layer.bias", "layer.weight", "module.layer.bias", "module.layer.weight"]], world.run(body))
