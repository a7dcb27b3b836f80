"""Batches that pipelines split into microbatches: of any number of rows, and in shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.distributed.tensor import Shard, distribute_tensor

from fixtures.pipelines import SCHEDULES, V_SHAPED, Pipeline, chunks, mean
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.pipelining"


@requirement(
    "RFSDP-PIPE-6202",
    "A pipeline's output for a batch has the rows of the whole model's output for it.",
    source=f"{SOURCE}: ScheduleGPipe: 'Will chunk the input into microbatches automatically'; pytorch#126600",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: 2.11 refuses such batches on the first rank alone")
@pytest.mark.parametrize("rows", [6, 7], ids=["divided", "undivided"])
@pytest.mark.world(2)
def test_rows(world: World, rows: int) -> None:
    """Evaluate three microbatches."""

    def body(rank: Rank) -> None:
        stage = PipelineStage(nn.Identity(), rank.index, rank.size, rank.device)
        data = torch.arange(1.0, rows + 1, device=rank.device).view(rows, 1)
        with torch.no_grad():
            output = ScheduleGPipe(stage, 3).eval(*((data,) if rank.index == 0 else ()))
        if rank.index == rank.size - 1:
            assert len(output) == rows, f"{len(output)} rows for a batch of {rows}"
            assert output.tolist() == data.tolist()

    world.run(body)


CALLS: list[tuple[str, tuple[int, ...]]] = [
    ("step", (8, 2)),
    ("eval", (16, 2)),
    ("step", (8, 2)),
    ("eval", (4, 2)),
    ("step", (12, 2)),
    ("eval", (8, 3, 2)),
    ("step", (4, 3, 2)),
    ("eval", (8, 2)),
]
"""Calls of a schedule one after the other, and sizes of their batches."""


@requirement(
    "RFSDP-PIPE-8503",
    "Steps of a pipeline schedule and evaluations between them take batches of other sizes than the calls before.",
    source=f"{SOURCE}: ScheduleGPipe.step, eval; PipelineStage: input_args",
)
@pytest.mark.skipif(
    runs_with("<2.12"), reason="unsupported: before 2.12, a schedule's first call decides what later ones can do"
)
@pytest.mark.parametrize(
    "schedule",
    [each for each in SCHEDULES if each not in V_SHAPED],
    ids=lambda schedule: schedule.__name__.removeprefix("Schedule"),
)
@pytest.mark.world(2)
def test_other_sizes(world: World, schedule: Any) -> None:
    """Compare outputs, losses and gradients of batches of more or fewer rows, and of one dimension more."""

    def body(rank: Rank) -> None:
        own = Pipeline(schedule, rank.device, rank.index, rank.size)
        model = own.alone(rank.device)
        for number, (how, size) in enumerate(CALLS):
            what = f"call {number}: {how} of {size}"
            x = (torch.arange(math.prod(size), dtype=torch.float64, device=rank.device).view(size) + number) % 5 - 2
            y = x.flip(0) + 1
            losses: list[torch.Tensor] = []
            with torch.set_grad_enabled(how == "step"):
                output = own.call(how, x, y, losses=losses)
            right = chunks(model, x, y)
            if own.is_last:
                assert output.tolist() == model(x).tolist(), what
                assert [v.item() for v in losses] == [v.item() for v in right], what
            if how == "step":
                mean(right).backward()
                for place, layer in own.layers.items():
                    due = model[place].weight
                    assert layer.weight.grad.tolist() == due.grad.tolist(), f"{what}: stage {place}"
                    layer.weight.grad = None
                model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-PIPE-6203",
    "The microbatches of a batch in shards have each of its rows once.",
    source=f"{SOURCE}.microbatch.split_args_kwargs_into_chunks; torch.distributed.tensor.DTensor.full_tensor",
)
@pytest.mark.parametrize("rows", [8, 6], ids=["divided", "undivided"])
@pytest.mark.world(2)
def test_shards(world: World, rows: int) -> None:
    """Split rows over two ranks into four microbatches."""

    def body(rank: Rank) -> None:
        data = torch.arange(float(rows), device=rank.device)
        batch = distribute_tensor(data, rank.mesh(), [Shard(0)])
        chunks = split_args_kwargs_into_chunks((batch,), {}, 4)[0]
        found = torch.cat([chunk.full_tensor() for (chunk,) in chunks])
        assert sorted(found.tolist()) == data.tolist(), f"rows: {found.tolist()}"

    world.run(body)


class Kept(nn.Module):
    """A layer that multiplies by a weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, into memory of its own."""
        return (x * self.weight).contiguous()


def compared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products of what two tensors have in order, as a loss of flattened logits and labels does."""
    return (output.flatten() * target.flatten()).sum()


@requirement(
    "RFSDP-PIPE-8101",
    "A schedule compares each microbatch with its part of the target, also where batches are not split along rows.",
    source=f"{SOURCE}: ScheduleGPipe: args_chunk_spec, output_merge_spec; pytorch#148458: 'We don't have a way of "
    "splitting the target'",
)
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.world(2)
def test_parts_of_the_target(world: World, dim: int) -> None:
    """Take a step of two microbatches, with one stage for each rank or with two, whose losses are sums of products."""

    def body(rank: Rank) -> None:
        x = torch.arange(24.0, device=rank.device).view(4, 6)
        y = torch.arange(24.0, device=rank.device).view(4, 6) ** 2
        spec = TensorChunkSpec(dim)
        due = [compared(part, target).item() for part, target in zip(x.chunk(2, dim), y.chunk(2, dim), strict=True)]
        for each in (1, 2):
            count = each * rank.size
            stages = [
                PipelineStage(Kept().to(rank.device), place, count, rank.device)
                for place in range(rank.index, count, rank.size)
            ]
            options = {"loss_fn": compared, "args_chunk_spec": (spec,), "output_merge_spec": spec}
            schedule = (
                ScheduleGPipe(stages[0], 2, **options) if each == 1 else ScheduleInterleaved1F1B(stages, 2, **options)
            )
            losses: list[torch.Tensor] = []
            last = rank.index == rank.size - 1
            given = {"target": y, "losses": losses} if last else {}
            output = schedule.step(*(() if rank.index else (x,)), **given)
            if last:
                assert output.tolist() == x.tolist()
                assert [loss.item() for loss in losses] == due, f"losses of {each} stages: {[v.item() for v in losses]}"

    world.run(body)
