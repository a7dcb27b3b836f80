"""Full state dicts of FSDP1 that only the first rank has, with each strategy of sharding."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType

from fixtures.wrapped import STRATEGIES, Weight, wrapped
from harness import Rank, World, assert_on_ranks, requirement


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
