"""State dicts of some submodules alone."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "model": lambda model, optimizer, **options: get_model_state_dict(model, **options),
    "model of both": lambda model, optimizer, **options: get_state_dict(model, optimizer, **options)[0],
    "optimizer": lambda model, optimizer, **options: get_optimizer_state_dict(model, optimizer, **options)["state"],
    "optimizer of both": lambda model, optimizer, **options: get_state_dict(model, optimizer, **options)[1]["state"],
}
"""What state is asked for, of which function."""


@requirement(
    "RFSDP-DICT-4606",
    "A state dict that is asked for some submodules has their parameters alone, in that of optimizers as well.",
    source="torch.distributed.checkpoint.state_dict: get_model_state_dict, get_optimizer_state_dict, get_state_dict: "
    "submodules: 'only return the model parameters that belong to the submodules'",
)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.world(2)
def test_submodules(world: World, function: str) -> None:
    """Ask for one submodule, or for two of three, of a model that is sharded, replicated or neither."""

    def body(rank: Rank) -> list[list[str]]:
        found = []
        for way in ("alone", "sharded", "replicated"):
            model: Any = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in "abc")).to(rank.device)
            if way != "alone":
                ways(rank)[way](model)
            adam = torch.optim.Adam(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            for names in ("a", "bc"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # submodules are deprecated
                    state = FUNCTIONS[function](model, adam, submodules=set(map(model.get_submodule, names)))
                found.append(sorted(state))
        return found

    right = [["a.bias", "a.weight"], ["b.bias", "b.weight", "c.bias", "c.weight"]] * 3
    assert_on_ranks([right] * world.size, world.run(body))
