"""Optimizers of replicated parameters that get their first gradients in different steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement

WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"weight_decay": 0.25}),
    ("Adam", {"eps": 0.25}),
    ("AdamW", {"eps": 0.25, "amsgrad": True}),
    ("Adagrad", {"eps": 0.25}),
]
WITH: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.5, "dampening": 0.25}),
    ("SGD", {"momentum": 0.5, "nesterov": True}),
]
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "lists": ({"foreach": True}, [*WITHOUT, *WITH]),
    "fused": ({"fused": True}, WITHOUT),
    "fused with momentum": ({"fused": True}, WITH),
}
"""Forms of optimizers, and optimizers that have them, with options."""


class Used(nn.Module):
    """Three layers, of which a forward uses the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers[:used]]).sum()


@requirement(
    "REPL-OPTIM-3801",
    "An optimizer of any form steps a parameter that gets its first gradient later than others.",
    source="torch.optim: foreach, fused; torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@pytest.mark.parametrize("form", CASES)
@pytest.mark.world(2)
def test_later_gradients(world: World, form: str) -> None:
    """Use one layer more in each of three steps under DDP, and compare with an optimizer that is not of that form."""

    def body(rank: Rank) -> None:
        words, optimizers = CASES[form]
        for name, options in optimizers:
            alone = Used().to(rank.device)
            model = DistributedDataParallel(Used().to(rank.device), find_unused_parameters=True)
            make = getattr(torch.optim, name)
            right = make(alone.parameters(), lr=0.5, foreach=False, **options)
            found = make(model.parameters(), lr=0.5, **options, **words)
            for used in (1, 2, 3):
                for each, x, optimizer in ((alone, 1.5, right), (model, 1.0 + rank.index, found)):
                    optimizer.zero_grad()
                    each(torch.full((1, 2), x, device=rank.device), used).backward()
                    optimizer.step()
                for p, q in zip(alone.parameters(), model.parameters(), strict=True):
                    torch.testing.assert_close(p, q, msg=f"{name}, {options}, {used} used")

    world.run(body)
