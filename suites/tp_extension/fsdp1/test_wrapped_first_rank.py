"""Full state dicts of FSDP1 with each strategy of sharding: on the first rank alone, and after further training."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType

from fixtures.wrapped import STRATEGIES, Weight, inputs, nested, wrapped
from harness import Rank, World, assert_on_ranks, assert_same, requirement

SOURCE = "torch/distributed/fsdp: FullyShardedDataParallel.state_dict, optim_state_dict"


@requirement(
    "TP-DICT-5610",
    "With rank0_only, only rank 0 has a full state dict and the others' are empty, with any strategy of sharding.",
    source="torch.distributed.fsdp.FullStateDictConfig: rank0_only",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.world(2)
def test_state(world: World, strategy: ShardingStrategy) -> None:
    """Read the state of a model with flat or original parameters."""

    def body(rank: Rank) -> list[list[str]]:
        found = []
        for original in (False, True):
            model = wrapped(rank, Weight(4, 1.0), sharding_strategy=strategy, use_orig_params=original)
            settings = FullStateDictConfig(rank0_only=True, offload_to_cpu=False)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
                found.append(list(model.state_dict()))
        return found

    assert_on_ranks([[["weight"]] * 2, [[], []]], world.run(body))


@requirement(
    "TP-STATE-18",
    "A full state dict keeps its values, whatever the model does afterwards.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_state_stays(world: World) -> None:
    """Take it with each strategy and flat or original parameters, train the model, and read it then."""

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (False, True)):
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                state = model.state_dict()
            model(inputs(rank)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            for name, value in state.items():
                what = f"{name}, {strategy}, {original=}"
                assert_same(torch.ones(4 if "others" in name else 8), value.cpu(), what)
            assert len(state) == 2

    world.run(body)
