"""FSDP1 with what surrounds it: kinds of parameters, modules, inputs, outputs, states, optimizers and scalers."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fixtures.wrapped import STRATEGIES, Two, Weight, gathered, inputs, own, whole, wrapped
from harness import Rank, World, assert_on_ranks, assert_same, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
WHOLE = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)


@requirement(
    "TP-STATE-715",
    "An optimizer's state that optim_state_dict_to_load converts gives each parameter its own state, "
    "whatever the order of the optimizer's groups.",
    source=f"{SOURCE}.optim_state_dict_to_load",
)
@pytest.mark.parametrize("order", ["same", "other"])
@pytest.mark.world(2)
def test_groups_in_another_order(world: World, order: str) -> None:
    """Load the momentum of two layers into an optimizer with their groups in the same order, or in another one."""

    def body(rank: Rank) -> None:
        for original in (False, True):
            layers = [wrapped(rank, nn.Linear(2, 2, bias=False), use_orig_params=original) for _ in range(2)]
            model = wrapped(rank, nn.Sequential(*layers), use_orig_params=original)
            groups = [{"params": list(layer.parameters())} for layer in layers]
            old = torch.optim.SGD([dict(group) for group in groups], lr=0.125, momentum=0.5)
            model(torch.tensor([[1.0, 2.0]], device=rank.device)).sum().backward()
            old.step()
            groups = groups if order == "same" else groups[::-1]
            new = torch.optim.SGD([dict(group) for group in groups], lr=0.125, momentum=0.5)
            with FullyShardedDataParallel.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), WHOLE
            ):
                saved = FullyShardedDataParallel.optim_state_dict(model, old)
                new.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, new, saved))
            right = [old.state[p]["momentum_buffer"].tolist() for p in model.parameters() if p.numel()]
            found = [new.state[p]["momentum_buffer"].tolist() for p in model.parameters() if p.numel()]
            assert found == right, f"{original=}: {found}, not {right}"

    world.run(body)


PARTS = {
    "whole": lambda: torch.arange(4.0).view(2, 2),
    "transposed": lambda: torch.arange(4.0).view(2, 2).t(),
    "rows": lambda: torch.arange(8.0).view(4, 2)[1:3],
    "columns": lambda: torch.arange(8.0).view(2, 4)[:, :2],
    "steps": lambda: torch.arange(8.0).view(2, 4)[:, ::2],
}
"""Kinds of tensors of two rows and columns."""


@requirement(
    "TP-WRAP-355",
    "A parameter that FSDP flattens keeps its elements, whatever its strides, as those of a slice of a tensor.",
    source=SOURCE,
)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.world(2)
def test_slices(world: World, part: str) -> None:
    """Wrap a parameter that is a tensor's rows, columns or every second column, beside another one."""
    right = PARTS[part]().tolist()

    def body(rank: Rank) -> list[Any]:
        found = []
        for original in (False, True):
            module = nn.Module()
            module.part = nn.Parameter(PARTS[part]())
            module.other = nn.Parameter(torch.full((8,), 32.0))
            model = wrapped(rank, module, use_orig_params=original)
            with FullyShardedDataParallel.summon_full_params(model):
                found += [model.module.part.tolist(), model.module.other.unique().tolist()]
        return found

    assert_on_ranks([[right, [32.0]] * 2] * 2, world.run(body))


@requirement(
    "TP-IGNORE-302",
    "FSDP ignores the modules or parameters that an iterator yields, which can be read only once.",
    source=f"{SOURCE}: ignored_modules (Optional[Iterable[torch.nn.Module]]), ignored_states",
)
@pytest.mark.parametrize("way", ["list", "states", "parameters", "iterator"])
@pytest.mark.world(2)
def test_ignored_iterators(world: World, way: str) -> None:
    """Ignore a layer by a list or an iterator of modules, or by an iterator of states."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for original in (False, True):
            model = nn.Sequential(Weight(4, 1.0), Weight(4, 1.0))
            ignored: dict[str, dict[str, Iterable[Any]]] = {
                "list": {"ignored_modules": [model[0]]},
                "states": {"ignored_states": iter([model[0]])},
                "parameters": {"ignored_states": iter([model[0].weight])},
                "iterator": {"ignored_modules": iter([model[0]])},
            }
            wrapped(rank, model, use_orig_params=original, **ignored[way])
            found.append([p.numel() for p in model[0].parameters()])
        return found

    assert_on_ranks([[[4], [4]]] * 2, world.run(body))


@requirement(
    "TP-DICT-246",
    "A state that is loaded with assign=True into a model under FSDP sets its parameters, as one that is copied does.",
    source="torch.nn.Module.load_state_dict: assign",
)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.world(2)
def test_assigned_state(world: World, assign: bool) -> None:
    """Load a full state."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for original in (False, True):
            model = wrapped(rank, Two(), use_orig_params=original)
            model.load_state_dict({name: torch.full((4,), 3.0, device=rank.device) for name in "ab"}, assign=assign)
            found.append({name: p.unique().tolist() for name, p in whole(model).items()})
        return found

    assert_on_ranks([[{"a": [3.0], "b": [3.0]}] * 2] * 2, world.run(body))


@requirement(
    "TP-SYNC-261",
    "With NO_SHARD, gradients of a second backward, through the same forward or through another one before it, "
    "are averaged as those of the first.",
    source=SOURCE,
)
@pytest.mark.parametrize("way", ["summed", "alternating", "retained", "two forwards"])
@pytest.mark.world(2)
def test_second_backward(world: World, way: str) -> None:
    """Run two backwards: of a sum, each after its forward, both through one forward, or both after two forwards."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for original in (False, True):
            strategy = ShardingStrategy.NO_SHARD
            model = wrapped(rank, Weight(2, 1.0), use_orig_params=original, sharding_strategy=strategy)
            x = inputs(rank)
            if way == "alternating":
                for _ in range(2):
                    model(x).sum().backward()
            elif way == "retained":
                loss = model(x).sum()
                loss.backward(retain_graph=True)
                loss.backward()
            else:
                losses = [model(x).sum(), model(x).sum()]
                for each in [losses[0] + losses[1]] if way == "summed" else losses:
                    each.backward()
            found += [p.grad.flatten().tolist() for p in model.parameters()]
        return found

    assert_on_ranks([[[3.0, 3.0]] * 2] * 2, world.run(body))


@dataclass
class Kept:
    """Numbers as they are."""

    values: torch.Tensor


@dataclass
class Doubled:
    """Numbers that are doubled once."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        """Double them."""
        self.values = 2 * self.values


@dataclass
class Derived:
    """Numbers of which others are made."""

    values: torch.Tensor
    others: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Make them."""
        self.others = 2 * self.values


def returned(kind: str, values: torch.Tensor) -> Any:
    """Put a tensor into an output."""
    if kind == "dict":
        return {"values": values}
    if kind == "class of dict":
        result: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(1))
        result["values"] = values
        return result
    return {"initialized": Doubled, "derived": Derived}.get(kind, Kept)(values)


class Returning(nn.Module):
    """Return a weight's product with ``x`` in a kind of output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(2)), kind

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output."""
        return returned(self.kind, self.weight * x)


@requirement(
    "TP-HOOK-262",
    "A forward's output has the same class and the same numbers under FSDP, also if it is a dataclass with "
    "__post_init__ or an instance of a class of dict.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", ["dict", "dataclass", "initialized", "derived", "class of dict"])
@pytest.mark.world(2)
def test_outputs(world: World, kind: str) -> None:
    """Return a tensor in a dict, a dataclass, or one with more to it, and compute gradients."""
    plain = returned(kind, torch.ones(2))
    factor = 2.0 if kind == "initialized" else 1.0

    def body(rank: Rank) -> tuple[str, list[float], list[float]]:
        model = wrapped(rank, Returning(kind), use_orig_params=True)
        output = model(torch.ones(2, device=rank.device))
        values = output["values"] if isinstance(output, dict) else output.values
        values.sum().backward()
        return type(output).__name__, values.tolist(), next(model.parameters()).grad.tolist()

    assert_on_ranks([(type(plain).__name__, [factor] * 2, [factor])] * 2, world.run(body))


class Counting(nn.Module):
    """Multiply a weight by the numbers of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, numbers: dict[str, int]) -> torch.Tensor:
        """Return the weight times a, plus ten times b."""
        return self.weight * (numbers["a"] + 10 * numbers["b"])


@requirement(
    "TP-HOOK-263",
    "A forward under FSDP is given the entries of a dict as they are, also those of a class of dict as a Counter.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", [dict, Counter], ids=["dict", "counter"])
@pytest.mark.world(2)
def test_arguments(world: World, kind: Any) -> None:
    """Give two numbers to a forward, by position or by name."""

    def body(rank: Rank) -> list[list[float]]:
        model = wrapped(rank, Counting())
        return [model(kind(a=2, b=3)).tolist(), model(numbers=kind(a=2, b=3)).tolist()]

    assert_on_ranks([[[32.0, 32.0]] * 2] * 2, world.run(body))


class Free(nn.Module):
    """A weight times one plus the sum of what it is given."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(2)), inner

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return the product, which a module inside gets in the same way."""
        result = self.weight * (1 + sum([*args, *options.values()]))
        return result if self.inner is None else result + self.inner(*args, **options)


@requirement(
    "TP-CALL-1601",
    "A forward under FSDP may have no arguments, only keywords, or only positional ones, at the root or inside.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_ways_to_call(world: World) -> None:
    """Call with every number of arguments of both sorts up to two, and go backward."""
    ways = itertools.product(range(3), range(3), (False, True))
    cases = list(zip(ways, itertools.cycle(STRATEGIES), strict=False))

    def body(rank: Rank) -> None:
        for (args, options, low), strategy in cases:
            what = f"{strategy}, {args} by position, {options} by name, {low=}"
            precision = MixedPrecision(torch.bfloat16) if low else None
            kwargs = {"sharding_strategy": strategy, "use_orig_params": True, "mixed_precision": precision}
            model = wrapped(rank, Free(wrapped(rank, Free(), **kwargs)), **kwargs)
            x = torch.ones(2, device=rank.device)
            found = model(*[x] * args, **dict.fromkeys("ab"[:options], x))
            assert found.tolist() == [2.0 * (1 + args + options)] * 2, what
            found.sum().backward()
            assert own(model) == {1.0 + args + options}, what

    world.run(body)


@requirement(
    "TP-DICT-247",
    "With rank0_only, only rank 0 has a full state dict and the others' are empty, also if modules are ignored.",
    source="torch.distributed.fsdp.FullStateDictConfig: rank0_only",
)
@pytest.mark.parametrize("which", ["all", "ignored"])
@pytest.mark.world(2)
def test_states_of_rank_0(world: World, which: str) -> None:
    """Read the state of a model all of which is wrapped, or one layer of which is ignored."""

    def body(rank: Rank) -> list[list[str]]:
        found = []
        for original in (False, True):
            layers = nn.Sequential(Weight(4, 1.0), Weight(4, 1.0))
            ignored = [layers[1]] if which == "ignored" else None
            model = wrapped(rank, layers, ignored_modules=ignored, use_orig_params=original)
            settings = FullStateDictConfig(rank0_only=True, offload_to_cpu=False)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
                found.append(list(model.state_dict()))
        return found

    assert_on_ranks([[["0.weight", "1.weight"]] * 2, [[], []]], world.run(body))


@requirement(
    "TP-WRAP-356",
    "A module that a policy wraps works under each of its names in the model.",
    source="torch/distributed/fsdp/wrap.py: ModuleWrapPolicy",
)
@pytest.mark.parametrize("names", ["one", "two"])
@pytest.mark.world(2)
def test_module_with_two_names(world: World, names: str) -> None:
    """Wrap by class a layer that the model uses twice under one name, or once under each of two."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Weight(4, 0.5)
            self.last = nn.Sequential(self.layer if names == "two" else Weight(4, 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.layer(x))
            return result

    def body(rank: Rank) -> list[Any]:
        found = []
        for original in (False, True):
            model = wrapped(rank, Model(), auto_wrap_policy=ModuleWrapPolicy({Weight}), use_orig_params=original)
            output = model(torch.ones(1, device=rank.device))
            output.sum().backward()
            found.append(output.tolist())
        return found

    assert_on_ranks([[[4.0], [4.0]]] * 2, world.run(body))


@requirement(
    "TP-DICT-248",
    "Settings of a sharded state dict can be used for several models, one on a mesh and one without.",
    source="torch.distributed.fsdp.ShardedStateDictConfig",
)
@pytest.mark.parametrize("first", ["plain", "mesh"])
@pytest.mark.world(2)
def test_settings_again(world: World, first: str) -> None:
    """Use them for the one and then for the other."""

    def body(rank: Rank) -> list[str]:
        settings, kinds = ShardedStateDictConfig(), []
        mesh = init_device_mesh(rank.device.type, (2,))
        for where in [{}, {"device_mesh": mesh}][:: 1 if first == "plain" else -1]:
            model = wrapped(rank, Weight(4, 1.0), **where)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, settings):
                kinds.append(type(model.state_dict()["weight"]).__name__)
        return sorted(kinds)

    assert_on_ranks([["DTensor", "ShardedTensor"]] * 2, world.run(body))


@requirement(
    "TP-CAST-655",
    "With a param_dtype, FSDP casts a forward's floating-point inputs, also those of a packed sequence.",
    source="torch.distributed.fsdp.MixedPrecision: cast_root_forward_inputs",
)
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.world(2)
def test_cast_sequences(world: World, form: str) -> None:
    """Run an RNN in bfloat16 on float32 sequences, padded or packed."""

    def body(rank: Rank) -> str:
        model = wrapped(rank, nn.RNN(2, 2), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        sequences = [torch.ones(length, 2, device=rank.device) for length in (3, 2)]
        if form == "packed":
            return str(model(nn.utils.rnn.pack_sequence(sequences))[0].data.dtype)
        return str(model(nn.utils.rnn.pad_sequence(sequences))[0].dtype)

    assert_on_ranks(["torch.bfloat16"] * 2, world.run(body))


@requirement(
    "TP-DICT-249",
    "A state dict of a parameter without rows can be saved and loaded.",
    source=f"{SOURCE}.state_dict",
)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.world(2)
def test_parameter_without_rows(world: World, kind: str) -> None:
    """Save and load a state with such a parameter, whole or sharded."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for original in (False, True):
            module = nn.Module()
            module.empty, module.other = nn.Parameter(torch.ones(0, 2)), nn.Parameter(torch.ones(4))
            model = wrapped(rank, module, use_orig_params=original)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
                state = model.state_dict()
                for p in model.parameters():
                    p.data.zero_()
                model.load_state_dict(state)
            found.append({name: p.tolist() for name, p in whole(model).items()})
        return found

    assert_on_ranks([[{"empty": [], "other": [1.0] * 4}] * 2] * 2, world.run(body))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
}
"""How the elements of a parameter may lie in memory."""


class Layered(nn.Module):
    """The sum of a weight, each element of which has a gradient of its own, for an input of 1 that of `SLOPES`."""

    SLOPES = torch.arange(24.0).view(2, 3, 2, 2)

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(LAYOUTS[layout](torch.ones(2, 3, 2, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the weighted sum."""
        return (self.weight * self.SLOPES.to(x.device)).sum() * x


@requirement(
    "TP-WRAP-1300",
    "A parameter trains under FSDP as it does alone, however its elements lie in memory, as channels last.",
    source=f"{SOURCE}; pytorch/pytorch#137382",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.world(2)
def test_layouts_trained(world: World, layout: str, strategy: ShardingStrategy, original: bool) -> None:
    """Take two steps, with gradients that differ by element."""

    def body(rank: Rank) -> None:
        model = wrapped(rank, Layered(layout), use_orig_params=original, sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs(rank)).sum().backward()
            optimizer.step()
        right = 1 - 0.25 * (1 + 1.5) * 1.5 * Layered.SLOPES  # gradients are 1.5 times the slopes
        assert_same(right, whole(model)["weight"].detach().cpu().contiguous(), "weight")

    world.run(body)


@requirement(
    "TP-STATE-1301",
    "An optimizer's state that is saved and loaded under FSDP is the same, however parameters lie in memory.",
    source=f"{SOURCE}: optim_state_dict, optim_state_dict_to_load; pytorch/pytorch#137382",
)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.world(2)
def test_layouts_of_optimizers(world: World, layout: str, kind: str) -> None:
    """Load momenta that differ by element into a new optimizer; sharded ones are DTensors."""

    def body(rank: Rank) -> None:
        for original in (False, True):
            model = wrapped(rank, Layered(layout), use_orig_params=original, device_mesh=rank.mesh(2))
            model(inputs(rank)).sum().backward()
            old, new = (torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5) for _ in range(2))
            old.step()
            own = (
                {}
                if kind == "SHARDED"
                else {"state_dict_config": FullStateDictConfig(), "optim_state_dict_config": WHOLE}
            )
            with FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"], **own):
                saved = FullyShardedDataParallel.optim_state_dict(model, old)
                new.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, new, saved))
            for one, other in zip(old.state.values(), new.state.values(), strict=True):
                assert_same(one["momentum_buffer"], other["momentum_buffer"], f"{original=}")
            momentum = saved["state"]["weight"]["momentum_buffer"]
            momentum = gathered(momentum) if isinstance(momentum, DTensor) else momentum
            assert_same(1.5 * Layered.SLOPES, momentum.cpu().contiguous(), f"saved, {original=}")

    world.run(body)


@requirement(
    "TP-DICT-1302",
    "A sharded state dict can be saved and loaded, however the parameters lie in memory.",
    source=f"{SOURCE}.state_dict; pytorch/pytorch#137382",
)
@pytest.mark.parametrize("meshed", [True, False], ids=["mesh", "group"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.world(2)
def test_layouts_of_shards(world: World, layout: str, meshed: bool) -> None:
    """Save a weight that differs by element as DTensors or as sharded tensors, and load it again."""

    def body(rank: Rank) -> None:
        for original in (False, True):
            module = Layered(layout)
            module.weight.data.copy_(Layered.SLOPES)
            on = {"device_mesh": rank.mesh(2)} if meshed else {}
            model = wrapped(rank, module, use_orig_params=original, **on)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                state = {name: value.clone() for name, value in model.state_dict().items()}
                for p in model.parameters():
                    p.data.zero_()
                model.load_state_dict(state)
            assert_same(Layered.SLOPES, whole(model)["weight"].detach().cpu().contiguous(), f"{original=}")

    world.run(body)


def _configured(model: Any, optimizer: Any, *, offload: bool) -> Any:
    settings = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=offload)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


GIVERS: dict[str, Callable[[Any, Any], Any]] = {
    "there": lambda model, optimizer: _configured(model, optimizer, offload=False),
    "offloaded": lambda model, optimizer: _configured(model, optimizer, offload=True),
    "full_optim_state_dict": lambda model, optimizer: FullyShardedDataParallel.full_optim_state_dict(
        model, optimizer, rank0_only=False
    ),
    "get_optimizer_state_dict": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    ),
    "get_optimizer_state_dict offloaded": lambda model, optimizer: get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    ),
}
"""What gives the full state of an optimizer under FSDP1: the last one on the first rank alone."""


@requirement(
    "TP-STATE-1307",
    "Each function that returns the full state of an optimizer under FSDP gives every tensor of it its own values.",
    source=f"{SOURCE}: optim_state_dict, full_optim_state_dict; torch.distributed.checkpoint.state_dict",
)
@pytest.mark.parametrize("giver", GIVERS)
@pytest.mark.world(2)
def test_full_states_of_optimizers(world: World, giver: str) -> None:
    """Get the averages of Adam and of RMSprop, of parameters that are flat, original, or on every rank."""

    def body(rank: Rank) -> None:
        for original, strategy in (False, STRATEGIES[0]), (True, STRATEGIES[2]), (True, STRATEGIES[0]):
            found, right = [], []
            for make in torch.optim.Adam, lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5):
                model = wrapped(rank, Two(), use_orig_params=original, sharding_strategy=strategy)
                optimizer = make(model.parameters())
                alone = Two()
                expected = make(alone.parameters())
                model(inputs(rank)).sum().backward()
                alone(torch.full((1,), 1.5)).sum().backward()
                optimizer.step()
                expected.step()
                state = GIVERS[giver](model, optimizer).get("state", {}).get("b", {})
                found.append({name: _rounded(value) for name, value in state.items()})
                right.append({name: _rounded(value) for name, value in expected.state[alone.b].items()})
            if not giver.endswith(" offloaded") or rank.index == 0:
                assert found == right, f"{original=}, {strategy.name}: {found}, not {right}"

    world.run(body)


def _rounded(value: Any) -> list[float]:
    return sorted({round(number, 4) for number in torch.as_tensor(value).flatten().tolist()})
