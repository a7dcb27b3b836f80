"""Distributed state dicts of fully sharded, hybrid sharded and replicated models, with every option."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from fixtures import states
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch.distributed.checkpoint.state_dict"


def sharded(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Shard over two ranks, or over two of four with two replicas of each shard."""
    mesh = rank.mesh() if rank.size == 2 else rank.mesh(2, 2, names=("replicas", "shards"))
    model.to(rank.device)
    for name in "first", "second", "third":
        fully_shard(getattr(model, name), mesh=mesh)
    return fully_shard(model, mesh=mesh), rank.index % 2, 2


def replicated(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Replicate over two or four ranks."""
    return replicate_fsdp.apply(model, rank), rank.index % 2, 2


STACKS = {"sharded": sharded, "replicated": replicated}


@requirement(
    "RFSDP-DICT-01",
    "get_model_state_dict has one device's names and values with every option, whole or sharded as asked for.",
    source=f"{SOURCE}: get_model_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
def test_model_states(world: World, stack: str) -> None:
    """Combine full_state_dict, cpu_offload and ignore_frozen_params; rank 0 alone has a full state on the host."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_model_states(rank, distribute))


@requirement(
    "RFSDP-DICT-02",
    "get_optimizer_state_dict has one device's values with every option, and changes neither model nor optimizer.",
    source=f"{SOURCE}: get_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
@pytest.mark.each_choice
def test_optimizer_states(world: World, stack: str) -> None:
    """Get it before the first step and after steps; two groups have different learning rates."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_optimizer_states(rank, distribute))


@requirement(
    "RFSDP-DICT-03",
    "A model and an optimizer that a state dict was loaded into train on as the saved ones, whatever the options.",
    source=f"{SOURCE}: set_state_dict, set_model_state_dict, set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
@pytest.mark.each_choice
def test_loading(world: World, stack: str) -> None:
    """Load sharded, full and flattened states, and a full one from rank 0, into a new and into a trained model."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_loading(rank, distribute))


@requirement(
    "RFSDP-DICT-04",
    "With strict=False, set_model_state_dict loads the keys that there are, and otherwise names missing ones.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_strictness(world: World, stack: str) -> None:
    """A key is missing and another unexpected."""
    distribute = STACKS[stack]
    world.run(lambda rank: states.check_strictness(rank, distribute))
