"""Optimizer states of FSDP1 of which some parts are missing."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType

from fixtures.wrapped import Two, gathered, inputs, wrapped
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
# offloading loses states that are on the host already, a known defect
WHOLE = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
SAVERS: dict[str, Callable[[Any, Any], Any]] = {
    "full": lambda model, sgd: FullyShardedDataParallel.full_optim_state_dict(model, sgd, rank0_only=False),
    "sharded": FullyShardedDataParallel.sharded_optim_state_dict,
    "of the type": FullyShardedDataParallel.optim_state_dict,
}


def stepped(rank: Rank, model: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make a step of SGD with momentum on some parameters."""
    sgd = torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
    model(inputs(rank)).sum().backward()
    sgd.step()
    return sgd


@requirement(
    "TP-STATE-3703",
    "The state of an optimizer that lacks parameters on some ranks is refused with an error on every rank.",
    source=f"{SOURCE}: full_optim_state_dict, optim_state_dict; torch/distributed/fsdp/_optim_utils.py: "
    "'each rank to have at least the optimizer states needed by rank 0's optimizer'",
)
@pytest.mark.parametrize("lacking", [0, 1], ids=["rank 0", "rank 1"])
@pytest.mark.world(2)
def test_lacking_parameters(world: World, lacking: int) -> None:
    """The optimizer of one of two ranks lacks the parameters of the last module."""

    def body(rank: Rank) -> list[str]:
        warnings.simplefilter("ignore")
        accepted = []
        for (name, saver), original in itertools.product(SAVERS.items(), (False, True)):
            if lacking == 0 and not original:
                continue  # what rank 0 lacks, no flat parameter needs
            parts = [wrapped(rank, Two(), use_orig_params=original) for _ in range(2)]
            model = wrapped(rank, nn.Sequential(*parts), use_orig_params=original)
            given = list((model if rank.index != lacking else model.module[0]).parameters())
            sgd = stepped(rank, model, given)
            try:
                state = saver(model, sgd)["state"]
            except RuntimeError as e:
                if "state" not in str(e):
                    raise
            else:
                accepted.append(f"{name}, {original=}: {sorted(state)}")
        return accepted

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-STATE-3704",
    "An optimizer's state that lacks some parameters of a flat one loads the states of the others.",
    source=f"{SOURCE}.optim_state_dict_to_load; torch/distributed/fsdp/_optim_utils.py: "
    "'There may still be some unflattened parameters with state and some without'",
)
@pytest.mark.parametrize("lacking", ["a", "b"], ids=["the first", "the last"])
@pytest.mark.world(2)
def test_state_of_some(world: World, lacking: str) -> None:
    """One of two parameters that are flattened together has no state; both kinds of states."""

    def body(rank: Rank) -> list[str]:
        warnings.simplefilter("ignore")
        wrong = []
        fsdp = FullyShardedDataParallel
        for kind in FULL, SHARDED:
            model = wrapped(rank, Two(), device_mesh=rank.mesh())
            sgd = stepped(rank, model, list(model.parameters()))
            fsdp.set_state_dict_type(model, kind, None, WHOLE if kind == FULL else None)
            state = fsdp.optim_state_dict(model, sgd)
            kept = "b" if lacking == "a" else "a"
            expected = whole(copy.deepcopy(state)["state"][kept]["momentum_buffer"])
            del state["state"][lacking]
            fresh = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
            fresh.load_state_dict(fsdp.optim_state_dict_to_load(model, fresh, state))
            if not any(isinstance(key, torch.Tensor) for key in fresh.state):
                wrong.append(f"{kind}: lost is the state of {kept}")
                continue
            found = whole(fsdp.optim_state_dict(model, fresh)["state"][kept]["momentum_buffer"])
            if not torch.equal(found, expected):
                wrong.append(f"{kind}: {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def whole(tensor: Any) -> torch.Tensor:
    """Return a whole tensor on the host."""
    return (gathered(tensor) if hasattr(tensor, "to_local") else tensor).cpu()
