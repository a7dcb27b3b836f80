"""Averages of a replicated model's weights over steps, as swa_utils.AveragedModel keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from harness import Rank, World, requirement
from harness.stacks import replicate

pytestmark = pytest.mark.usefixtures("with_buckets")


def quarter(average: torch.Tensor, value: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Average by a function of the user."""
    return average * 0.75 + value * 0.25


def equal(average: float, value: float, count: int) -> float:
    """Average all values alike."""
    return average + (value - average) / (count + 1)


def moving(factor: float) -> Callable[[float, float, int], float]:
    """Return a moving average, in which a new value has a factor."""
    return lambda average, value, count: average * (1 - factor) + value * factor


AVERAGES: dict[str, tuple[dict[str, Any], Callable[[float, float, int], float]]] = {
    "equal": ({}, equal),
    "equal, one by one": ({"avg_fn": swa_utils.get_swa_avg_fn()}, equal),
    "equal, in lists": ({"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}, equal),
    "moving, one by one": ({"avg_fn": swa_utils.get_ema_avg_fn(0.5)}, moving(0.5)),
    "moving, in lists": ({"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)}, moving(0.5)),
    "by a function": ({"avg_fn": quarter}, moving(0.25)),
}
"""Options of AveragedModel, and how they combine an average with a value after a number of values."""
MODULES = {
    "a module": lambda module, wrapped: (module, module),
    "a module, from DDP": lambda module, wrapped: (module, wrapped),
    "DDP": lambda module, wrapped: (wrapped, wrapped),
    "DDP, from its module": lambda module, wrapped: (wrapped, module),
}
"""Of which module the averaged one is a copy, and from which it is updated."""


class Counted(nn.Module):
    """A weight, and a buffer that each forward in training increases."""

    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 1, bias=False))
        nn.init.ones_(self.inner[0].weight)  # type: ignore[arg-type]
        self.register_buffer("level", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.level += 4
        y: torch.Tensor = self.inner(x)
        return y


@requirement(
    "DDP-AVERAGED-4847",
    "An AveragedModel of a module or of its DDP wrapper has the average of the weights after each update from either.",
    source="torch.optim.swa_utils.AveragedModel: model, avg_fn, multi_avg_fn, update_parameters",
)
@requirement(
    "DDP-AVERAGED-4848",
    "An AveragedModel has the averages of a replicated model's buffers with use_buffers=True, otherwise the latest "
    "buffers.",
    source="torch.optim.swa_utils.AveragedModel: use_buffers",
)
@pytest.mark.world(2)
def test_averages(world: World) -> None:
    """Update after each of three steps, by every kind of average, and compute with the averaged model."""

    def body(rank: Rank) -> None:
        cases = itertools.product(AVERAGES.items(), [*MODULES, "composable DDP"])
        for number, ((kind, (options, combined)), of) in enumerate(cases):
            if number % 2:
                continue  # every kind and every module is in some of the others, with buffers and without
            buffers = number % 4 == 0
            what = f"{kind}, {of}, {buffers=}"
            module = Counted().to(rank.device)
            if of == "composable DDP":
                averaged = swa_utils.AveragedModel(module, use_buffers=buffers, **options)
                model = source = replicate.replicate(module)
            else:
                model = DistributedDataParallel(module)
                copied, source = MODULES[of](module, model)
                averaged = swa_utils.AveragedModel(copied, use_buffers=buffers, **options)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            right = level = 0.0
            for count in range(3):
                model.zero_grad()
                model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
                sgd.step()
                averaged.update_parameters(source)
                weight, latest = 1 - 0.75 * (count + 1), 4.0 * (count + 1)  # every gradient is 1.5
                right = combined(right, weight, count) if count else weight
                level = combined(level, latest, count) if count and buffers else latest
                found = [t.flatten().tolist() for t in (*averaged.module.parameters(), *averaged.module.buffers())]
                assert found == [pytest.approx([right] * 2), pytest.approx([level] * 2)], f"{what}, update {count}"
                assert int(averaged.n_averaged) == count + 1, what
            averaged.eval()
            with torch.no_grad():
                assert float(averaged(torch.ones(1, 2, device=rank.device))) == pytest.approx(2 * right), what

    world.run(body)
