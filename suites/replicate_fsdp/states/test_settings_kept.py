"""Settings of the process that functions for state dicts and checkpoints leave as they were."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

from fixtures.managed import ways
from fixtures.states import WAYS_TO_SAVE
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint.state_dict: get_model_state_dict, get_state_dict, set_state_dict"
OPTIONS = {
    "as they are": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "refused": StateDictOptions(broadcast_from_rank0=True),
}
"""Options of a state dict, of which the last ones are refused, as only full states are broadcast."""


def settings() -> dict[str, Any]:
    """Return what a function may not change in a process."""
    return {
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "random numbers": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
    }


def calls(model: Any, adam: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Callable[[], Any]]:
    """Return the functions, each with its arguments; those that set get what the same options give."""
    of_model, of_adam = (
        ({}, {}) if options.broadcast_from_rank0 else state_dict.get_state_dict(model, adam, options=options)
    )
    return {
        "get model": lambda: state_dict.get_model_state_dict(model, options=options),
        "get optimizer": lambda: state_dict.get_optimizer_state_dict(model, adam, options=options),
        "get both": lambda: state_dict.get_state_dict(model, adam, options=options),
        "set model": lambda: state_dict.set_model_state_dict(model, of_model, options=options),
        "set optimizer": lambda: state_dict.set_optimizer_state_dict(model, adam, of_adam, options=options),
        "set both": lambda: state_dict.set_state_dict(
            model, adam, model_state_dict=of_model, optim_state_dict=of_adam, options=options
        ),
    }


@requirement(
    "RFSDP-DICT-8504",
    "Functions for distributed state dicts leave settings of the process as they were, such as Python's garbage "
    "collection, also if they fail.",
    source=f"{SOURCE}; gc.disable: 'Disable automatic garbage collection'",
)
@pytest.mark.parametrize("collects", [True, False], ids=["collects", "collects-not"])
@pytest.mark.world(2)
def test_states(world: World, collects: bool) -> None:
    """Get and set states of a model that is managed in each way, with garbage collection turned on or off."""

    def body(rank: Rank) -> None:
        enabled = gc.isenabled()
        try:
            managing = {"plain": lambda module: module, **ways(rank)}
            for (way, managed), (name, options) in zip(managing.items(), OPTIONS.items(), strict=True):
                model = managed(nn.Linear(2, 2).to(rank.device))
                adam = torch.optim.AdamW(model.parameters(), foreach=False)
                for what, call in calls(model, adam, options).items():
                    (gc.enable if collects else gc.disable)()
                    before = settings()
                    if name == "refused":
                        with pytest.raises(ValueError, match="full_state_dict"):
                            call()
                    else:
                        call()
                    after = settings()
                    changed = [key for key, value in before.items() if after[key] != value]
                    assert not changed, f"{way}, {name}, {what}: changes {changed}"
        finally:
            (gc.enable if enabled else gc.disable)()

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-8505",
    "Saving and loading a distributed checkpoint leaves settings of the process as they were, such as Python's garbage "
    "collection, also if it fails.",
    source="torch.distributed.checkpoint: save, async_save, load; gc.disable: 'Disable automatic garbage collection'",
)
@pytest.mark.parametrize("collects", [True, False], ids=["collects", "collects-not"])
@pytest.mark.world(2)
def test_checkpoints(world: World, tmp_path: Path, collects: bool) -> None:
    """Save and load a state, at once or later, and load what was not saved."""

    def body(rank: Rank) -> None:
        enabled = gc.isenabled()
        try:
            for name, save in WAYS_TO_SAVE.items():
                state: dict[str, Any] = {"a": torch.ones(2, device=rank.device), "number": 3}
                for what in "saved", "loaded", "refused":
                    (gc.enable if collects else gc.disable)()
                    before = settings()
                    if what == "saved":
                        save(state, checkpoint_id=tmp_path / name)
                    elif what == "loaded":
                        checkpoint.load(state, checkpoint_id=tmp_path / name)
                    else:
                        with pytest.raises(checkpoint.CheckpointException):
                            checkpoint.load({"other": torch.ones(2)}, checkpoint_id=tmp_path / name)
                    after = settings()
                    changed = [key for key, value in before.items() if after[key] != value]
                    assert not changed, f"{name}, {what}: changes {changed}"
        finally:
            (gc.enable if enabled else gc.disable)()

    world.run(body)
