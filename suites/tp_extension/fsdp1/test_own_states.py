"""FSDP1's state dicts of optimizers that have a state of the user's own, which belongs to no parameter."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from fixtures.wrapped import STRATEGIES, Two, whole_tensors, wrapped
from harness import Rank, World, assert_on_ranks, assert_same, assert_same_all, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
OWN: dict[str, Any] = {
    "number": 3,
    "tensor": torch.arange(3.0),
    "number inside": {"count": 3},
    "tensor inside": {"values": torch.arange(3.0)},
}
"""States of the user's own."""


def plain(value: Any) -> Any:
    """Return a state with lists in place of tensors, and the class of what is neither, nor a number."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if isinstance(value, int) else type(value).__name__


def trained(rank: Rank, original: bool, first: dict[str, Any]) -> tuple[Any, torch.optim.SGD]:
    """Wrap a layer, and make a step of an optimizer that has a state already."""
    model = wrapped(rank, nn.Linear(3, 2), use_orig_params=original)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    optimizer.state.update(first)  # type: ignore[arg-type]  # keys of states are parameters otherwise
    model(torch.ones(1, 3, device=rank.device)).sum().backward()
    optimizer.step()
    return model, optimizer


@requirement(
    "TP-STATE-4603",
    "optim_state_dict copies states of the user's own, whether they were there before those of parameters or not.",
    source=f"{SOURCE}.optim_state_dict: 'FSDP will directly copy everything to the returned state_dict'",
)
@pytest.mark.parametrize("when", ["after", "before"])
@pytest.mark.world(2)
def test_own_states(world: World, when: str) -> None:
    """Set states before the first step, or after it."""

    def body(rank: Rank) -> list[Any]:
        found: list[Any] = []
        for original in (False, True):
            model, optimizer = trained(rank, original, OWN if when == "before" else {})
            if when == "after":
                optimizer.state.update(OWN)  # type: ignore[arg-type]  # keys of states are parameters otherwise
            try:
                states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            except KeyError as e:
                found.append(f"KeyError: {e}")
                continue
            found.append({name: plain(states[name]) for name in OWN if name in states})
        return found

    right = [{name: plain(value) for name, value in OWN.items()}] * 2
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "TP-STATE-4604",
    "With rank0_only, optim_state_dict_to_load gives every rank the states of the user's own that rank 0 has.",
    source=f"{SOURCE}.optim_state_dict_to_load; torch.distributed.fsdp.FullOptimStateDictConfig.rank0_only",
)
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.world(2)
def test_own_states_of_rank_0(world: World, kind: str) -> None:
    """Convert a state that rank 0 alone has, for flat parameters or for original ones."""

    def body(rank: Rank) -> list[Any]:
        found = []
        config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
        for original in (False, True):
            model, optimizer = trained(rank, original, {})
            optimizer.state["own"] = OWN[kind]  # type: ignore[index]  # keys of states are parameters otherwise
            with FullyShardedDataParallel.state_dict_type(
                model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config
            ):
                saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
            found.append(plain(loaded["state"]["own"]))
        return found

    assert_on_ranks([[plain(OWN[kind])] * 2] * 2, world.run(body))


@requirement(
    "TP-STATE-4300",
    "An optimizer's state that belongs to no parameter is saved and loaded as it is, beside those of all parameters.",
    source=f"{SOURCE}: optim_state_dict, optim_state_dict_to_load; torch/distributed/fsdp/_optim_utils.py: "
    "'FSDP will directly copy everything to the returned state_dict'",
)
@pytest.mark.world(2)
def test_beside_all_parameters(world: World) -> None:
    """Put a number and a tensor of one's own after a parameter's state; rank 0 alone may have what is loaded."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        fsdp = FullyShardedDataParallel
        count, values = {"count": 3, "words": "some"}, torch.arange(3.0, device=rank.device)
        ways = [(FULL, False), (FULL, True), (SHARDED, False)]
        for (kind, only), original, strategy in itertools.product(ways, (True, False), STRATEGIES[::2]):
            what = f"{kind}, {only=}, {original=}, {strategy}"
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh()}
            config = FullOptimStateDictConfig(rank0_only=only, offload_to_cpu=False) if kind == FULL else None
            # with rank0_only, other ranks do not get tensors of one's own, a known defect
            own: dict[Any, Any] = {"own": count} if only else {"own": count, "values": values}

            def made(options: dict[str, Any] = options, kind: Any = kind, config: Any = config) -> Any:
                model = wrapped(rank, Two(), **options)
                fsdp.set_state_dict_type(model, kind, None, config)
                return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

            (model, sgd), (other, fresh) = made(), made()
            model(torch.ones(1, device=rank.device)).sum().backward()
            sgd.step()
            sgd.state.update(copy.deepcopy(own))
            saved = fsdp.optim_state_dict(model, sgd)
            if only and rank.index:
                assert saved == {}, what
            else:
                assert set(saved["state"]) == {"a", "b", *own}, f"{what}: {sorted(saved['state'])}"
            fresh.load_state_dict(fsdp.optim_state_dict_to_load(other, fresh, saved))
            for where, found in ("saved", saved.get("state", own)), ("loaded", fresh.state):
                assert found["own"] == count, f"{what}, {where}"
                if "values" in own:
                    assert_same(values, found["values"], f"{what}, {where}")
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                assert_same_all(whole_tensors(sgd.state[p]), whole_tensors(fresh.state[q]), f"{what}: parameters")

    world.run(body)
