"""Full state dicts of FSDP1 with each strategy of sharding: on the first rank alone, and after further training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)

from fixtures.wrapped import HYBRIDS, STRATEGIES, Weight, inputs, nested, wrapped
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.5, amsgrad=True),
}
WAYS = ("set_optimizer_state_dict", "optim_state_dict_to_load")
"""Functions that load an optimizer's state from rank 0."""


def loaded(model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any], way: str) -> None:
    """Load an optimizer's state that rank 0 alone has."""
    if way == "set_optimizer_state_dict":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        return
    config = FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))


@requirement(
    "TP-STATE-7003",
    "An optimizer's state that rank 0 alone has reaches every rank, also those of other replicas and shards.",
    source="torch.distributed.checkpoint.state_dict: StateDictOptions.broadcast_from_rank0; "
    "torch.distributed.fsdp: FullyShardedDataParallel.optim_state_dict_to_load, FullOptimStateDictConfig.rank0_only",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(2, 4)
def test_optimizer_states(world: World, way: str) -> None:
    """Use each strategy, the hybrid ones over two of the ranks, with flat or original parameters; then take a step."""

    def body(rank: Rank) -> None:
        strategies = STRATEGIES if rank.size == 2 else (STRATEGIES[0], *HYBRIDS)
        ways = itertools.product(strategies, (True, False))
        for (strategy, original), (name, make) in zip(ways, itertools.cycle(OPTIMIZERS.items()), strict=False):
            options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": original}
            options["device_mesh"] = rank.mesh(2, 2) if strategy in HYBRIDS else rank.mesh()
            right, found = (nested(rank, **options) for _ in range(2))
            saved, fresh = (make(model.parameters()) for model in (right, found))
            for _ in range(2):
                right(inputs(rank)).sum().backward()
                saved.step()
                saved.zero_grad()
            state = get_optimizer_state_dict(right, saved, options=StateDictOptions(full_state_dict=True))
            loaded(found, fresh, copy.deepcopy(state) if rank.index == 0 else {}, way)
            what = f"{strategy}, {original=}, {name}"
            for one, other in zip(right.parameters(), found.parameters(), strict=True):
                assert saved.state[one].keys() == fresh.state[other].keys(), what
                for key, value in saved.state[one].items():
                    assert_same(value.cpu(), fresh.state[other][key], f"{what}: {key}")
                other.data.copy_(one.data)
            for model, optimizer in ((right, saved), (found, fresh)):
                model(inputs(rank)).sum().backward()
                optimizer.step()
            for one, other in zip(right.parameters(), found.parameters(), strict=True):
                assert_same(one.detach().cpu(), other.detach(), what)

    world.run(body)
