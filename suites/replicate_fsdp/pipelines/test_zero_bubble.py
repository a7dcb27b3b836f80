"""Stages under zero-bubble schedules, which take the gradients of inputs before those of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.pipelines import LOOPED, SPLIT, Layer, Pipeline, batch, chunks, mean
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.pipelining: ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV"
USED = (LOOPED[0], *(SPLIT[:1] if runs_with("<2.12") else SPLIT))
"""Before 2.12, V-shaped schedules send to themselves."""
USES = ("beside each other", "one after the other", "before and after another", "added to another")


class Stage(nn.Module):
    """A stage with a layer that it uses in some way, and one of its own, both of whole numbers."""

    def __init__(self, layer: nn.Module, how: str, device: Any) -> None:
        super().__init__()
        self.layer, self.other, self.how = layer, Layer(1, 0.0).to(device), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        once: torch.Tensor = self.layer(x)
        results = {
            "beside each other": lambda: once + self.layer(self.other(x)),
            "one after the other": lambda: self.other(self.layer(once)),
            "before and after another": lambda: self.layer(self.other(once)),
            "added to another": lambda: x @ (self.layer.weight + self.other.weight),  # type: ignore[operator]
            "viewed": lambda: self.other(once).view(-1, 2),
            "copied": lambda: self.other(once).view(-1, 2).clone(),
        }
        result: torch.Tensor = results[self.how]()
        return result


def step(world: World, how: str) -> None:
    """Take a step with each schedule, and compare gradients with the whole model's."""

    def body(rank: Rank) -> None:
        for schedule in USED:
            stages: list[Stage] = []

            def wrap(module: nn.Module, stages: list[Stage] = stages) -> nn.Module:
                stages.append(Stage(module, how, rank.device))
                return stages[-1]

            own = Pipeline(schedule, rank.device, rank.index, rank.size, wrap=wrap, given=True)
            model = nn.Sequential(*(Stage(layer, how, rank.device) for layer in own.alone(rank.device)))
            x, y = batch(0, rank.device)
            mean(chunks(model, x, y)).backward()
            own.call("step", x, y, losses=[])
            for place, stage in zip(own.places, stages, strict=True):
                for (name, p), due in zip(stage.named_parameters(), model[place].parameters(), strict=True):
                    what = f"{schedule.__name__}, stage {place}: {name}"
                    assert p.grad is not None, what
                    assert due.grad is not None, what
                    assert p.grad.tolist() == due.grad.tolist(), what

    world.run(body)


def first(how: str) -> str:
    """Return a word for a test's id."""
    return how.split()[0]


@requirement(
    "RFSDP-PIPE-6200",
    "A pipeline schedule gives a weight the sum of the gradients of all its uses in a stage.",
    source=f"{SOURCE}; torch.Tensor.grad; https://github.com/pytorch/pytorch/issues/180952",
)
@pytest.mark.parametrize("how", USES, ids=first)
@pytest.mark.world(2)
def test_shared_weights(world: World, how: str) -> None:
    """A stage uses a weight twice, with or without another weight between the uses, or a sum of two weights."""
    step(world, how)


@requirement(
    "RFSDP-PIPE-6201",
    "A pipeline schedule trains stages whose output is a view as those whose output is not.",
    source=f"{SOURCE}; torch.Tensor.view; https://github.com/pytorch/pytorch/issues/142229",
)
@pytest.mark.parametrize("how", ["viewed", "copied"])
@pytest.mark.world(2)
def test_views(world: World, how: str) -> None:
    """Each stage's output is a view of its last layer's result, or a copy of one."""
    step(world, how)
