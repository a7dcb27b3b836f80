"""Ignored modules of FSDP1: the optimizer's states of their parameters, saved and loaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from fixtures.wrapped import Weight, inputs, wrapped
from harness import Rank, World, requirement

KINDS: dict[StateDictType, tuple[Any, Any]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.5, amsgrad=True),
}


@requirement(
    "TP-STATE-5341",
    "A loaded optimizer state of FSDP1 has the states of the parameters of ignored modules, too.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: ignored_modules, optim_state_dict_to_load",
)
@pytest.mark.world(2)
def test_states_of_optimizers(world: World) -> None:
    """Ignore a module or its parameter; save and load full and sharded states of optimizers that have made a step."""

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel

        def made(optimizer: str, by: str, original: bool) -> tuple[Any, nn.Parameter, torch.optim.Optimizer]:
            layers = nn.Sequential(Weight(4, 3.0), Weight(3, 5.0))
            parameter = layers[1].weight
            ignored = {"ignored_modules": [layers[1]]} if by == "module" else {"ignored_states": [parameter]}
            model = wrapped(rank, layers, use_orig_params=original, **ignored)
            return model, parameter, OPTIMIZERS[optimizer](model.parameters())

        for case in itertools.product(OPTIMIZERS, ("module", "parameter"), (False, True)):
            for kind, settings in KINDS.items():
                what = f"{case}, {kind}"
                model, parameter, optimizer = made(*case)
                model(inputs(rank)).sum().backward()
                optimizer.step()
                fresh, other, loaded = made(*case)
                with fsdp.state_dict_type(model, kind, *settings), fsdp.state_dict_type(fresh, kind, *settings):
                    saved = fsdp.optim_state_dict(model, optimizer)
                    loaded.load_state_dict(fsdp.optim_state_dict_to_load(fresh, loaded, saved))
                right, found = optimizer.state[parameter], loaded.state[other]
                assert len(right) > 0, what
                assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in right.items()}, what

    world.run(body)
