"""Stages of a pipeline that pass on tensors whose elements are in another order in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fixtures.pipelines import total
from harness import Rank, World, requirement


class Turning(nn.Module):
    """A layer of whole numbers that transposes its input or its output, or neither."""

    def __init__(self, turned: str) -> None:
        super().__init__()
        self.weight, self.turned = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 3.0]])), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.transpose(0, 1) if self.turned == "inputs" else x) @ self.weight
        return x.transpose(0, 1) if self.turned == "outputs" else x


@requirement(
    "RFSDP-PIPE-5634",
    "A pipeline trains as its stages do without one, whatever the strides of their outputs and of their gradients.",
    source="torch.distributed.pipelining.PipelineStage: submodule: 'The PyTorch module wrapped by this stage'",
)
@pytest.mark.parametrize("turned", ["nothing", "inputs", "outputs"])
@pytest.mark.world(2)
def test_strides(world: World, turned: str) -> None:
    """Both stages transpose their inputs or their outputs; each microbatch has two rows."""

    def body(rank: Rank) -> None:
        modules = [Turning(turned).to(rank.device) for _ in range(rank.size)]
        stage = PipelineStage(modules[rank.index], rank.index, rank.size, rank.device)
        schedule: Any = ScheduleGPipe(stage, 2, loss_fn=total, scale_grads=False)
        x = torch.arange(8.0, device=rank.device).view(4, 2)
        target = x.flip(0) + 1
        if rank.index == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        found = stage.submod.get_parameter("weight").grad
        assert found is not None
        right = [Turning(turned).to(rank.device) for _ in range(rank.size)]
        for a, b in zip(x.chunk(2), target.chunk(2), strict=True):
            total(nn.Sequential(*right)(a), b).backward()
        due = right[rank.index].weight.grad
        assert due is not None
        assert found.tolist() == due.tolist()

    world.run(body)
