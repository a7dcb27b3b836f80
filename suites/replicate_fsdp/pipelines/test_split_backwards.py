"""Replicas of pipelines whose schedules split backwards into those of inputs and those of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.pipelines import SPLIT, Pipeline, batch, chunks, mean
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SCHEDULES = SPLIT[:1] if runs_with("<2.12") else SPLIT
"""Before 2.12, V-shaped schedules send to themselves."""


@requirement(
    "RFSDP-PIPE-6600",
    "Gradients of stages in data parallelism are the average over replicas also where schedules split backwards.",
    source="torch.distributed.pipelining: ScheduleInterleavedZeroBubble; https://github.com/pytorch/pytorch/issues/144530",
)
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
@pytest.mark.world(4)
def test_replicas(world: World, how: str, request: pytest.FixtureRequest) -> None:
    """Two replicas of a pipeline of two ranks take a step on data of their own."""
    if how == "ddp":
        request.getfixturevalue("with_reducer")

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("replicas", "stages"))
        replicas, group = mesh["replicas"], mesh["stages"].get_group()
        replica, index = mesh.get_coordinate()
        for schedule in SCHEDULES:

            def wrap(module: nn.Module) -> nn.Module:
                if how == "fully_shard":
                    return fully_shard(module, mesh=replicas)
                return DistributedDataParallel(module, process_group=replicas.get_group())

            own = Pipeline(schedule, rank.device, index, 2, group=group, wrap=wrap, given=True)
            model = own.alone(rank.device)
            for data in range(2):
                (mean(chunks(model, *batch(data, rank.device))) / 2).backward()
            own.call("step", *batch(replica, rank.device))
            for place, layer in own.layers.items():
                gradient: Any = layer.weight.grad
                found: torch.Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                due: Any = model[place].weight.grad
                assert found.tolist() == due.tolist(), f"replica {replica} of stage {place}, {schedule.__name__}"

    world.run(body)
