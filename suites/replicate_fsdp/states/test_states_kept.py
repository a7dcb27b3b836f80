"""Whether a state that was returned or given changes with the model, and the model with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint.state_dict.StateDictOptions: full_state_dict, cpu_offload, broadcast_from_rank0"
FULL: dict[str, dict[str, bool]] = {
    "full": {"full_state_dict": True},
    "offloaded": {"full_state_dict": True, "cpu_offload": True},
}


def net(device: torch.device) -> nn.Module:
    """Return layers with parameters of uneven rows and with buffers."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 4)).to(device)


def held(tensors: Any) -> list[torch.Tensor]:
    """Return copies of what this rank has of tensors."""
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def step(model: Any, optimizer: Any, device: torch.device) -> None:
    """Take a step."""
    model(torch.tensor([[1.0, 2.0], [4.0, 3.0]], device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Tell whether tensors have the same values."""
    return len(found) == len(right) and all(map(torch.equal, found, right))


@requirement(
    "RFSDP-KEPT-9454",
    "A full state of a sharded model has the values of the time of its call after later steps, and a change of it "
    "changes no parameter.",
    source=SOURCE,
)
@requirement(
    "RFSDP-KEPT-9455",
    "The momenta in a full optimizer state of a sharded model have the values of the time of its call, and a change of "
    "them changes none of the optimizer's.",
    source=SOURCE,
)
@pytest.mark.parametrize("options", FULL)
@pytest.mark.world(2, 4)
def test_full(world: World, options: str) -> None:
    """Take a step after the call, then write into the parameters' values and momenta."""

    def body(rank: Rank) -> None:
        given = StateDictOptions(**FULL[options])
        for way, manage in ways(rank).items():
            if way == "replicated" or (way == "hybrid" and rank.size == 2):
                continue  # a rank has the whole, which the state need not copy
            model = manage(net(rank.device))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            step(model, optimizer, rank.device)
            names = dict(model.named_parameters())
            state = get_model_state_dict(model, options=given)
            momenta: Any = get_optimizer_state_dict(model, optimizer, options=given).get("state", {})
            mine = [state[name] for name in names if name in state]
            mine += [each["momentum_buffer"] for each in momenta.values()]
            assert bool(mine) == (options == "full" or rank.index == 0)
            kept = held(mine)
            step(model, optimizer, rank.device)
            get_model_state_dict(model, options=given)
            get_optimizer_state_dict(model, optimizer, options=given)
            assert equal(held(mine), kept), f"{way}: changed in a step, or by a later state"
            theirs = [*names.values(), *(each["momentum_buffer"] for each in optimizer.state.values())]
            values = held(theirs)
            for tensor in mine:
                tensor.fill_(-99.0)
            assert equal(held(theirs), values), f"{way}: changed with the state"

    world.run(body)


GIVEN: dict[str, dict[str, bool]] = {
    "own": {},
    "full": {"full_state_dict": True},
    "of rank 0": {"full_state_dict": True, "broadcast_from_rank0": True},
}


@requirement(
    "RFSDP-KEPT-9456",
    "A change of a state after it was loaded into a model changes no parameter or buffer, nor does a step change it.",
    source=f"{SOURCE}; torch.nn.Module.load_state_dict: 'Copy parameters and buffers'",
)
@pytest.mark.parametrize("options", GIVEN)
@pytest.mark.world(2)
def test_given(world: World, options: str) -> None:
    """Load a state with set_model_state_dict, take a step, and write into the state."""

    def body(rank: Rank) -> None:
        for way, manage in {"DDP": DistributedDataParallel, **ways(rank)}.items():
            model = manage(net(rank.device))
            whole = StateDictOptions(full_state_dict="full_state_dict" in GIVEN[options])
            state = {
                name: torch.full_like(tensor, 3)
                for name, tensor in get_model_state_dict(model, options=whole).items()
                if options != "of rank 0" or rank.index == 0
            }
            tensors = list(state.values())  # the dict itself may change: loaded_state_changes.py
            set_model_state_dict(model, state, options=StateDictOptions(**GIVEN[options]))
            theirs = [*model.parameters(), *model.buffers()]
            assert all((value == 3).all() for value in held(theirs)), way
            step(model, torch.optim.SGD(model.parameters(), lr=0.5), rank.device)
            assert all((value == 3).all() for value in held(tensors)), f"{way}: changed in a step"
            values = held(theirs)
            for tensor in tensors:
                tensor.fill_(-99)
            assert equal(held(theirs), values), f"{way}: changed with the state"

    world.run(body)
