"""Distributed state dicts of fully sharded, hybrid sharded and replicated models, with every option."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections import OrderedDict
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures import optimizer_groups, states
from fixtures.wrapped import wrapped
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.dynamo import checkpointed
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.checkpoint.state_dict"


def sharded(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Shard over two ranks, or over two of four with two replicas of each shard."""
    mesh = rank.mesh() if rank.size == 2 else rank.mesh(2, 2, names=("replicas", "shards"))
    if not next(model.parameters()).is_meta:
        model.to(rank.device)
    for name in "first", "second", "third":
        fully_shard(getattr(model, name), mesh=mesh)
    return fully_shard(model, mesh=mesh), rank.index % 2, 2


def replicated(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Replicate over two or four ranks."""
    if next(model.parameters()).is_meta:
        for module in (model.first, model.second, model.third, model):
            replicate_fsdp.replicate(module, **{replicate_fsdp.MESH: rank.mesh()})
        return model, rank.index % 2, 2
    return replicate_fsdp.apply(model, rank), rank.index % 2, 2


def in_buckets(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Replicate over two ranks by DistributedDataParallel."""
    return DistributedDataParallel(model.to(rank.device)), rank.index % 2, 2


STACKS = {"sharded": sharded, "replicated": replicated}


@requirement(
    "RFSDP-DICT-01",
    "get_model_state_dict has one device's names and values with every option, whole or sharded as asked for.",
    source=f"{SOURCE}: get_model_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
def test_model_states(world: World, stack: str) -> None:
    """Combine full_state_dict, cpu_offload and ignore_frozen_params; rank 0 alone has a full state on the host."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_model_states(rank, distribute))


@requirement(
    "RFSDP-DICT-01",
    "get_model_state_dict has one device's names and values with every option, whole or sharded as asked for.",
    source=f"{SOURCE}: get_model_state_dict, StateDictOptions",
)
@requirement(
    "RFSDP-DICT-488",
    "A flattened state dict of an optimizer can be set, of one with an empty group as well.",
    source=f"{SOURCE}: StateDictOptions.flatten_optimizer_state_dict; pytorch/pytorch#147730",
)
@pytest.mark.parametrize("empty", [False, True], ids=["whole", "empty"])
@pytest.mark.world(2)
def test_flattened_groups(world: World, empty: bool) -> None:
    """One group has all parameters, or all but the bias, which the other has, or none."""

    def body(rank: Rank) -> str:
        model: Any = fully_shard(nn.Linear(2, 2).to(rank.device), mesh=rank.mesh())
        groups = ([model.weight, model.bias], []) if empty else ([model.weight], [model.bias])
        first, second = (torch.optim.AdamW([{"params": g} for g in groups], lr=lr) for lr in (0.5, 0.25))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        saved = get_optimizer_state_dict(model, first, options=options)
        try:
            set_optimizer_state_dict(model, second, saved, options=options)
        except IndexError as e:
            return f"not set: {e}"
        return f"set: {second.param_groups[0]['lr']}"

    assert_on_ranks(["set: 0.5"] * world.size, world.run(body))


@requirement(
    "RFSDP-SAVED-02",
    "A state dict of a model that is compiled, or has checkpointed layers, has the names of the plain model.",
    source=f"{SOURCE}: get_state_dict, set_state_dict; torch.compile",
)
@pytest.mark.world(2)
def test_after_a_forward(world: World) -> None:
    """Parameters stay whole after a forward, ranks divide their sizes or not, and one of two buffers is not saved."""

    def body(rank: Rank) -> None:
        for size, resharded, compiled in itertools.product((1, 2, 3, 5), (True, False), (False, True)):
            what = f"{size=}, {resharded=}, {compiled=}"
            layers = [nn.Linear(size, size) for _ in range(2)]
            plain = nn.Sequential(*layers)
            with torch.no_grad():
                for i, parameter in enumerate(plain.parameters()):
                    parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 10.0 * i)
            plain.register_buffer("kept", torch.arange(3.0))
            plain.register_buffer("left", torch.arange(3.0), persistent=False)
            right = {name: value.clone() for name, value in plain.state_dict().items()}
            plain.to(rank.device)
            for layer in layers:
                fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=resharded)
            model: Any = fully_shard(plain, mesh=rank.mesh(), reshard_after_forward=resharded)
            model = torch.compile(model, backend="eager") if compiled else model
            if not compiled:
                model(torch.ones(2, size, device=rank.device))
            found = states.copied(get_model_state_dict(model))
            states.assert_equal(right, states.whole(found), what)
            local = {name: value.to_local().shape[0] for name, value in found.items() if isinstance(value, DTensor)}
            first = -(-size // 2)
            assert set(local.values()) == {first if rank.index == 0 else size - first}, f"{what}: {local}"
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.zero_()
            set_model_state_dict(model, found)
            states.assert_equal(right, states.whole(get_model_state_dict(model)), f"{what}: loaded")

    world.run(body)


class Versioned(nn.Linear):
    """A layer that notes of which version the state is that it loads."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@requirement(
    "RFSDP-DICT-485",
    "A model state dict has the versions of modules, which they see when they load it.",
    source=f"{SOURCE}: get_model_state_dict; torch.nn.Module: _version",
)
@pytest.mark.parametrize("how", ["sharded", "offloaded", "full"])
@pytest.mark.world(2)
def test_versions(world: World, how: str) -> None:
    """Read a state with some options, and load it into another model."""

    def body(rank: Rank) -> str:
        model, loaded = (nn.Sequential(Versioned(2, 2)).to(rank.device) for _ in range(2))
        fully_shard(model, mesh=rank.mesh())
        if how != "full":
            fully_shard(loaded, mesh=rank.mesh())
        options = StateDictOptions(full_state_dict=how == "full", cpu_offload=how == "offloaded")
        loaded.load_state_dict(get_model_state_dict(model, options=options))
        return f"version {loaded[0].seen}"

    assert_on_ranks(["version 2"] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-486",
    "With ignore_frozen_params, a state dict has no frozen parameter, under none of its names.",
    source=f"{SOURCE}: StateDictOptions.ignore_frozen_params: 'the returned state_dict won't contain any frozen'",
)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.world(2)
def test_no_frozen(world: World, shared: bool) -> None:
    """Two layers have frozen weights, which are one or not."""

    def body(rank: Rank) -> list[str]:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(rank.device)
        if shared:
            model[1].weight = model[0].weight
        for layer in model:
            layer.weight.requires_grad_(False)
        fully_shard(model, mesh=rank.mesh())
        return sorted(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True)))

    assert_on_ranks([["0.bias", "1.bias"]] * world.size, world.run(body))


class Extra(nn.Linear):
    """A layer with an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        """Return what is to be saved."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Keep what is loaded."""
        self.extra = state


@requirement(
    "RFSDP-DICT-487",
    "A state with the extra state of a module can be set, whatever that is.",
    source=f"{SOURCE}: get_model_state_dict, set_model_state_dict; torch.nn.Module.get_extra_state",
)
@pytest.mark.parametrize("extra", [{"a": 1}, None], ids=["dict", "none"])
@pytest.mark.parametrize("way", ["sharded", "replicated", "compiled"])
@pytest.mark.world(2)
def test_values_of_extra_states(world: World, way: str, extra: Any) -> None:
    """Set what was read from another module, whose extra state differs."""

    def body(rank: Rank) -> str:
        def made(state: Any) -> tuple[Extra, Any]:
            layer = Extra(2, 2).to(rank.device)
            layer.extra = state
            return layer, KEPT[way](rank, nn.Sequential(layer))

        (layer, other), (_, model) = made("other"), made(extra)
        try:
            set_model_state_dict(other, dict(get_model_state_dict(model)))
        except RuntimeError as e:
            return f"not set: {e}"
        return f"set: {layer.extra}"

    assert_on_ranks([f"set: {extra}"] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-3002",
    "With strict=False, set_model_state_dict leaves a module's extra state as it is if the state lacks it.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict; torch.nn.Module.set_extra_state",
)
@pytest.mark.parametrize("how", ["in parts", "full", "from rank 0"])
@pytest.mark.world(2)
def test_no_extra_state(world: World, how: str) -> None:
    """Set what a module without an extra state has."""
    options: dict[str, Any] = {
        "full": {"full_state_dict": True},
        "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
    }.get(how, {})

    def body(rank: Rank) -> str:
        layer = Extra(2, 2).to(rank.device)
        layer.extra = "own"
        model = fully_shard(nn.Sequential(layer), mesh=rank.mesh())
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict="full_state_dict" in options))
        state.pop("0._extra_state", None)
        set_model_state_dict(model, state, options=StateDictOptions(**options, strict=False))
        return f"left: {layer.extra}"

    assert_on_ranks(["left: own"] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-51",
    "A state dict of several optimizers has the states and groups of each, whichever order it is loaded in.",
    source=f"{SOURCE}: get_state_dict, set_optimizer_state_dict; optimizers",
)
@requirement(
    "RFSDP-DICT-52",
    "Loading an optimizer's state gives each group the settings that were saved for its parameters, in any order.",
    source=f"{SOURCE}: set_optimizer_state_dict",
)
@pytest.mark.parametrize("how", ["groups", "optimizers"])
@pytest.mark.parametrize("momentum", [0.5, 0.0], ids=["momentum", "stateless"])
@pytest.mark.world(2)
def test_stateless_groups(world: World, momentum: float, how: str) -> None:
    """Two layers are groups of an optimizer, loaded in the reverse order, or have optimizers, loaded in their order."""

    def body(rank: Rank) -> list[float]:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(rank.device)
        fully_shard(model, mesh=rank.mesh())
        first, second = (list(layer.parameters()) for layer in model)

        def made(groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
            divided = [groups] if how == "groups" else [[group] for group in groups]
            return [torch.optim.SGD(each, momentum=momentum) for each in divided]

        saved = get_optimizer_state_dict(model, made([{"params": first, "lr": 1.0}, {"params": second, "lr": 2.0}]))
        others = [{"params": first, "lr": 3.0}, {"params": second, "lr": 4.0}]
        loaded = made(others[::-1] if how == "groups" else others)
        set_optimizer_state_dict(model, loaded, saved)
        return [group["lr"] for optimizer in loaded for group in optimizer.param_groups]

    assert_on_ranks([[2.0, 1.0] if how == "groups" else [1.0, 2.0]] * world.size, world.run(body))


NUMBERED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.5, amsgrad=True),
    "learning rate in a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.5)),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5),
    "without state": lambda groups: torch.optim.SGD(groups, lr=0.5),
}
"""Optimizers of groups."""


@requirement(
    "RFSDP-DICT-2400",
    "set_optimizer_state_dict also takes what the state_dict method of such an optimizer returns.",
    source=f"{SOURCE}: set_optimizer_state_dict: optim_state_dict; torch.optim.Optimizer.state_dict",
)
@pytest.mark.parametrize("way", ["plain", "sharded", "replicated", "compiled"])
@pytest.mark.world(2)
def test_numbered(world: World, way: str) -> None:
    """Set the state of an optimizer that made a step, whose parameters are numbers, in a new one of other settings."""

    def body(rank: Rank) -> None:
        for name, make in NUMBERED.items():

            def made(fill: float, make: Any = make) -> tuple[Any, torch.optim.Optimizer]:
                layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(rank.device)
                for parameter in layers.parameters():
                    nn.init.constant_(parameter, fill)
                model = KEPT[way](rank, layers)
                first, second = (list(layer.parameters()) for layer in layers)
                return model, make([{"params": second, "lr": fill}, {"params": first}])

            model, saved = made(1.0)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            saved.step()
            other, loaded = made(4.0)
            state = copy.deepcopy(saved.state_dict())
            set_optimizer_state_dict(other, loaded, state)
            states.assert_equal(states.whole(saved.state_dict()), states.whole(loaded.state_dict()), name)
            left = [number for number, p in enumerate(other.parameters()) if p.grad is not None]
            assert not left, f"{name}: gradients of {left}"

    world.run(body)


@requirement(
    "RFSDP-DICT-02",
    "get_optimizer_state_dict has one device's values with every option, and changes neither model nor optimizer.",
    source=f"{SOURCE}: get_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
def test_optimizer_states(world: World, stack: str) -> None:
    """Get it before the first step and after steps; two groups have different learning rates."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_optimizer_states(rank, distribute))


@requirement(
    "RFSDP-DICT-03",
    "A model and an optimizer that a state dict was loaded into train on as the saved ones, whatever the options.",
    source=f"{SOURCE}: set_state_dict, set_model_state_dict, set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
def test_loading(world: World, stack: str) -> None:
    """Load sharded, full and flattened states, and a full one from rank 0, into a new and into a trained model."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_loading(rank, distribute))


FULL, FLAT = {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}
FLATTENED: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "by its keys": (FULL | FLAT, {}),
    "as flattened": (FULL | FLAT, FLAT),
    "as full": (FULL | FLAT, FULL),
    "offloaded": (FLAT | {"cpu_offload": True}, FLAT | {"cpu_offload": True}),
    "as saved": (FULL | FLAT, FULL | FLAT),
    "from rank 0": (FULL | FLAT | {"cpu_offload": True}, FULL | FLAT | {"broadcast_from_rank0": True}),
}
"""Options for saving and loading a flattened state."""


@requirement(
    "RFSDP-DICT-03",
    "A model and an optimizer that a state dict was loaded into train on as the saved ones, whatever the options.",
    source=f"{SOURCE}: set_state_dict, set_model_state_dict, set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("options", FLATTENED)
@pytest.mark.world(2)
def test_full_flattened(world: World, options: str) -> None:
    """Load an optimizer's flattened state, whole or from the host, into another optimizer that has taken steps."""

    def body(rank: Rank) -> None:
        def made(start: float) -> tuple[Any, torch.optim.Optimizer]:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(rank.device)
            for number, p in enumerate(model.parameters()):
                nn.init.constant_(p, start + number)
            fully_shard(model, mesh=rank.mesh())
            rmsprop = torch.optim.RMSprop(model.parameters(), lr=start, momentum=0.5)
            model(torch.full((2, 3), start, device=rank.device)).sum().backward()
            rmsprop.step()
            return model, rmsprop

        def whole(model: Any, rmsprop: torch.optim.Optimizer) -> Any:
            return states.whole(
                get_optimizer_state_dict(model, rmsprop, options=StateDictOptions(full_state_dict=True))
            )

        saving, loading = FLATTENED[options]
        one, other = made(1.0), made(2.0)
        saved = states.copied(get_optimizer_state_dict(*one, options=StateDictOptions(**saving)))
        right = whole(*one)
        set_optimizer_state_dict(*other, saved, options=StateDictOptions(**loading))
        states.assert_equal(right, whole(*other), options)

    world.run(body)


@requirement(
    "RFSDP-DICT-04",
    "With strict=False, set_model_state_dict loads the keys that there are, and otherwise names missing ones.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_strictness(world: World, stack: str) -> None:
    """A key is missing and another unexpected."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_strictness(rank, distribute))


@requirement(
    "RFSDP-SAVED-01",
    "Settings that a scheduler or a user added to an optimizer's groups are saved and loaded, of empty groups as well.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_settings(world: World, stack: str) -> None:
    """Load into optimizers that have these settings or not, from sharded and full states."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_settings(rank, distribute))


@requirement(
    "RFSDP-DICT-04",
    "With strict=False, set_model_state_dict loads the keys that there are, and otherwise names missing ones.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict",
)
@pytest.mark.world(2)
def test_strictness_of_full_states(world: World) -> None:
    """Every rank has the full state, which lacks a parameter or a buffer."""
    world.run(lambda rank: states.check_strictness_of_full(rank, replicated))


@requirement(
    "RFSDP-SAVED-01",
    "Settings that a scheduler or a user added to an optimizer's groups are saved and loaded, of empty groups as well.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict",
)
@pytest.mark.parametrize("how", ["full", "full-from-rank-0"])
@pytest.mark.world(2)
def test_new_settings(world: World, how: str) -> None:
    """Load a full state into an optimizer that has none of these settings."""
    world.run(lambda rank: states.check_setting(rank, replicated, how, scheduled=False))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"number": 3, "flag": False, "nothing": None, "list": [1, 2.5], "dict": {"a": {"b": [4]}}},
    "others": {
        "tuple": (0.5, 0.25),
        "tuples": [(1, 2), (3,)],
        "empty": [],
        "no keys": {},
        "by number": {1: 0.5, 10: 2},
    },
}
"""Settings of a group, or states of a parameter, that no optimizer of PyTorch has."""


def other(value: Any) -> Any:
    """Return a value of the same structure with other numbers."""
    if isinstance(value, dict):
        return {key: other(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(other, value))
    return value if value is None else type(value)(not value)


@requirement(
    "RFSDP-SAVED-125",
    "Settings and states of an optimizer are loaded as they were saved, be they tuples, empty, or dicts by number.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict; torch.optim.Optimizer: param_groups, state",
)
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("how", ["as they are", "full"])
@pytest.mark.world(2)
def test_kinds_of_settings(world: World, how: str, kind: str) -> None:
    """Load into an optimizer with other numbers; a full state comes from each rank, or from rank 0 alone."""
    right = SETTINGS[kind]
    options = [{}] if how == "as they are" else [FULL, FULL | {"broadcast_from_rank0": True}]

    def body(rank: Rank) -> list[Any]:
        found = []
        for loading in options:
            made = []
            for values in right, other(right):
                model = fully_shard(nn.Linear(4, 4, device=rank.device))
                optimizer = torch.optim.SGD([{"params": list(model.parameters()), **values}], lr=0.5, momentum=0.5)
                model(torch.ones(1, 4, device=rank.device)).sum().backward()
                optimizer.step()
                for state in optimizer.state.values():
                    state |= values
                made.append((model, optimizer))
            saved = get_optimizer_state_dict(*made[0], options=StateDictOptions(**(loading and FULL)))
            if "broadcast_from_rank0" in loading and rank.index:
                saved = {}
            set_optimizer_state_dict(*made[1], saved, options=StateDictOptions(**loading))
            loaded = made[1][1]
            every = *loaded.param_groups, *loaded.state.values()
            found += [{name: each.get(name, "lost") for name in right} for each in every]
        return found

    assert_on_ranks([[right] * 3 * len(options)] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-04",
    "With strict=False, set_model_state_dict loads the keys that there are, and otherwise names missing ones.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict",
)
@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offloaded"])
@pytest.mark.world(2)
def test_unknown_key(world: World, offload: bool) -> None:
    """Rank 0 has the full state, and a tensor besides that the model lacks; keep it on the device or not."""
    world.run(lambda rank: states.check_unknown(rank, sharded, offload))


@requirement(
    "RFSDP-SAVED-01",
    "Settings that a scheduler or a user added to an optimizer's groups are saved and loaded, of empty groups as well.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict",
)
@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "in-between", "last"])
@pytest.mark.world(2)
def test_empty_group(world: World, at: int) -> None:
    """One of three groups has no parameters; train on."""
    world.run(lambda rank: optimizer_groups.check_empty_group(rank, sharded, at))


@requirement(
    "RFSDP-SAVED-02",
    "A state dict of a model that is compiled, or has checkpointed layers, has the names of the plain model.",
    source=f"{SOURCE}: get_state_dict, set_state_dict; torch.compile",
)
@pytest.mark.parametrize("stack", [*STACKS, "ddp"])
@pytest.mark.world(2)
def test_names(world: World, stack: str) -> None:
    """Wrap one of the layers, which are managed by themselves, or none, and compile the model or not."""
    distribute = STACKS.get(stack, in_buckets)
    world.run(lambda rank: states.check_names(rank, distribute))


COMPILED: dict[str, Callable[[Rank, nn.Module], Any]] = {
    "fsdp1": lambda rank, model: wrapped(rank, torch.compile(model, backend="eager"), use_orig_params=True),
    "fsdp1-flat": lambda rank, model: wrapped(rank, torch.compile(model, backend="eager")),
    "sharded": lambda rank, model: torch.compile(fully_shard(model, mesh=rank.mesh()), backend="eager"),
    "replicated": lambda rank, model: DistributedDataParallel(torch.compile(model, backend="eager")),
}
"""Ways to compile a model for ranks."""


@requirement(
    "RFSDP-SAVED-2802",
    "The state of an optimizer can be set on a compiled model whatever the names of its parameters are.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict; torch.compile",
)
@pytest.mark.parametrize("last", ["last", "norm"], ids=["apart", "within"])
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.world(2)
def test_names_within_names(world: World, way: str, last: str) -> None:
    """Of two layers, the first is called layer.norm, and the second last, or norm."""

    def body(rank: Rank) -> list[str]:
        inner = nn.Sequential(OrderedDict(norm=nn.Linear(4, 4, bias=False)))
        layers = nn.Sequential(OrderedDict([("layer", inner), (last, nn.Linear(4, 4, bias=False))]))
        model = COMPILED[way](rank, layers.to(rank.device))
        saved, loaded = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
        for number, p in enumerate(model.parameters()):
            p.grad = p.detach() + number
        saved.step()
        set_optimizer_state_dict(model, loaded, get_optimizer_state_dict(model, saved))
        wrong = []
        for name, p in model.named_parameters():
            if not p.numel():  # under FSDP1, all of it is on the other rank
                continue
            right, found = (each.state[p]["momentum_buffer"] for each in (saved, loaded))
            if not torch.equal(*(m.to_local() if isinstance(m, DTensor) else m for m in (right, found))):
                wrong.append(name)
        return wrong

    assert_on_ranks([[], []], world.run(body))


@requirement(
    "RFSDP-SAVED-03",
    "If rank 0's state lacks a key, loading it strictly raises an error that names the key on every rank.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.broadcast_from_rank0, strict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_missing(world: World, stack: str) -> None:
    """Leave out a sharded parameter or a buffer; load without strict then, and at last the whole state."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_missing(rank, distribute))


@requirement(
    "RFSDP-DICT-3000",
    "If a full state has a key that the model lacks, loading it strictly raises an error that names it on every rank.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict, StateDictOptions.broadcast_from_rank0",
)
@pytest.mark.parametrize("broadcast", [False, True], ids=["of each rank", "of rank 0"])
@pytest.mark.world(2)
def test_unexpected(world: World, broadcast: bool) -> None:
    """Each rank has the state, or rank 0 alone, for a sharded, a replicated and a plain model."""

    def body(rank: Rank) -> list[str]:
        silent = []
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=True)
        for way in ("sharded", "replicated", "plain"):
            model = KEPT[way](rank, nn.Sequential(nn.Linear(2, 2)).to(rank.device))
            whole = {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "more": torch.ones(2)}
            try:
                set_model_state_dict(model, {} if broadcast and rank.index else whole, options=options)
                silent.append(f"{way}: no error")
            except RuntimeError as e:
                silent += [f"{way}: {e}"] if "more" not in str(e) else []
        return silent

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "RFSDP-SAVED-04",
    "A full state, of every rank or of rank 0, gives a model on the meta device its values, memory and nothing else.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.full_state_dict, broadcast_from_rank0",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_meta(world: World, stack: str) -> None:
    """Load strictly or not, and compare placements, requires_grad, devices, values, and a step."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_meta(rank, distribute))


@requirement(
    "RFSDP-SAVED-05",
    "A weight that two layers share is under both names in a state dict, and stays shared in the model that loads it.",
    source=f"{SOURCE}: get_state_dict, set_model_state_dict, set_optimizer_state_dict",
)
@pytest.mark.parametrize("stack", ["sharded", "replicated", "plain"])
@pytest.mark.world(2)
def test_tied(world: World, stack: str) -> None:
    """The layers are in one group; save and load sharded, full and flattened states, of momenta and of AdamW."""

    def together(rank: Rank, model: nn.Module) -> Any:
        model.to(rank.device)
        if stack == "sharded":
            return fully_shard(model, mesh=rank.mesh())
        return replicate_fsdp.apply(model, rank, groups=False) if stack == "replicated" else model

    world.run(lambda rank: states.check_tied(rank, together))


@requirement(
    "RFSDP-SAVED-05",
    "A weight that two layers share is under both names in a state dict, and stays shared in the model that loads it.",
    source=f"{SOURCE}: get_state_dict, set_model_state_dict, set_optimizer_state_dict",
)
@pytest.mark.parametrize("way", ["plain", "sharded", "wrapped", "whole, for shards"])
@pytest.mark.world(2)
def test_shared_modules(world: World, way: str) -> None:
    """One layer is under two names; set what was read from another model."""

    def body(rank: Rank) -> str:
        def made(value: float) -> Any:
            layer = nn.Linear(2, 2, bias=False).to(rank.device)
            nn.init.constant_(layer.weight, value)
            model = nn.Sequential(layer, nn.ReLU(), layer)
            if way == "wrapped":
                return DistributedDataParallel(model)
            return model if way == "plain" else fully_shard(model, mesh=rank.mesh())

        options = StateDictOptions(full_state_dict=way == "whole, for shards")
        state, other = dict(get_model_state_dict(made(2.0), options=options)), made(1.0)
        assert sorted(state) == ["0.weight", "2.weight"]
        try:
            set_model_state_dict(other, state, options=options)
        except RuntimeError as e:
            return f"not set: {e}"
        first, *others = other.parameters()
        assert not others
        return f"set: {states.whole({'': first})[''].unique().item()}"

    assert_on_ranks(["set: 2.0"] * world.size, world.run(body))


KEPT: dict[str, Callable[[Rank, nn.Module], Any]] = {
    "plain": lambda rank, model: model,
    "fsdp1": wrapped,
    "sharded": lambda rank, model: fully_shard(model, mesh=rank.mesh()),
    "replicated": lambda rank, model: DistributedDataParallel(model),
    "compiled": lambda rank, model: torch.compile(model, backend="eager"),
    "whole, for shards": lambda rank, model: fully_shard(model, mesh=rank.mesh()),
}
"""Ways to make a module; all but the sharded one load whole tensors."""


@requirement(
    "RFSDP-DICT-304",
    "set_model_state_dict leaves the dict that it loads as it is, so that it can be loaded or saved again.",
    source=f"{SOURCE}: set_model_state_dict; torch.nn.Module.load_state_dict",
)
@pytest.mark.parametrize("way", KEPT)
@pytest.mark.world(2)
def test_loaded_states_stay(world: World, way: str) -> None:
    """Load a state dict into a module, and look at its names and tensors."""

    def body(rank: Rank) -> list[str]:
        def made(start: float) -> Any:
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(rank.device)
            for number, p in enumerate(model.parameters()):
                nn.init.constant_(p, start + number)
            return KEPT[way](rank, model)

        options = StateDictOptions(full_state_dict=way != "sharded")
        given = dict(get_model_state_dict(made(1), options=options))
        before = {name: value.clone() for name, value in given.items()}
        set_model_state_dict(made(10), given, options=options)
        changed = [f"{name} is lost" for name in before if name not in given]
        changed += [f"{name} has come" for name in given if name not in before]
        for name in given.keys() & before.keys():
            if type(given[name]) is not type(before[name]) or not torch.equal(given[name], before[name]):
                changed.append(f"{name} has become a {type(given[name]).__name__}, or other numbers")
        return sorted(changed)

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-484",
    "A full state gives a model its values, whatever the memory format of its tensors is.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.full_state_dict, broadcast_from_rank0",
)
@pytest.mark.parametrize("how", ["every-rank", "rank-0"])
@pytest.mark.world(2)
def test_memory_formats(world: World, how: str) -> None:
    """Every rank has a channels-last weight, or rank 0 has it alone."""

    def body(rank: Rank) -> list[float]:
        model: Any = fully_shard(nn.Conv2d(2, 4, 2, bias=False).to(rank.device), mesh=rank.mesh())
        weight = torch.arange(32.0, device=rank.device).view(4, 2, 2, 2).to(memory_format=torch.channels_last)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank-0")
        given = {"weight": weight} if how == "every-rank" or rank.index == 0 else {}
        set_model_state_dict(model, given, options=options)
        found: list[float] = model.weight.full_tensor().flatten()[-4:].tolist()
        return found

    assert_on_ranks([[28.0, 29.0, 30.0, 31.0]] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-51",
    "A state dict of several optimizers has the states and groups of each, whichever order it is loaded in.",
    source=f"{SOURCE}: get_state_dict, set_optimizer_state_dict; optimizers",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_several_optimizers(world: World, stack: str) -> None:
    """Divide three layers among two or three optimizers, and load them in the same and in the reverse order."""
    distribute = STACKS[stack]
    world.run(lambda rank: optimizer_groups.check_several(rank, distribute))


@requirement(
    "RFSDP-DICT-52",
    "Loading an optimizer's state gives each group the settings that were saved for its parameters, in any order.",
    source=f"{SOURCE}: set_optimizer_state_dict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_order_of_groups(world: World, stack: str) -> None:
    """Load three groups in three other orders, and parameters in the reverse order within each group."""
    distribute = STACKS[stack]
    world.run(lambda rank: optimizer_groups.check_order(rank, distribute))


@requirement(
    "RFSDP-DICT-3001",
    "Loading an optimizer's state into other groups gives each the settings of its parameters, or raises an error.",
    source=f"{SOURCE}: set_optimizer_state_dict; torch.optim.Optimizer.load_state_dict: number of groups",
)
@pytest.mark.parametrize("how", ["by names", "full", "flattened"])
@pytest.mark.parametrize("saved", [2, 1], ids=["joined", "divided"])
@pytest.mark.world(2)
def test_other_groups(world: World, saved: int, how: str) -> None:
    """The parameters of one group are in two groups afterwards, or those of two in one."""

    def body(rank: Rank) -> list[float]:
        model: Any = fully_shard(nn.Linear(2, 2).to(rank.device), mesh=rank.mesh())

        def made(groups: int, rate: float) -> torch.optim.Optimizer:
            parts = [[model.weight, model.bias]] if groups == 1 else [[model.weight], [model.bias]]
            return torch.optim.AdamW([{"params": part} for part in parts], lr=rate)

        options = {"full": FULL, "flattened": FLAT}.get(how, {})
        state = get_optimizer_state_dict(model, made(saved, 0.5), options=StateDictOptions(**options))
        other = made(3 - saved, 0.25)
        try:
            set_optimizer_state_dict(model, other, state, options=StateDictOptions(**options))
        except ValueError:
            return [0.5]
        return sorted({group.get("lr", -1.0) for group in other.param_groups})

    assert_on_ranks([[0.5]] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-3001",
    "Loading an optimizer's state into other groups gives each the settings of its parameters, or raises an error.",
    source=f"{SOURCE}: set_optimizer_state_dict; torch.optim.Optimizer.load_state_dict: number of groups",
)
@pytest.mark.parametrize("how", ["by names", "full", "flattened"])
@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.5, 0.25)], ids=["equal", "different"])
@pytest.mark.world(2)
def test_joined_groups(world: World, rates: tuple[float, float], how: str) -> None:
    """The parameters of two groups, whose settings may differ, are in one group afterwards, in either order."""

    def body(rank: Rank) -> str:
        model: Any = fully_shard(nn.Linear(2, 2).to(rank.device), mesh=rank.mesh())
        options = {"full": FULL, "flattened": FLAT}.get(how, {})
        found = []
        for order in (model.weight, model.bias), (model.bias, model.weight):
            groups = [{"params": [p], "lr": rate} for p, rate in zip(order, rates, strict=True)]
            saved = torch.optim.SGD(groups, momentum=0.5)
            state = get_optimizer_state_dict(model, saved, options=StateDictOptions(**options))
            joined = torch.optim.SGD(model.parameters(), lr=8.0, momentum=0.5)
            try:
                set_optimizer_state_dict(model, joined, state, options=StateDictOptions(**options))
            except (RuntimeError, ValueError):
                assert len(set(rates)) == 2
                continue
            found.append([group["lr"] for group in joined.param_groups])
        return f"rates: {found}"

    right = [[rates[0]]] * 2 if len(set(rates)) == 1 else []
    assert_on_ranks([f"rates: {right}"] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-02",
    "get_optimizer_state_dict has one device's values with every option, and changes neither model nor optimizer.",
    source=f"{SOURCE}: get_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_tensor_rates(world: World, stack: str) -> None:
    """Learning rates are tensors, one for all groups or one for each, of three kinds of optimizers before a step."""
    distribute = STACKS[stack]
    world.run(lambda rank: optimizer_groups.check_tensor_rates(rank, distribute))


@requirement(
    "RFSDP-DICT-02",
    "get_optimizer_state_dict has one device's values with every option, and changes neither model nor optimizer.",
    source=f"{SOURCE}: get_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("kind", optimizer_groups.KINDS)
@pytest.mark.world(2)
def test_read_before_the_first_step(world: World, kind: str) -> None:
    """Take a step, having read the optimizer's state before it or not."""
    world.run(lambda rank: optimizer_groups.check_read_before(rank, sharded, kind))


@requirement(
    "RFSDP-DICT-7505",
    "An optimizer gets all saved states with the settings that need them, whatever its own settings were.",
    source=f"{SOURCE}: set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("how", ["by names", "full", "flattened"])
@pytest.mark.world(2)
def test_states_of_other_settings(world: World, how: str) -> None:
    """Load momentum or largest squares into optimizers that have none so far."""
    kinds: dict[str, tuple[Any, dict[str, Any], str]] = {
        "momentum": (torch.optim.SGD, {"momentum": 0.5}, "momentum_buffer"),
        "largest squares": (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        "momentum of means": (torch.optim.RMSprop, {"momentum": 0.5}, "momentum_buffer"),
    }

    def body(rank: Rank) -> list[str]:
        options = StateDictOptions(**{"full": FULL, "flattened": FLAT}.get(how, {}))
        wrong = []
        for name, (kind, settings, state) in kinds.items():
            if how == "full" and name == "momentum":
                continue  # a full state of an optimizer without states cannot be set
            model: Any = fully_shard(nn.Linear(2, 2, bias=False).to(rank.device), mesh=rank.mesh())
            trained = kind(model.parameters(), lr=0.5, **settings)
            model(torch.ones(1, 2, device=rank.device)).sum().backward()
            trained.step()
            model.zero_grad()
            saved = get_optimizer_state_dict(model, trained, options=options)
            fresh = kind(model.parameters(), lr=8.0)
            set_optimizer_state_dict(model, fresh, saved, options=options)
            assert {key: fresh.param_groups[0][key] for key in settings} == settings, name
            found: Any = fresh.state[model.weight].get(state)
            if not isinstance(found, DTensor):
                wrong.append(f"{name}: the state is {found}")
            elif not torch.equal(found.full_tensor(), trained.state[model.weight][state].full_tensor()):
                wrong.append(f"{name}: the state has other values")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "RFSDP-DICT-203",
    "An optimizer without states still has none after its state dict was loaded.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict, flatten_optimizer_state_dict",
)
@pytest.mark.parametrize("how", ["sharded", "flat"])
@pytest.mark.world(2)
def test_stateless(world: World, how: str) -> None:
    """SGD has no momentum; load its state dict before and after a step."""
    world.run(lambda rank: optimizer_groups.check_stateless(rank, sharded, how))


@requirement(
    "RFSDP-DICT-204",
    "States of parameters that are frozen when they are saved or loaded are there after loading.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict; requires_grad",
)
@pytest.mark.parametrize("when", ["saving", "loading"])
@pytest.mark.world(2)
def test_frozen(world: World, when: str) -> None:
    """One weight is frozen after a step; save and load sharded, full and flattened states."""
    world.run(lambda rank: optimizer_groups.check_frozen(rank, sharded, when))


@requirement(
    "RFSDP-DICT-205",
    "An optimizer state dict that was saved can be loaded, whichever parameters have had a step.",
    source=f"{SOURCE}: get_optimizer_state_dict, set_optimizer_state_dict",
)
@pytest.mark.parametrize("layers", [(), ("first",), ("first", "second", "third")], ids=["none", "some", "all"])
@pytest.mark.world(2)
def test_stepped(world: World, layers: tuple[str, ...]) -> None:
    """No layer, one or all have had a gradient; save and load sharded, full and flattened states."""
    world.run(lambda rank: optimizer_groups.check_stepped(rank, sharded, layers))


@requirement(
    "RFSDP-DICT-301",
    "States of an optimizer that are dicts in dicts are saved like one device's, or flattened at every depth, and "
    "load again.",
    source=f"{SOURCE}: StateDictOptions.flatten_optimizer_state_dict: 'arbitrary levels of nesting'",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_nested_states(world: World, stack: str) -> None:
    """Save tensors and numbers at three depths, sharded, full and flattened, and load them before or after a step."""
    distribute = STACKS[stack]
    world.run(lambda rank: optimizer_groups.check_nested(rank, distribute))


class Scaled(nn.Linear):
    """A linear layer with a factor, which is in its state beside its weight."""

    def __init__(self, factor: Any) -> None:
        super().__init__(2, 2, bias=False)
        self.factor, self.calls = factor, 0

    def get_extra_state(self) -> Any:
        """Return the factor in a dict, or alone if it is a tensor."""
        return self.factor if isinstance(self.factor, torch.Tensor) else {"deep": [{"factor": self.factor}]}

    def set_extra_state(self, state: Any) -> None:
        """Take the factor."""
        self.factor = state if isinstance(state, torch.Tensor) else state["deep"][0]["factor"]
        self.calls += 1


class WithExtra(nn.Module):
    """Layers with extra state at several depths."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.first, self.second = Scaled(start), nn.Sequential(Scaled(start + 1), nn.Linear(2, 2))
        self.third = Scaled(torch.tensor([start, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers one after the other."""
        result: torch.Tensor = self.third(self.second(self.first(x)))
        return result


@requirement(
    "RFSDP-DICT-302",
    "get_model_state_dict has the extra state of each module by its name, and set_model_state_dict gives it back "
    "once, whatever the options.",
    source=f"{SOURCE}: get_model_state_dict, set_model_state_dict; torch.nn.Module.get_extra_state",
)
@pytest.mark.world(2)
def test_extra_state(world: World) -> None:
    """Modules at two depths, one of them checkpointed or none, have texts, numbers in containers, or a tensor."""

    def body(rank: Rank) -> None:
        names = list(WithExtra(1.0).state_dict())
        assert len([name for name in names if name.endswith("_extra_state")]) == 3
        for (stack, distribute), (how, (saving, loading)), checks in itertools.product(
            STACKS.items(), states.SAVED.items(), (False, True)
        ):
            what = f"{stack}, {how}, {checks=}"

            def made(start: float, distribute: Any = distribute, checks: bool = checks) -> tuple[Any, list[Any]]:
                model: Any = WithExtra(start)
                layers = [model.first, model.second[0], model.third]
                found, _, _ = distribute(rank, model)
                if checks:
                    model.second[0] = checkpointed(model.second[0])
                return found, layers

            model, _ = made(1.0)
            saved = get_model_state_dict(model, options=StateDictOptions(**saving))
            if saved or rank.index == 0 or how != "full-from-rank-0":
                assert list(saved) == names, what
                found = states.whole(saved)
                right = {name: value for name, value in WithExtra(1.0).state_dict().items() if "_extra" in name}
                states.assert_equal(right, {name: found[name] for name in right}, what)
            other, layers = made(5.0)
            set_model_state_dict(other, states.copied(saved), options=StateDictOptions(**loading))
            assert [layer.calls for layer in layers] == [1] * 3, what
            assert [layer.factor for layer in layers[:2]] == [1.0, 2.0], what
            assert layers[2].factor.tolist() == [1.0, 3.0], what

    world.run(body)


@requirement(
    "RFSDP-DICT-303",
    "Distributed states of a model on some of the ranks need no others: those may do something else meanwhile.",
    source=f"{SOURCE}: get_state_dict, set_state_dict; torch.distributed.fsdp.FullyShardedDataParallel: process_group",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, FSDP1 gathers states of optimizers over all ranks")
@pytest.mark.world(3)
def test_some_ranks(world: World) -> None:
    """Two of three ranks save and load by each option under FSDP1, fully_shard and DDP, and the third waits."""

    def body(rank: Rank) -> None:
        mesh = DeviceMesh(rank.device.type, [0, 1])
        group = mesh.get_group() if rank.index < 2 else None
        if group is not None:
            ways: dict[str, Callable[[nn.Module], Any]] = {
                "fsdp": lambda model: wrapped(rank, model, device_mesh=mesh, use_orig_params=True),
                "flat": lambda model: wrapped(rank, model, process_group=group),
                "sharded": lambda model: fully_shard(model.to(rank.device), mesh=mesh),
                "ddp": lambda model: nn.parallel.DistributedDataParallel(model.to(rank.device), process_group=group),
            }
            for (name, made), (how, (saving, loading)) in itertools.product(ways.items(), states.SAVED.items()):
                if how == "full-from-rank-0" or (name == "flat" and how != "full"):
                    continue  # the first needs all ranks, and without a mesh, states are no DTensors
                what = f"{name}, {how}"
                model, other = made(nn.Linear(3, 2)), made(nn.Linear(3, 2))
                sgd, fresh = (
                    torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5, foreach=False) for m in (model, other)
                )
                model(torch.ones(1, 3, device=rank.device)).sum().backward()
                sgd.step()
                sgd.zero_grad()
                state, of_sgd = get_state_dict(model, sgd, options=StateDictOptions(**saving))
                right = states.copied([states.whole(state), states.whole(of_sgd)])
                given: dict[str, Any] = {"model_state_dict": state, "optim_state_dict": of_sgd}
                set_state_dict(other, fresh, **given, options=StateDictOptions(**loading))
                found = get_state_dict(other, fresh, options=StateDictOptions(**saving))
                states.assert_equal(right, [*map(states.whole, found)], what)
        last: list[Any] = [None] * 3
        dist.all_gather_object(last, rank.index)
        assert last == [0, 1, 2]

    world.run(body)


@requirement(
    "RFSDP-DICT-53",
    "With strict=False, set_optimizer_state_dict loads the states that there are, and otherwise names a missing one.",
    source=f"{SOURCE}: set_optimizer_state_dict, StateDictOptions.strict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_missing_optimizer_states(world: World, stack: str) -> None:
    """One parameter, two or none lack a state, and a state of an unknown one is there besides."""
    distribute = STACKS[stack]
    world.run(lambda rank: optimizer_groups.check_missing_states(rank, distribute))


@requirement(
    "RFSDP-DICT-53",
    "With strict=False, set_optimizer_state_dict loads the states that there are, and otherwise names a missing one.",
    source=f"{SOURCE}: set_optimizer_state_dict, StateDictOptions.strict",
)
@pytest.mark.parametrize("lacking", ["nothing", "a parameter"])
@pytest.mark.world(2)
def test_missing_flattened_states(world: World, lacking: str) -> None:
    """Load flattened states of several optimizers, strictly and not, and train on."""
    world.run(lambda rank: optimizer_groups.check_missing_flattened(rank, sharded, lacking != "nothing"))


@requirement(
    "RFSDP-DICT-900",
    "Distributed state dicts of a model keep nothing of it, its optimizer or its state once nothing references them.",
    source=f"{SOURCE}: get_state_dict, set_state_dict",
)
@pytest.mark.world(2)
def test_freed(world: World) -> None:
    """Get and set states of models that are managed in each way, whole or as they are."""

    def body(rank: Rank) -> list[str]:
        alive = []
        for (way, make), full in itertools.product(KEPT.items(), (False, True)):
            model = make(rank, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(rank.device))
            adam = torch.optim.AdamW(model.parameters(), foreach=False)
            options = StateDictOptions(full_state_dict=full)
            state, of_adam = get_state_dict(model, adam, options=options)
            seen = [model, adam, *state.values(), *of_adam["state"]["0.weight"].values()]
            if way != "fsdp1":  # which keeps its flat parameters without a state dict as well
                seen += model.parameters()
            set_state_dict(model, adam, model_state_dict=state, optim_state_dict=of_adam, options=options)
            alive += [(f"{way}, {full=}: {type(each).__name__}", weakref.ref(each)) for each in seen]
            del model, adam, state, of_adam, seen
        gc.collect()
        return sorted({what for what, each in alive if each() is not None})

    assert_on_ranks([[]] * world.size, world.run(body))
