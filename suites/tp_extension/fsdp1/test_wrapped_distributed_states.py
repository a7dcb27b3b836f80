"""Distributed state dicts of FSDP1 without tensor parallelism: compiled, checkpointed, with DDP inside, and loaded."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures import states
from fixtures.wrapped import STRATEGIES, wrapped
from harness import Rank, World, requirement
from harness.stacks.dynamo import checkpointed

SOURCE = "torch.distributed.checkpoint.state_dict"
WHOLE = StateDictOptions(full_state_dict=True)


def made(rank: Rank, factor: float, how: str, checked: bool, **options: Any) -> Any:
    """Wrap a net in one FSDP module, in one for each layer too, in flat ones, or around a layer under DDP."""
    net: Any = states.Net(factor).to(rank.device)
    if checked:
        net.first = checkpointed(net.first)
    if how == "around DDP":
        net.second = DistributedDataParallel(net.second)
        options["ignored_modules"] = [net.second]
    if how in ("apart", "flat"):
        for name in ("first", "second", "third", "frozen"):
            setattr(net, name, wrapped(rank, getattr(net, name), use_orig_params=how == "apart", **options))
    return wrapped(rank, net, use_orig_params=how != "flat", **options)


@requirement(
    "TP-DICT-3700",
    "get_state_dict of FSDP has one device's names and values, from which another model trains on as the saved one.",
    source=f"{SOURCE}: get_state_dict, set_model_state_dict, set_optimizer_state_dict; "
    "torch.distributed.fsdp.FullyShardedDataParallel",
)
@pytest.mark.parametrize("how", ["together", "apart", "flat"])
@pytest.mark.world(2)
def test_states(world: World, how: str) -> None:
    """Combine strategies, with a mesh or without, full or not, flattened or not, compiled and checkpointed ones."""

    def body(rank: Rank) -> None:
        sharded, replicated = STRATEGIES[::2]
        ways = (  # strategy, with a mesh, full, flattened, compiled, checkpointed
            (sharded, True, False, False, True, False),
            (sharded, True, True, True, False, True),
            (sharded, False, False, True, False, False),
            (replicated, True, False, True, False, True),
            (replicated, False, True, False, True, False),
        )
        for strategy, on_mesh, full, flat, compiled, checked in ways:
            if how == "flat":
                compiled = False  # a compiled flat one can't be loaded, a known defect
            what = f"{strategy}, {on_mesh=}, {full=}, {flat=}, {compiled=}, {checked=}"
            options: dict[str, Any] = {"sharding_strategy": strategy}
            if on_mesh:
                options["device_mesh"] = rank.mesh()
            inner = made(rank, 1.0, how, checked, **options)
            model = torch.compile(inner, backend="eager") if compiled else inner
            sgd = states.optimizer(inner)
            for step in range(2):
                states.train(model, sgd, step, rank.index, 2)
            asked = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat)
            found, found_sgd = get_state_dict(model, sgd, options=asked)
            expected, expected_sgd = states.alone(2)
            assert set(found) == set(expected), what
            plain = all(type(v) in (torch.Tensor, DTensor) for v in (*found.values(), *tensors(found_sgd)))
            if plain:  # without a mesh, parts of a state are ShardedTensors
                states.assert_equal(expected, states.whole(found), what)
                right = states.flattened(expected_sgd) if flat else expected_sgd
                states.assert_equal(right, states.whole(found_sgd), what)
                found, found_sgd = states.copied(found), states.copied(found_sgd)
            other = made(rank, -2.0, how, False, **options)  # PyTorch 2.13 refuses to load into a checkpointed layer
            fresh = states.optimizer(other)
            set_model_state_dict(other, found, options=asked)
            set_optimizer_state_dict(other, fresh, found_sgd, options=asked)
            for one, of, name in ((other, fresh, "loaded"), (model, sgd, "saved")):
                states.assert_equal(expected, states.whole(get_model_state_dict(one, options=WHOLE)), f"{what}: {name}")
                states.train(one, of, 2, rank.index, 2)
                after = states.whole(get_model_state_dict(one, options=WHOLE))
                states.assert_equal(states.alone(3)[0], after, f"{what}: {name}, after a step")

    warnings.simplefilter("ignore")
    world.run(body)


def tensors(state: Any) -> list[torch.Tensor]:
    """Return all tensors in the dicts of a state."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []


@requirement(
    "TP-DICT-3701",
    "The states of a model under FSDP that has a layer under DDP have one device's names and values.",
    source=f"{SOURCE}: get_model_state_dict, get_optimizer_state_dict: 'canonical FQNs'",
)
@pytest.mark.parametrize("of", ["the model", "the optimizer"])
@pytest.mark.world(2)
def test_ddp_inside(world: World, of: str) -> None:
    """FSDP ignores the layer; combine strategies and full states or not."""

    def body(rank: Rank) -> None:
        for strategy, full in itertools.product(STRATEGIES[::2], (False, True)):
            what = f"{strategy}, {full=}"
            model = made(rank, 1.0, "around DDP", False, sharding_strategy=strategy, device_mesh=rank.mesh())
            sgd = states.optimizer(model)
            for step in range(2):
                states.train(model, sgd, step, rank.index, 2)
            options = StateDictOptions(full_state_dict=full)
            if of == "the model":
                found = get_model_state_dict(model, options=options)
                states.assert_equal(states.alone(2)[0], states.whole(found), what)
                other = made(rank, -2.0, "around DDP", False, sharding_strategy=strategy, device_mesh=rank.mesh())
                set_model_state_dict(other, states.copied(found), options=options)
                states.assert_equal(states.alone(2)[0], states.whole(get_model_state_dict(other)), f"{what}: loaded")
            else:
                found = get_optimizer_state_dict(model, sgd, options=options)
                names = sorted(found["state"])
                assert names == sorted(states.alone(2)[1]["state"]), f"{what}: named {names}"
                states.assert_equal(states.alone(2)[1], states.whole(found), what)

    world.run(body)
