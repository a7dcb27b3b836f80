"""States of a model and its optimizer that rank 0 has whole, and that are set on all ranks at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fixtures.states import whole
from harness import Rank, World, requirement

GOT = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""Rank 0 gets the whole states, and the other ranks empty ones."""
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def apart(model: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[Any, Any]) -> None:
    """Set the states by a call for each."""
    set_model_state_dict(model, states[0], options=SENT)
    set_optimizer_state_dict(model, optimizer, states[1], options=SENT)


def together(model: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[Any, Any]) -> None:
    """Set the states by one call."""
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=SENT)


@requirement(
    "RFSDP-DICT-6800",
    "set_state_dict broadcasts the states of rank 0 to ranks that have none, as get_state_dict leaves them.",
    source="torch.distributed.checkpoint.state_dict: StateDictOptions: broadcast_from_rank0, cpu_offload",
)
@pytest.mark.parametrize("load", [apart, together], ids=["apart", "together"])
@pytest.mark.world(2)
def test_from_the_first_rank(world: World, load: Any) -> None:
    """Train, get the states, change the parameters, and set the states."""

    def body(rank: Rank) -> None:
        model = nn.Linear(2, 2, bias=False, device=rank.device)
        nn.init.constant_(model.weight, 2.0)
        fully_shard(model, mesh=rank.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = get_state_dict(model, optimizer, options=GOT)
        assert [bool(state) for state in states] == [rank.index == 0] * 2
        with torch.no_grad():
            model.weight.fill_(0.0)
            optimizer.state[model.weight]["momentum_buffer"].fill_(0.0)
        load(model, optimizer, states)
        local: Any = model.weight.to_local()
        assert (local == 1.5).all(), f"rank {rank.index} keeps its parameters"
        assert whole(optimizer.state[model.weight]["momentum_buffer"]).tolist() == [[1.0, 1.0]] * 2

    world.run(body)
