"""Optimizer states of FSDP1: of many modules, groups and dtypes, saved, loaded, and with some parts missing."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)

from fixtures.wrapped import HYBRIDS, STRATEGIES, Outer, Two, Weight, assert_as_alone, inputs, whole_tensors, wrapped
from harness import Rank, World, assert_on_ranks, assert_same_all, requirement

FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
SOURCE = "torch/distributed/fsdp: FullyShardedDataParallel.state_dict, optim_state_dict"
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
# offloading loses states that are on the host already, a known defect
WHOLE = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
SAVERS: dict[str, Callable[[Any, Any], Any]] = {
    "full": lambda model, sgd: FullyShardedDataParallel.full_optim_state_dict(model, sgd, rank0_only=False),
    "sharded": FullyShardedDataParallel.sharded_optim_state_dict,
    "of the type": FullyShardedDataParallel.optim_state_dict,
}


def stepped(rank: Rank, model: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make a step of SGD with momentum on some parameters."""
    sgd = torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
    model(inputs(rank)).sum().backward()
    sgd.step()
    return sgd


@requirement(
    "TP-STATE-3703",
    "The state of an optimizer that lacks parameters on some ranks is refused with an error on every rank.",
    source=f"{FSDP}: full_optim_state_dict, optim_state_dict; torch/distributed/fsdp/_optim_utils.py: "
    "'each rank to have at least the optimizer states needed by rank 0's optimizer'",
)
@pytest.mark.parametrize("lacking", [0, 1], ids=["rank 0", "rank 1"])
@pytest.mark.world(2)
def test_lacking_parameters(world: World, lacking: int) -> None:
    """The optimizer of one of two ranks lacks the parameters of the last module."""

    def body(rank: Rank) -> list[str]:
        warnings.simplefilter("ignore")
        accepted = []
        for (name, saver), original in itertools.product(SAVERS.items(), (False, True)):
            if lacking == 0 and not original:
                continue  # what rank 0 lacks, no flat parameter needs
            parts = [wrapped(rank, Two(), use_orig_params=original) for _ in range(2)]
            model = wrapped(rank, nn.Sequential(*parts), use_orig_params=original)
            given = list((model if rank.index != lacking else model.module[0]).parameters())
            sgd = stepped(rank, model, given)
            try:
                state = saver(model, sgd)["state"]
            except RuntimeError as e:
                if "state" not in str(e):
                    raise
            else:
                accepted.append(f"{name}, {original=}: {sorted(state)}")
        return accepted

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-STATE-3704",
    "An optimizer's state that lacks some parameters of a flat one loads the states of the others.",
    source=f"{FSDP}.optim_state_dict_to_load; torch/distributed/fsdp/_optim_utils.py: "
    "'There may still be some unflattened parameters with state and some without'",
)
@pytest.mark.parametrize("lacking", ["a", "b"], ids=["the first", "the last"])
@pytest.mark.world(2)
def test_state_of_some(world: World, lacking: str) -> None:
    """One of two parameters that are flattened together has no state; both kinds of states."""

    def body(rank: Rank) -> list[str]:
        warnings.simplefilter("ignore")
        wrong = []
        fsdp = FullyShardedDataParallel
        for kind in FULL, SHARDED:
            model = wrapped(rank, Two(), device_mesh=rank.mesh())
            sgd = stepped(rank, model, list(model.parameters()))
            fsdp.set_state_dict_type(model, kind, None, WHOLE if kind == FULL else None)
            state = fsdp.optim_state_dict(model, sgd)
            kept = "b" if lacking == "a" else "a"
            expected = whole_tensors(copy.deepcopy(state)["state"][kept])
            del state["state"][lacking]
            fresh = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            fresh.load_state_dict(fsdp.optim_state_dict_to_load(model, fresh, state))
            if not any(isinstance(key, torch.Tensor) for key in fresh.state):
                wrong.append(f"{kind}: lost is the state of {kept}")
                continue
            found = whole_tensors(fsdp.optim_state_dict(model, fresh)["state"][kept])
            if not torch.equal(found["momentum_buffer"], expected["momentum_buffer"]):
                wrong.append(f"{kind}: {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


class Model(nn.Module):
    """Parameters in several modules, one of which no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Weight(3, 9.0)
        self.outer = Outer(5, 5.0, Weight(3, 3.0), Two())
        self.last = Two()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple of x."""
        return self.outer(x) + self.last(x)


def groups(model: Any, turned: bool) -> list[dict[str, Any]]:
    """Return two groups of parameters with settings, in the modules' order or turned around."""
    first, second = list(model.outer.parameters()), [*model.last.parameters(), *model.idle.parameters()]
    if turned:
        first, second = first[::-1], second[::-1]
    return [{"params": first, "lr": 0.5}, {"params": second, "lr": 0.25, "weight_decay": 0.5}]


def train(model: Any, optimizer: torch.optim.Optimizer, count: int, device: torch.device) -> None:
    for step in range(count):
        optimizer.zero_grad()
        model(torch.full((1,), 1.0 + step, device=device)).sum().backward()
        optimizer.step()


@requirement(
    "TP-STATE-08",
    "Loading a saved optimizer state into a new optimizer restores every tensor, step count and group setting.",
    source=f"{SOURCE}, optim_state_dict_to_load",
)
@requirement(
    "TP-STATE-143",
    "A saved optimizer state has one device's values and settings by the module's names, whatever FSDP modules or "
    "order of parameters each rank has.",
    source=f"{SOURCE}, rekey_optim_state_dict; test_fsdp_optim_state.py: test_optim_state_dict_nested, "
    "test_save_load_without_0th_param_state",
)
@pytest.mark.world(2)
def test_optimizers(world: World) -> None:
    """Load it into modules that are wrapped otherwise, on one rank each, and into a module without FSDP."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        fsdp = FullyShardedDataParallel
        alone_group = [dist.new_group([i]) for i in range(2)][rank.index]

        def made(how: str, turned: bool, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
            model: Any = Model().to(rank.device)
            if how != "alone":
                model.idle = wrapped(rank, model.idle, **options)
                if how == "inner":
                    model.outer.others[1] = wrapped(rank, model.outer.others[1], **options)
                model.outer = wrapped(rank, model.outer, **options)
                if how == "inner":
                    model.last = wrapped(rank, model.last, **options)
            return model, torch.optim.Adam(groups(model, turned))

        right, right_adam = made("alone", False)
        train(right, right_adam, 3, rank.device)
        names = {p: name for name, p in right.named_parameters()}
        expected = {names[p]: {**state} for p, state in right_adam.state.items()}
        settings = [
            ({key: value for key, value in group.items() if key != "params"}, {names[p] for p in group["params"]})
            for group in right_adam.param_groups
        ]

        def check(found: dict[str, Any], what: str) -> None:
            assert sorted(found["state"]) == sorted(expected), f"{what}: {sorted(found['state'])}"
            for name, state in expected.items():
                assert_same_all(
                    whole_tensors(state),
                    whole_tensors({key: found["state"][name][key] for key in state}),
                    f"{what}: {name}",
                )
            assert [
                ({key: value for key, value in group.items() if key != "params"}, set(group["params"]))
                for group in found["param_groups"]
            ] == settings, what

        cases = list(itertools.product((FULL, SHARDED), (True, False), STRATEGIES))
        hows = itertools.cycle(itertools.product(("inner", "outer"), (False, True)))
        for (kind, original, strategy), (how, turned) in zip(cases, hows, strict=False):
            what = f"{kind}, {original=}, {strategy}, {how}, {turned=}"
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh(2)}
            model, adam = made(how, turned and rank.index == 1 and not original, **options)
            assert fsdp.optim_state_dict(model, adam)["state"] == {}, what
            train(model, adam, 3, rank.device)
            optimizer_config = WHOLE if kind == FULL else None
            fsdp.set_state_dict_type(model, kind, None, optimizer_config)
            saved = fsdp.optim_state_dict(model, adam)
            check(saved, what)
            given = fsdp.optim_state_dict(model, adam, copy.deepcopy(adam.state_dict()))
            check(given, f"{what}: given")
            fresh = torch.optim.Adam(groups(model, turned and rank.index == 1 and not original))
            fsdp.optim_state_dict_to_load(model, fresh, saved, load_directly=True)
            check(fsdp.optim_state_dict(model, fresh), f"{what}: loaded directly")
            if kind == FULL:
                other, fresh = made(
                    "outer" if how == "inner" else "inner", False, **options | {"use_orig_params": True}
                )
                fsdp.set_state_dict_type(other, kind, None, optimizer_config)
                fresh.load_state_dict(fsdp.optim_state_dict_to_load(other, fresh, copy.deepcopy(saved)))
                check(fsdp.optim_state_dict(other, fresh), f"{what}: wrapped otherwise")
                if rank.index == 0:  # a group without rank 0 is refused, a known defect
                    one, fresh = made(how, False, use_orig_params=False, process_group=alone_group)
                    fsdp.set_state_dict_type(one, kind, None, optimizer_config)
                    group = {"group": alone_group}
                    fresh.load_state_dict(fsdp.optim_state_dict_to_load(one, fresh, copy.deepcopy(saved), **group))
                    check(fsdp.optim_state_dict(one, fresh, **group), f"{what}: on one rank")
                plain, fresh = made("alone", False)
                by_number = fsdp.rekey_optim_state_dict(
                    copy.deepcopy(saved), OptimStateKeyType.PARAM_ID, plain, optim=fresh
                )
                fresh.load_state_dict(by_number)
                of = {p: name for name, p in plain.named_parameters()}
                assert sorted(of[p] for p in fresh.state) == sorted(expected), what
                for p, state in fresh.state.items():
                    same_order = {key: state[key] for key in expected[of[p]]}
                    assert_same_all(whole_tensors(expected[of[p]]), whole_tensors(same_order), f"{what}: without FSDP")

    world.run(body)


@requirement(
    "TP-STATE-4402",
    "shard_full_optim_state_dict, scatter_full_optim_state_dict and flatten_sharded_optim_state_dict give each rank "
    "its part of a saved state.",
    source=f"{FSDP}: shard_full_optim_state_dict, scatter_full_optim_state_dict, flatten_sharded_optim_state_dict",
)
@pytest.mark.parametrize("named", ["by the optimizer", "by parameters", "by groups", "not at all"])
@pytest.mark.world(2)
def test_parts_of_saved_states(world: World, named: str) -> None:
    """Say whose it is by an optimizer, an iterator of its parameters or groups; rank 0 alone has what it scatters."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        fsdp = FullyShardedDataParallel
        by_groups = named in ("by groups", "by the optimizer")
        for original in (True, False):

            def made(original: bool = original) -> tuple[Any, Any]:
                model = wrapped(rank, Outer(5, 5.0, Two()), use_orig_params=original)
                fsdp.set_state_dict_type(model, FULL, None, WHOLE)
                all_of = list(model.parameters())
                given = [{"params": all_of[1:], "lr": 0.25}, {"params": all_of[:1], "lr": 0.5}] if by_groups else all_of
                return model, torch.optim.Adam(given, lr=0.5)

            model, adam = made()
            train(model, adam, 2, rank.device)

            def naming(model: Any = model, adam: Any = adam) -> dict[str, Any]:
                return {
                    "by the optimizer": {"optim": adam},
                    "by parameters": {"optim_input": iter(model.parameters())},
                    "by groups": {"optim_input": [dict(group) for group in adam.param_groups]},
                    "not at all": {},
                }[named]

            whole = fsdp.optim_state_dict(model, adam)
            found = {
                "sharded": fsdp.shard_full_optim_state_dict(copy.deepcopy(whole), model, **naming()),
                "scattered": fsdp.scatter_full_optim_state_dict(
                    copy.deepcopy(whole) if rank.index == 0 else None, model, **naming()
                ),
                "flattened": fsdp.flatten_sharded_optim_state_dict(
                    fsdp.sharded_optim_state_dict(model, adam), model, adam
                ),
            }
            for way, state in found.items():
                _, fresh = other = made()
                fresh.load_state_dict(state)
                loaded = fsdp.optim_state_dict(*other)
                for name, of in whole["state"].items():
                    assert_same_all(
                        whole_tensors(of), whole_tensors(loaded["state"][name]), f"{original=}, {way}: {name}"
                    )
                assert [group["lr"] for group in fresh.param_groups] == [group["lr"] for group in adam.param_groups]

    world.run(body)


def check_optimizer(rank: Rank, made: Any, module: Any, kinds: Any, what: str) -> None:
    """Save the state of an optimizer after two steps, compare it with one device's, load it, and train on."""
    fsdp = FullyShardedDataParallel

    def adam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.5, foreach=False)

    for kind in kinds:

        def on_one(device: torch.device) -> dict[str, dict[str, Any]]:
            alone = module().to(device)
            of_alone = adam(alone)
            train(alone, of_alone, 2, device)
            names = {p: name for name, p in alone.named_parameters()}
            return {names[p]: dict(state) for p, state in of_alone.state.items()}

        expected, there = on_one(torch.device("cpu")), on_one(rank.device)
        model = made()
        of_model = adam(model)
        train(model, of_model, 2, rank.device)
        fsdp.set_state_dict_type(model, kind, None, WHOLE if kind == FULL else None)
        saved = fsdp.optim_state_dict(model, of_model)
        other = made()
        fsdp.set_state_dict_type(other, kind, None, WHOLE if kind == FULL else None)
        fresh = adam(other)
        fresh.load_state_dict(fsdp.optim_state_dict_to_load(other, fresh, copy.deepcopy(saved)))
        for when, state in (("saved", saved), ("loaded", fsdp.optim_state_dict(other, fresh))):
            found = {name: whole_tensors(of) for name, of in state["state"].items()}
            assert sorted(found) == sorted(expected), f"{what}, {kind}, {when}: {sorted(found)}"
            for name, of in expected.items():
                same_order = {key: found[name][key] for key in of}
                where = f"{what}, {kind}, {when}: {name}"
                assert_as_alone(whole_tensors(of), whole_tensors(there[name]), same_order, where, rounded=True)
        train(other, fresh, 1, rank.device)


@requirement(
    "TP-STATE-301",
    "A saved optimizer state has those of the parameters that are not frozen, and loads into another model with the "
    "same ones.",
    source=f"{SOURCE}, optim_state_dict_to_load",
)
@pytest.mark.world(2)
def test_frozen_from_the_start(world: World) -> None:
    """Freeze each choice of two parameters, or a module with both, of one FSDP module with four."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        ways = itertools.product(STRATEGIES, (("0.a",), ("0.a", "0.b"), ("0.b", "1.b")))
        for (strategy, frozen), kind in zip(ways, itertools.cycle((FULL, SHARDED)), strict=False):

            def module(frozen: tuple[str, ...] = frozen) -> nn.Module:
                model = nn.Sequential(Two(2, 2), Two())
                for name in frozen:
                    model.get_parameter(name).requires_grad_(False)
                return model

            def made(module: Any = module, strategy: Any = strategy) -> Any:
                options = {"use_orig_params": True, "device_mesh": rank.mesh(2)}
                return wrapped(rank, module(), sharding_strategy=strategy, **options)

            check_optimizer(rank, made, module, (kind,), f"{strategy}, {frozen}")

    world.run(body)


@requirement(
    "TP-STATE-302",
    "With a hybrid strategy, a saved optimizer state has one device's values, and is gathered over the ranks of one "
    "replica alone.",
    source=f"{SOURCE}; torch.distributed.fsdp.ShardingStrategy: HYBRID_SHARD",
)
@pytest.mark.needs(features=["hybrid"])
@pytest.mark.world(4)
def test_hybrid_optimizers(world: World) -> None:
    """Shard over two of four ranks, by a mesh or by groups, with original parameters and without."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        pairs = [[dist.new_group(ranks) for ranks in way] for way in (((0, 1), (2, 3)), ((0, 2), (1, 3)))]
        groups = (pairs[0][rank.index // 2], pairs[1][rank.index % 2])
        for strategy, original, by_mesh in itertools.product(HYBRIDS, (True, False), (True, False)):
            where = {"device_mesh": rank.mesh(2, 2)} if by_mesh else {"process_group": groups}
            options = {"sharding_strategy": strategy, "use_orig_params": original, **where}

            def made(options: dict[str, Any] = options) -> Any:
                return wrapped(rank, nn.Sequential(Two(2, 2), Two()), **options)

            def module() -> nn.Module:
                return nn.Sequential(Two(2, 2), Two())

            kinds = (FULL, SHARDED) if by_mesh else (FULL,)  # without a mesh, sharded states are ShardedTensors
            check_optimizer(rank, made, module, kinds, f"{strategy}, {original=}, {by_mesh=}")

    world.run(body)


@requirement(
    "TP-STATE-505",
    "optim_state_dict with the group of FSDP's ranks has the states of all parameters, whether the world's first rank "
    "is in the group or not.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict: group",
)
@pytest.mark.world(3)
@pytest.mark.parametrize("case", ["original", "flat"])
def test_group_of_states(world: World, case: str) -> None:
    """Rank 0 is in one group and the others in another; only the latter's flat parameters are in the second case."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        group = [dist.new_group([0]), dist.new_group([1, 2])][min(rank.index, 1)]
        for kind, original in itertools.product((FULL, SHARDED), (True, False)):
            if (original or rank.index == 0) != (case == "original"):
                continue
            model = wrapped(rank, Two(), use_orig_params=original, process_group=group)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            model(torch.ones(1, device=rank.device)).sum().backward()
            sgd.step()
            FullyShardedDataParallel.set_state_dict_type(model, kind, None, WHOLE if kind == FULL else None)
            saved = FullyShardedDataParallel.optim_state_dict(model, sgd, group=group)
            assert sorted(saved["state"]) == ["a", "b"], f"{kind}, {original=}"

    world.run(body)


@requirement(
    "TP-STATE-3005",
    "With rank0_only, optim_state_dict_to_load takes the states from the first rank of its group.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict_to_load: group; "
    "torch.distributed.fsdp.FullOptimStateDictConfig.rank0_only",
)
@pytest.mark.world(3)
@pytest.mark.parametrize("first", [0, 1], ids=["of the world's first rank", "of others"])
def test_group_of_loaded_states(world: World, first: int) -> None:
    """Two ranks are the group, and their first one alone has the states."""

    def body(rank: Rank) -> list[str]:
        warnings.simplefilter("ignore")
        group = dist.new_group([first, first + 1])
        if rank.index not in (first, first + 1):
            return []
        wrong = []
        for original in (True, False):
            model = wrapped(rank, Two(), use_orig_params=original, process_group=group)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            state = {
                "state": {name: {"momentum_buffer": torch.ones(p.shape)} for name, p in Two().named_parameters()},
                "param_groups": [sgd.state_dict()["param_groups"][0] | {"params": ["a", "b"]}],
            }
            only = FullOptimStateDictConfig(rank0_only=True)
            FullyShardedDataParallel.set_state_dict_type(model, FULL, None, only)
            given = state if rank.index == first else {}
            try:
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, sgd, given, group=group)
                sgd.load_state_dict(loaded)
                found = {float(x) for of in sgd.state.values() for x in of["momentum_buffer"].flatten()}
                wrong += [] if found <= {1.0} else [f"{original=}: {found}"]
            except ValueError as e:
                wrong.append(f"{original=}: {e}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-STATE-3004",
    "The state dict of an optimizer that has states of several dtypes for a parameter keeps the dtype of each.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict",
)
@pytest.mark.world(2)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_dtypes_of_states(world: World, original: bool) -> None:
    """Each parameter has a copy in a higher precision, or in a lower one, beside its momentum."""

    def body(rank: Rank) -> list[str]:
        warnings.simplefilter("ignore")
        wrong = []
        for kind, dtype in itertools.product((FULL, SHARDED), (torch.bfloat16, torch.float16)):
            model = wrapped(rank, Two(), use_orig_params=original)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            for parameter in model.parameters():
                if parameter.numel():
                    copy = parameter.detach().to(dtype)
                    sgd.state[parameter] = {"copy": copy, "momentum": torch.zeros_like(parameter)}
            FullyShardedDataParallel.set_state_dict_type(model, kind, None, WHOLE if kind == FULL else None)
            try:
                state = FullyShardedDataParallel.optim_state_dict(model, sgd)["state"]["a"]
                found = {name: value.dtype for name, value in state.items()}
            except AssertionError as e:
                wrong.append(f"{kind}: {e}")
                continue
            if found != {"copy": dtype, "momentum": torch.float32}:
                wrong.append(f"{kind}: {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-STATE-144",
    "A saved optimizer state keeps numbers or None beside tensors, lacks groups if it was given none, and has states "
    "of parameters that are frozen since.",
    source=f"{SOURCE}; test_fsdp_optim_state.py: test_state_dict_with_none_tensor_state, test_no_grad, "
    "test_optim_state_without_param_groups",
)
@pytest.mark.world(2)
def test_other_values(world: World) -> None:
    """Add values to the states of SGD with momentum and without, and freeze a parameter between two steps."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        fsdp = FullyShardedDataParallel
        ways = itertools.product((FULL, SHARDED), (True, False), STRATEGIES, (0.0, 0.5))
        for kind, original, strategy, momentum in ways:
            what = f"{kind}, {original=}, {strategy}, {momentum=}"
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh(2)}
            model = wrapped(rank, Two(), **options)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
            train(model, sgd, 2, rank.device)
            if original:
                model.module.a.requires_grad_(False)
                sgd.zero_grad()
                model(inputs(rank)).sum().backward()
                sgd.step()
            state = copy.deepcopy(sgd.state_dict())
            for i in range(len(state["param_groups"][0]["params"])):
                state["state"].setdefault(i, {})
                state["state"][i] |= {"number": 2.75, "nothing": None, "words": "some"}
            kept = copy.deepcopy(state)
            optimizer_config = WHOLE if kind == FULL else None
            fsdp.set_state_dict_type(model, kind, None, optimizer_config)
            saved = fsdp.optim_state_dict(model, sgd, state)
            assert sorted(saved["state"]) == ["a", "b"], what
            for name, values in saved["state"].items():
                assert [values[key] for key in ("number", "nothing", "words")] == [2.75, None, "some"], what
                if momentum:
                    assert values["momentum_buffer"].shape == (4,), f"{what}: {name}"
            loaded = fsdp.optim_state_dict_to_load(model, sgd, saved)
            for i, values in loaded["state"].items():
                right = kept["state"][i]
                assert {k: v for k, v in values.items() if not torch.is_tensor(v)} == {
                    k: v for k, v in right.items() if not torch.is_tensor(v)
                }, what
                assert_same_all(
                    {k: v for k, v in right.items() if torch.is_tensor(v)},
                    {k: v for k, v in values.items() if torch.is_tensor(v)},
                    what,
                )
            without = {"state": copy.deepcopy(kept["state"])}
            again = fsdp.optim_state_dict(model, sgd, without)
            assert "param_groups" not in again, what
            again = fsdp.optim_state_dict_to_load(model, sgd, again)
            assert sorted(again["state"]) == sorted(loaded["state"]), what

    world.run(body)
