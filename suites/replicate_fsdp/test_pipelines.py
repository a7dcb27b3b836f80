"""Pipeline schedules: their steps and evaluations, their losses, what they draw and keep, and stages in replicas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SINGLE = (ScheduleGPipe, Schedule1F1B)
LOOPED = (ScheduleInterleaved1F1B, ScheduleLoopedBFS)
SPLIT = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
SCHEDULES = (*SINGLE, *LOOPED, *SPLIT)
V_SHAPED = (ScheduleZBVZeroBubble,)  # these can't evaluate: a finding
BATCHES = 4
SOURCE = "torch.distributed.pipelining"
OLD = pytest.mark.skipif(
    runs_with("<2.12"), reason="unsupported: before 2.12, a schedule's first call decides what later ones can do"
)


class Layer(nn.Module):
    """A layer of whole numbers, so that nothing is rounded, and maybe dropout after it."""

    def __init__(self, index: int, drop: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 1.0 + index]], dtype=torch.float64))
        self.dropout = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        result: torch.Tensor = self.dropout(x @ self.weight)
        return result


def total(output: torch.Tensor, target: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return the sum of products with the target, times a factor."""
    return factor * (output * target).sum()


def batch(step: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's input and target, double[8, 2]."""
    x = (torch.arange(16, dtype=torch.float64).view(8, 2) + step) % 5 - 2
    return x.to(device), (x.flip(0) + 1).to(device)


class Pipeline:
    """A rank's part of a pipeline of layers over the ranks of a group."""

    def __init__(
        self,
        schedule: Any,
        device: Any,
        index: int,
        size: int,
        *,
        group: Any = None,
        drop: float = 0.0,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.count = size if schedule in SINGLE else 2 * size
        at = 2 * size - 1 - index if schedule in V_SHAPED else index + size
        self.places = (index,) if schedule in SINGLE else (index, at)
        self.layers = {place: Layer(place, drop).to(device) for place in self.places}
        stages = []
        for place, module in self.layers.items():
            given: dict[str, Any] = {}
            if wrap is not None:  # stages in DDP can't have their shapes inferred
                like = torch.zeros(8 // BATCHES, 2, dtype=torch.float64, device=device)
                given = {"input_args": like.clone().requires_grad_(place > 0), "output_args": like.requires_grad_()}
            stage = PipelineStage(wrap(module) if wrap else module, place, self.count, device, group=group, **given)
            stages.append(stage)
        self.is_last = self.count - 1 in self.places
        self.schedule = schedule(stages[0] if schedule in SINGLE else stages, BATCHES, loss_fn=total)

    def call(self, how: str, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
        """Run a method of the schedule on what this rank's stages need."""
        target = y if self.is_last else None
        return getattr(self.schedule, how)(*((x,) if 0 in self.places else ()), target=target, **options)

    def alone(self, device: Any) -> nn.Sequential:
        """Return the whole model."""
        return nn.Sequential(*(Layer(place, 0.0) for place in range(self.count))).to(device)


def chunks(model: nn.Module, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> list[torch.Tensor]:
    """Return the losses of the microbatches."""
    return [total(model(a), b, factor) for a, b in zip(x.chunk(BATCHES), y.chunk(BATCHES), strict=True)]


ORDERS = ("step eval step", "eval eval step step", "unlisted unlisted step", "unlisted eval step")
"""Calls of a schedule one after the other: an unlisted one is a step without a list for the losses."""


@requirement(
    "RFSDP-PIPE-4960",
    "Steps and evaluations of a pipeline schedule, in any order, have the results of the whole model's calls.",
    source=f"{SOURCE}: ScheduleGPipe.step, eval, losses",
)
@OLD
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__.removeprefix("Schedule"))
@pytest.mark.world(2)
def test_orders(world: World, schedule: Any) -> None:
    """Compare outputs, losses and gradients after each call, with weights that change in each step."""

    def body(rank: Rank) -> None:
        for order in ORDERS:
            if "eval" in order and schedule in V_SHAPED:
                continue
            own = Pipeline(schedule, rank.device, rank.index, rank.size)
            model = own.alone(rank.device)
            for number, how in enumerate(order.split()):
                what = f"{order}: call {number}"
                x, y = batch(number, rank.device)
                losses: list[torch.Tensor] = []
                options = {} if how == "unlisted" else {"losses": losses}
                if how == "eval":
                    with torch.no_grad():
                        output = own.call("eval", x, y, **options)
                else:
                    output = own.call("step", x, y, **options)
                right = chunks(model, x, y)
                if own.is_last:
                    assert output.tolist() == model(x).tolist(), what
                    assert how == "unlisted" or [v.item() for v in losses] == [v.item() for v in right], what
                if how != "eval":
                    (torch.stack(right).sum() / BATCHES).backward()
                    for place, layer in own.layers.items():
                        due = model[place].weight
                        assert layer.weight.grad.tolist() == due.grad.tolist(), f"{what}: stage {place}"
                        layer.weight.data.add_(layer.weight.grad.sign())
                        layer.weight.grad = None
                    for layer in model:
                        layer.weight.data.add_(layer.weight.grad.sign())
                        layer.weight.grad = None

    world.run(body)


@requirement(
    "RFSDP-PIPE-4961",
    "A step of a pipeline schedule gives loss_kwargs to the loss function for each microbatch.",
    source=f"{SOURCE}: ScheduleGPipe.step: loss_kwargs",
)
@pytest.mark.needs(torch="torch.distributed.pipelining.ScheduleGPipe.step(loss_kwargs)")
@pytest.mark.world(2)
def test_arguments_of_losses(world: World) -> None:
    """Each schedule takes a factor for the loss in one step, none in the next, and another one in the last."""

    def body(rank: Rank) -> None:
        x, y = batch(0, rank.device)
        for schedule in SCHEDULES:
            own = Pipeline(schedule, rank.device, rank.index, rank.size)
            model = own.alone(rank.device)
            for factor in (0.5, None, 4.0):
                losses: list[torch.Tensor] = []
                given = {} if factor is None else {"loss_kwargs": {"factor": factor}}
                own.call("step", x, y, losses=losses, **given)
                right = chunks(model, x, y, 1.0 if factor is None else factor)
                what = f"{schedule.__name__}, {factor}"
                assert not own.is_last or [v.item() for v in losses] == [v.item() for v in right], what
                model.zero_grad()
                (torch.stack(right).sum() / BATCHES).backward()
                for place, layer in own.layers.items():
                    assert layer.weight.grad.tolist() == model[place].weight.grad.tolist(), f"{what}: stage {place}"
                    layer.weight.grad = None

    world.run(body)


@requirement(
    "RFSDP-PIPE-4962",
    "A call of a pipeline schedule draws as many random numbers as its stages do for the microbatches, the first one, "
    "too.",
    source=f"{SOURCE}: ScheduleGPipe.step, eval; torch.manual_seed",
)
@OLD
@pytest.mark.world(2)
def test_random_numbers(world: World) -> None:
    """Look at the number after those of dropout, in the first call of a schedule and in later ones."""

    def body(rank: Rank) -> None:
        x, y = batch(0, rank.device)
        for schedule in SCHEDULES:
            for first in ("step", "eval")[: 2 - (schedule in V_SHAPED)]:
                own = Pipeline(schedule, rank.device, rank.index, rank.size, drop=0.5)
                torch.manual_seed(7)
                for part in x.chunk(BATCHES) * len(own.layers):
                    nn.functional.dropout(part)
                right = torch.rand(1, device=rank.device).item()
                for number, how in enumerate((first, "step")):
                    torch.manual_seed(7)
                    own.call(how, x, y)
                    found = torch.rand(1, device=rank.device).item()
                    assert found == right, f"{schedule.__name__}, {first} first: call {number}"

    world.run(body)


@requirement(
    "RFSDP-PIPE-4963",
    "A pipeline schedule keeps none of the last stage's outputs after a step with return_outputs=False.",
    source=f"{SOURCE}: ScheduleGPipe.step: return_outputs",
)
@OLD
@pytest.mark.world(2)
def test_outputs_freed(world: World) -> None:
    """Ask for the outputs in a first step, and not in a second one."""

    def body(rank: Rank) -> None:
        x, y = batch(0, rank.device)
        for schedule in SCHEDULES:
            own = Pipeline(schedule, rank.device, rank.index, rank.size)
            output = own.call("step", x, y, return_outputs=True)
            assert (output is not None) == own.is_last, schedule.__name__
            del output
            outputs: list[Any] = []
            last = own.layers.get(own.count - 1)
            if last is not None:
                last.register_forward_hook(lambda *args, kept=outputs: kept.append(weakref.ref(args[-1])))
            assert own.call("step", x, y, return_outputs=False) is None, schedule.__name__
            gc.collect()
            assert len(outputs) == BATCHES * own.is_last, schedule.__name__
            assert not [one for one in outputs if one() is not None], schedule.__name__

    world.run(body)


class Counted:
    """The state of a communication hook that averages, and counts its calls."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls = group, 0

    def average(self, bucket: Any) -> Any:
        """Average a bucket."""
        self.calls += 1
        work: Any = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)


def whole(gradients: Iterable[torch.Tensor | None]) -> list[Any]:
    """Return gradients as lists."""
    found = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return [None if g is None else g.tolist() for g in found]


@requirement(
    "RFSDP-PIPE-4964",
    "Gradients of a pipeline's stages in data parallelism are the average over the replicas.",
    source=f"{SOURCE}: PipelineStage; torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp.fully_shard",
)
@requirement(
    "RFSDP-PIPE-4965",
    "DDP reduces the gradients of a pipeline's stage once in a step, after its last microbatch.",
    source=f"{SOURCE}: PipelineStage.backward_one_chunk: last_backward",
)
@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
@pytest.mark.world(4)
def test_replicated_stages(world: World, how: str) -> None:
    """Two replicas of a pipeline of two ranks take two steps on data of their own."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("replicas", "stages"))
        replicas, group = mesh["replicas"], mesh["stages"].get_group()
        replica, index = mesh.get_coordinate()
        for schedule in (*SINGLE, *LOOPED):
            hook = Counted(replicas.get_group())

            def wrap(module: nn.Module, hook: Any = hook) -> nn.Module:
                if how == "fully_shard":
                    return fully_shard(module, mesh=replicas)
                ddp = DistributedDataParallel(module, process_group=replicas.get_group())
                ddp.register_comm_hook(hook, lambda state, bucket: state.average(bucket))
                return ddp

            own = Pipeline(schedule, rank.device, index, 2, group=group, wrap=wrap)
            model = own.alone(rank.device)
            for step in range(2):
                model.zero_grad()
                for data in range(2):
                    (torch.stack(chunks(model, *batch(2 * step + data, rank.device))).sum() / BATCHES / 2).backward()
                for layer in own.layers.values():
                    layer.zero_grad()
                hook.calls = 0
                own.call("step", *batch(2 * step + replica, rank.device))
                due = whole(model[place].weight.grad for place in own.layers)
                what = f"{schedule.__name__}, step {step}"
                assert whole(layer.weight.grad for layer in own.layers.values()) == due, what
                assert how != "ddp" or hook.calls == len(own.layers), f"{what}: {hook.calls} reductions"

    world.run(body)
