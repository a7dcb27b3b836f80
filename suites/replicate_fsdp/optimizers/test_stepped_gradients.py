"""What a step of an optimizer leaves of the gradients of sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp

PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.25}),
    ("SGD", {"maximize": True, "weight_decay": 0.25}),
    ("Adam", {"weight_decay": 0.25, "amsgrad": True, "maximize": True}),
    ("AdamW", {"maximize": True}),
    ("Adagrad", {"weight_decay": 0.25, "maximize": True}),
    ("Adadelta", {"weight_decay": 0.25, "maximize": True}),
    ("Adamax", {"weight_decay": 0.25, "maximize": True}),
    ("NAdam", {"weight_decay": 0.25, "maximize": True}),
    ("RAdam", {"weight_decay": 0.25, "maximize": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True, "weight_decay": 0.25, "maximize": True}),
]
NESTEROV: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.5, "nesterov": True}),
    ("SGD", {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25}),
]
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "one by one": ({"foreach": False}, [*PLAIN, *NESTEROV]),
    "fused": ({"fused": True}, [each for each in PLAIN if each[0] in ("Adam", "AdamW")]),
    "lists": ({"foreach": True}, PLAIN),
    "lists with nesterov": ({"foreach": True}, NESTEROV),
}
"""Forms of optimizers, and optimizers that have them for sharded parameters, with options."""


@requirement(
    "RFSDP-OPTIM-3800",
    "A step of an optimizer leaves the gradients as they are, in each of its forms.",
    source="torch.optim: foreach, fused; pytorch/pytorch#92706",
)
@pytest.mark.parametrize("form", CASES)
@pytest.mark.world(2)
def test_gradients_stay(world: World, form: str) -> None:
    """Take two steps after one backward of a sharded layer, and compare gradients with those before each step."""

    def body(rank: Rank) -> None:
        words, optimizers = CASES[form]
        for name, options in optimizers:
            model: Any = ways(rank)["sharded"](nn.Linear(4, 2, device=rank.device))
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5, **options, **words)
            model(torch.full((1, 4), 1.0 + rank.index, device=rank.device)).sum().backward()
            for step in range(2):
                optimizer.step()
                found = {key: each.flatten().tolist() for key, each in replicate_fsdp.gradients(model).items()}
                assert found == {"weight": [1.5] * 8, "bias": [1.0] * 2}, f"{name}, {options}, step {step}"

    world.run(body)
