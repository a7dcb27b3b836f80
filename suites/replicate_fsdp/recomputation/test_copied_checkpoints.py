"""Copies of checkpointed modules: they compute their own forwards again, before they are sharded as afterwards."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.dynamo import checkpointed, checkpointed_in_place, offloaded

MAKERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": checkpointed,
    "reentrant": lambda module: checkpointed(module, reentrant=True),
    "hooks": checkpointed_in_place,
    "offloaded": offloaded,
}


class Counted(nn.Module):
    """Multiply by a weight, twice, and count the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[4] to float[4]."""
        self.calls += 1
        return x * self.weight * self.weight


@requirement(
    "RFSDP-CKPT-9413",
    "A copy of a checkpointed module recomputes its own forward for its own gradients, and keeps no original alive.",
    source="torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py: checkpoint_wrapper, offload_wrapper; "
    "torch/distributed/_composable/checkpoint_activation.py: checkpoint; copy.deepcopy",
)
@pytest.mark.parametrize("how", MAKERS)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.world(2)
def test_copies(world: World, used: bool, how: str) -> None:
    """Copy a module or a copy, change the weights of each, use all in turn, and shard each in another way at last."""
    forwards = 1 if how == "offloaded" else 2

    def body(rank: Rank) -> None:
        x = torch.full((4,), 1.0 + rank.index, device=rank.device)

        def check(model: Any, weight: float, mean: bool = False) -> None:
            (module,) = [each for each in model.modules() if isinstance(each, Counted)]
            before = module.calls
            model.zero_grad()
            model(x.clone().requires_grad_()).sum().backward()
            (gradient,) = replicate_fsdp.gradients(model).values()
            assert gradient.tolist() == [2 * weight * (1.5 if mean else 1.0 + rank.index)] * 4, weight
            assert module.calls - before == forwards, weight

        first = nn.Sequential(MAKERS[how](Counted())).to(rank.device)
        if used:
            check(first, 3.0)
        models = [first, copy.deepcopy(first)]
        models.append(copy.deepcopy(models[1]))
        models.append(copy.deepcopy(first))
        with torch.no_grad():
            for number, model in enumerate(models):
                for parameter in model.parameters():
                    parameter.fill_(3.0 + number)
        for number, model in [*enumerate(models), (0, first)]:
            check(model, 3.0 + number)
        parts = [weakref.ref(each) for each in (first, first[0], next(first.parameters()))]
        del first, model, models[0], parameter
        gc.collect()
        assert [part() for part in parts] == [None] * 3
        for number, (model, manage) in enumerate(zip(models, ways(rank).values(), strict=False), 1):
            manage(model)
            for _ in range(2):
                check(model, 3.0 + number, mean=True)

    world.run(body)
