"""States of optimizers that are set while parameters have gradients, as in the middle of a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from fixtures.states import assert_equal, whole
from harness import Rank, World, requirement

WAYS = {
    "by names": {"plain": StateDictOptions(), "offloaded": StateDictOptions(cpu_offload=True)},
    "flat or whole": {
        "flat": StateDictOptions(flatten_optimizer_state_dict=True),
        "whole": StateDictOptions(full_state_dict=True),
        "from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    },
}
"""Options with which a state is got and set."""


@requirement(
    "RFSDP-DICT-6700",
    "set_optimizer_state_dict sets the states of a new optimizer also while parameters have gradients.",
    source="torch.distributed.checkpoint.state_dict: set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.world(2)
def test_with_gradients(world: World, ways: str) -> None:
    """Set what an optimizer has after a step in another one of the same parameters, whose gradients are those of it."""

    def body(rank: Rank) -> None:
        model: Any = fully_shard(nn.Linear(2, 3).to(rank.device), mesh=rank.mesh())
        trained = torch.optim.Adam(model.parameters(), lr=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trained.step()
        right, wrong = whole(trained.state_dict()), []
        for name, options in WAYS[ways].items():
            state = get_optimizer_state_dict(model, trained, options=options)
            fresh = torch.optim.Adam(model.parameters(), lr=4.0)
            try:
                set_optimizer_state_dict(
                    model, fresh, state if rank.index == 0 or name != "from rank 0" else {}, options=options
                )
                assert_equal(right, whole(fresh.state_dict()), name)
            except AssertionError as e:
                wrong.append(f"{name}: {e}")
            left = [p.grad.to_local().unique().tolist() for p in model.parameters()]
            assert left == [[1.0], [1.0]], f"{name}: gradients are {left}"
        assert not wrong, "; ".join(wrong)

    world.run(body)
