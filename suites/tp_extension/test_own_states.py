"""FSDP1's state dicts of optimizers that have a state of the user's own, which belongs to no parameter."""

from __future__ import annotations

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

from fixtures.wrapped import wrapped
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
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
