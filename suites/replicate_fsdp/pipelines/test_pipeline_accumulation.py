"""Gradients that a pipeline's stages accumulate over steps: with an evaluation between, and of two schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fixtures.pipelines import total
from fixtures.states import whole
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with


def layer_of(rank: Rank, how: str) -> tuple[nn.Linear, Any]:
    """Return a rank's layer, whose weights are ones, alone or under fully_shard, and the group of the stages."""
    mesh = rank.mesh(2, 1, names=("stages", "shards"))
    layer = nn.Linear(2, 2, bias=False, device=rank.device)
    nn.init.ones_(layer.weight)
    if how == "fully_shard":
        fully_shard(layer, mesh=mesh["shards"])
    return layer, mesh.get_group("stages")


@requirement(
    "RFSDP-PIPE-6204",
    "An evaluation with a pipeline schedule leaves the gradients that its stages accumulate.",
    source="torch.distributed.pipelining: ScheduleGPipe.eval, step; torch.Tensor.grad",
)
@pytest.mark.skipif(
    runs_with("<2.12"), reason="unsupported: before 2.12, a schedule's first call decides what later ones can do"
)
@pytest.mark.parametrize("how", ["alone", "fully_shard"])
@pytest.mark.world(2)
def test_evaluated_between(world: World, how: str) -> None:
    """Take a step, evaluate, and take another step with the same batch."""

    def body(rank: Rank) -> None:
        layer, group = layer_of(rank, how)
        stage = PipelineStage(layer, rank.index, 2, rank.device, group=group)
        schedule: Any = ScheduleGPipe(stage, 2, loss_fn=total, scale_grads=False)
        data = torch.ones(4, 2, device=rank.device)
        for call in ("step", "eval", "step"):
            with torch.set_grad_enabled(call == "step"):
                getattr(schedule, call)(*((data,) if rank.index == 0 else ()), target=data if rank.index else None)
        found = whole(layer.weight.grad)
        assert found.tolist() == [[16.0, 16.0], [16.0, 16.0]], f"after two steps: {found.tolist()}"

    world.run(body)


@requirement(
    "RFSDP-PIPE-6904",
    "Stages accumulate gradients over the steps of several schedules, as of batches of several lengths.",
    source="torch.distributed.pipelining: PipelineStage, ScheduleGPipe.step; torch.Tensor.grad",
)
@pytest.mark.parametrize("how", ["alone", "fully_shard"])
@pytest.mark.world(2)
def test_two_schedules(world: World, how: str) -> None:
    """Take a step of four rows, then one of six rows with a new schedule of the same modules."""

    def body(rank: Rank) -> None:
        layer, group = layer_of(rank, how)
        for rows in 4, 6:
            stage = PipelineStage(layer, rank.index, 2, rank.device, group=group)
            schedule = ScheduleGPipe(stage, 2, loss_fn=total, scale_grads=False)
            data = torch.ones(rows, 2, device=rank.device)
            schedule.step(*((data,) if rank.index == 0 else ()), target=data if rank.index else None)
        found = whole(layer.weight.grad)
        assert found.tolist() == [[20.0, 20.0], [20.0, 20.0]], f"after both: {found.tolist()}"

    world.run(body)
