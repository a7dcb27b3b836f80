"""State dicts of FSDP1 without tensor parallelism: names, buffers, ignored modules and settings."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from fixtures.wrapped import STRATEGIES, Two, inputs, nested, whole_tensors, wrapped
from harness import Rank, World, assert_same_all, requirement
from harness.stacks.dynamo import checkpointed

SOURCE = "torch/distributed/fsdp: FullyShardedDataParallel.state_dict, optim_state_dict"
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Part(nn.Module):
    """A weight and buffers, one of which is not saved."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0) + start)
        self.register_buffer("kept", torch.full((3,), start, dtype=torch.float64))
        self.register_buffer("left", torch.full((3,), start), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple of x."""
        return self.weight.sum() * x


class Parts(nn.Module):
    """Parts of which two are the same one, and a parameter with two names."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.one, self.two = Part(start + 10), Part(start + 20)
        self.same = self.two
        self.ignored = Part(start + 30)
        self.own = nn.Parameter(torch.arange(3.0) + start)
        self.again = self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple of x."""
        return self.own.sum() * self.one(x) + self.two(x) + self.ignored(x)


@requirement(
    "TP-STATE-141",
    "The state dict of a module with FSDP inside or around it has the module's own names, of shared or checkpointed "
    "parts too, and loads into the module or back.",
    source=f"{SOURCE}; test_fsdp_state_dict.py: test_fsdp_state_dict_with_activation_checkpoint, "
    "test_shared_module_and_shared_parameter, test_state_dict_with_ignored_modules",
)
@pytest.mark.world(2)
def test_names(world: World) -> None:
    """Checkpoint a part inside of FSDP or not, and ignore one; with a prefix and without, before and after a step."""

    def made(rank: Rank, start: float, original: bool, root: bool, checks: bool, low: bool) -> Any:
        model = Parts(start).to(rank.device)
        mixed = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16) if low else None
        options = {"use_orig_params": original, "mixed_precision": mixed, "device_mesh": rank.mesh(2)}
        inner = checkpointed(model.one) if checks else model.one
        model.one = wrapped(rank, inner, **options)  # type: ignore[assignment]
        if root:
            return wrapped(rank, model, ignored_modules=[model.ignored], **options)
        if original:
            model.two = model.same = wrapped(rank, model.two, **options)  # type: ignore[assignment]
        return model

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        names = list(Parts().state_dict())
        cases = itertools.product((FULL, SHARDED), *[(True, False)] * 3)
        for (kind, original, root, checks), low in zip(cases, itertools.cycle((True, False, False)), strict=False):
            what = f"{kind}, {original=}, {root=}, {checks=}, {low=}"
            model = made(rank, 0.0, original, root, checks, low)
            ignored = model.module.ignored if root else model.ignored
            for step in range(2):
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    state = model.state_dict()
                    prefixed = model.state_dict(prefix="some.")
                assert list(prefixed) == ["some." + name for name in state], what
                assert sorted(state) == sorted(names), what
                for name in ("weight", "kept"):
                    tensor = getattr(ignored, name)
                    assert state[f"ignored.{name}"].data_ptr() == tensor.data_ptr(), f"{what}: {name} is a copy"
                # the second name of a shared buffer has its low precision, a known defect
                found = {
                    name: value for name, value in whole_tensors(state).items() if not (low and name == "same.kept")
                }
                assert_same_all({name: Parts().state_dict()[name] for name in found}, found, what)
                if step == 0:
                    model(inputs(rank)).sum().backward()
            alone = Parts(5.0)
            alone.load_state_dict(whole_tensors(state))
            assert_same_all({**Parts().state_dict()}, {**alone.state_dict()}, f"{what}: loaded alone")
            other = made(rank, 7.0, original, root, checks, low)
            with FullyShardedDataParallel.state_dict_type(other, kind):
                other.load_state_dict(state)
                again = {name: value for name, value in whole_tensors(other.state_dict()).items() if name in found}
            assert_same_all({name: Parts().state_dict()[name] for name in again}, again, f"{what}: loaded")

    world.run(body)


@requirement(
    "TP-STATE-504",
    "With a buffer_dtype, a full or sharded state dict has buffers in their own dtype under each name of their module.",
    source="torch.distributed.fsdp.MixedPrecision: 'the buffers are saved in full precision'",
)
@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["two", "same"])
def test_names_of_buffers(world: World, name: str) -> None:
    """A module has two names, and its buffer is of double precision."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        for kind, original in itertools.product((FULL, SHARDED), (True, False)):
            mixed = MixedPrecision(buffer_dtype=torch.bfloat16)
            options = {"use_orig_params": original, "mixed_precision": mixed, "device_mesh": rank.mesh(2)}
            model = wrapped(rank, Parts(), **options)
            with FullyShardedDataParallel.state_dict_type(model, kind):
                state = model.state_dict()
            assert state[f"{name}.kept"].dtype == torch.float64, f"{kind}, {original=}"

    world.run(body)


@requirement(
    "TP-STATE-9305",
    "A state dict leaves the buffers of its modules the tensors that they were, in buffer_dtype.",
    source="torch.distributed.fsdp.MixedPrecision: buffer_dtype; torch.nn.Module.state_dict: keep_vars",
)
@pytest.mark.parametrize("keep", [False, True], ids=["detached", "kept"])
@pytest.mark.world(2)
def test_buffers_of_modules(world: World, keep: bool) -> None:
    """Get each state dict of modules with buffers, with and without keep_vars."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        for kind, original in itertools.product((FULL, SHARDED), (True, False)):
            mixed = MixedPrecision(buffer_dtype=torch.bfloat16)
            options = {"use_orig_params": original, "mixed_precision": mixed, "device_mesh": rank.mesh(2)}
            model = wrapped(rank, Parts(), **options)
            found = []
            for _ in range(2):
                model(torch.ones(1, device=rank.device))
                found.append({name: (id(b), b.dtype, b.tolist()) for name, b in model.module.named_buffers()})
                with FullyShardedDataParallel.state_dict_type(model, kind):
                    state = model.state_dict(keep_vars=keep)
            what = f"{kind}, {original=}"
            assert {dtype for _, dtype, _ in found[0].values()} == {torch.bfloat16}, what
            assert found[1] == found[0], f"{what}: {[(name, dtype) for name, (_, dtype, _) in found[1].items()]}"
            assert state["one.kept"].dtype == torch.float64, what

    world.run(body)


@requirement(
    "TP-STATE-142",
    "A state_dict_type with a config of another type raises an error, and changes no setting.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: state_dict_type, set_state_dict_type; "
    "test_fsdp_state_dict.py: test_wrong_state_dict_config",
)
@pytest.mark.world(1)
def test_configs_of_others(world: World) -> None:
    """Combine each type with the configs of each other one."""

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel
        model = wrapped(rank, Two())
        before = fsdp.get_state_dict_type(model)
        configs = {
            FULL: FullStateDictConfig(),
            SHARDED: ShardedStateDictConfig(),
            StateDictType.LOCAL_STATE_DICT: LocalStateDictConfig(),
        }
        optimizers = {FULL: FullOptimStateDictConfig(), SHARDED: ShardedOptimStateDictConfig()}
        for kind, (of, config) in itertools.product(configs, configs.items()):
            bad: list[tuple[Any, ...]] = [(kind, config)] if of != kind else []
            if of in optimizers and of != kind:
                bad.append((kind, None, optimizers[of]))
            for given in bad:
                with pytest.raises(RuntimeError, match="Expected"):
                    fsdp.set_state_dict_type(model, *given)
                with pytest.raises(RuntimeError, match="Expected"), fsdp.state_dict_type(model, *given):
                    pass
                assert fsdp.get_state_dict_type(model) == before, given

    world.run(body)


@requirement(
    "TP-STATE-3200",
    "load_state_dict of a module under FSDP with strict=False returns missing and unexpected keys by the plain "
    "module's names.",
    source="torch.nn.Module.load_state_dict: missing_keys, unexpected_keys; "
    "torch.distributed.fsdp.FullyShardedDataParallel",
)
@pytest.mark.world(2)
def test_keys_reported(world: World) -> None:
    """Leave out each parameter in turn, at three depths of FSDP modules, and add a key besides or none."""

    def body(rank: Rank) -> None:
        ways = itertools.product((FULL, SHARDED), (True, False))
        for (kind, original), strategy in zip(ways, itertools.cycle(STRATEGIES[:2]), strict=False):
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh(2)}
            inner = nn.Sequential(wrapped(rank, Two(), **options), Two())
            plain = nn.Sequential(nn.Sequential(Two(), Two()), Two())
            model = wrapped(rank, nn.Sequential(wrapped(rank, inner, **options), Two()), **options)
            FullyShardedDataParallel.set_state_dict_type(model, kind)
            for name, more in zip(
                plain.state_dict(), itertools.cycle(([], ["unknown"], ["0.1.unknown"])), strict=False
            ):
                state = model.state_dict()
                del state[name]
                state |= {key: torch.ones(4, device=rank.device) for key in more}
                result = model.load_state_dict(state, strict=False)
                what = f"{kind}, {original=}, {strategy}"
                assert (result.missing_keys, result.unexpected_keys) == ([name], more), what

    world.run(body)


LOCAL = StateDictType.LOCAL_STATE_DICT
SETTINGS: tuple[tuple[Any, ...], ...] = (
    (FULL, None, FullOptimStateDictConfig(offload_to_cpu=True)),
    (FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)),
    (FULL,),
    (SHARDED, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)),
    (SHARDED,),
    (LOCAL, LocalStateDictConfig(offload_to_cpu=True)),
    (LOCAL,),
)
"""What set_state_dict_type takes: a type, alone or with configs other than the default ones."""


def uses(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Take the states of a model and its optimizer, load those that every rank has, and yield after each call."""
    fsdp = FullyShardedDataParallel
    setting = fsdp.get_state_dict_type(model)
    everywhere = not getattr(setting.state_dict_config, "rank0_only", False)
    state = model.state_dict()
    yield "state_dict"
    if everywhere:
        model.load_state_dict(state)
        yield "load_state_dict"
    if setting.state_dict_type != LOCAL:
        state = fsdp.optim_state_dict(model, optimizer)
        yield "optim_state_dict"
        if everywhere:
            fsdp.optim_state_dict_to_load(model, optimizer, state)
            yield "optim_state_dict_to_load"


def settings_of(model: Any) -> list[Any]:
    """Return what each FSDP module has, with the types of configs, which compare equal across types."""
    settings = map(FullyShardedDataParallel.get_state_dict_type, FullyShardedDataParallel.fsdp_modules(model))
    return [(each, type(each.state_dict_config)) for each in settings]


@requirement(
    "TP-STATE-7902",
    "A state of an FSDP module or its optimizer that is taken or loaded leaves the state dict type and configs as set.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: set_state_dict_type, get_state_dict_type, "
    "optim_state_dict, optim_state_dict_to_load; torch.nn.Module: state_dict, load_state_dict; pytorch/pytorch#100855",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.world(2)
def test_settings_stay(world: World, strategy: ShardingStrategy) -> None:
    """Take and load states with each type and config; sharded original parameters have no local states."""

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel
        for original in True, False:
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            model(inputs(rank)).sum().backward()
            sgd.step()
            for setting in SETTINGS:
                if setting[0] == LOCAL and original and strategy != ShardingStrategy.NO_SHARD:
                    continue
                fsdp.set_state_dict_type(model, *setting)
                right = settings_of(model)
                assert {each.state_dict_type for each, _ in right} == {setting[0]}, f"{setting}"
                for used in uses(model, sgd):
                    found = settings_of(model)
                    assert found == right, f"{used}, {original=}, {setting}: {found}"

    world.run(body)
