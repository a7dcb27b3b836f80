"""Stages of pipelines: frozen ones, with buffers, in replicas, in several steps, and in evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.pipelines import (
    LOOPED,
    SCHEDULES,
    SINGLE,
    SPLIT,
    V_SHAPED,
    Pipeline,
    batch,
    chunks,
    each_schedule,
    mean,
    total,
)
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.pipelining"
OLD = pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: before 2.12, V-shaped schedules send to themselves")


@requirement(
    "RFSDP-PIPE-5200",
    "A step of a pipeline schedule gives gradients to every stage that is not frozen, whichever others are.",
    source=f"{SOURCE}: ScheduleGPipe.step; torch.nn.Module.requires_grad_",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: 2.12 raises for frozen stages")
@pytest.mark.parametrize("which", ["first", "later"])
@each_schedule
@pytest.mark.world(2)
def test_frozen_stages(world: World, schedule: Any, which: str) -> None:
    """Freeze one stage, the first one or each of the later ones, and compare gradients with the whole model's."""

    def body(rank: Rank) -> None:
        count = Pipeline(schedule, rank.device, rank.index, rank.size).count
        for frozen in (0,) if which == "first" else range(1, count):
            own = Pipeline(schedule, rank.device, rank.index, rank.size)
            model = own.alone(rank.device)
            model[frozen].requires_grad_(False)
            if frozen in own.layers:
                own.layers[frozen].requires_grad_(False)
            x, y = batch(0, rank.device)
            own.call("step", x, y, losses=[])
            mean(chunks(model, x, y)).backward()
            for place, layer in own.layers.items():
                due = model[place].weight.grad
                found = layer.weight.grad
                what = f"stage {frozen} frozen: the gradient of stage {place} is {found}"
                assert (found is None) == (due is None), what
                assert due is None or found.tolist() == due.tolist(), what

    world.run(body)


@requirement(
    "RFSDP-PIPE-5201",
    "Gradients of several steps of a pipeline schedule without zero_grad are the sum of the steps' gradients.",
    source=f"{SOURCE}: ScheduleGPipe: scale_grads; torch.Tensor.grad",
)
@OLD
@pytest.mark.parametrize("how", ["averaged", "summed"])
@pytest.mark.world(2)
def test_accumulated_steps(world: World, how: str) -> None:
    """Take three steps of each schedule, with losses that are averaged over microbatches or not."""

    def body(rank: Rank) -> None:
        for schedule in SCHEDULES:
            own = Pipeline(schedule, rank.device, rank.index, rank.size, scale_grads=how == "averaged")
            model = own.alone(rank.device)
            for step in range(3):
                x, y = batch(step, rank.device)
                own.call("step", x, y, losses=[])
                losses = chunks(model, x, y)
                (mean(losses) if how == "averaged" else torch.stack(losses).sum()).backward()
                for place, layer in own.layers.items():
                    ratio = (layer.weight.grad / model[place].weight.grad).nanmean().item()
                    what = f"{schedule.__name__}, stage {place}: {ratio:.3f} of the gradient after step {step}"
                    assert layer.weight.grad.tolist() == model[place].weight.grad.tolist(), what

    world.run(body)


@requirement(
    "RFSDP-PIPE-8750",
    "A weight that stages of one rank share has the sum of their gradients after a step of a pipeline schedule.",
    source=f"{SOURCE}: ScheduleInterleaved1F1B: scale_grads; torch.Tensor.grad",
)
@OLD
@pytest.mark.parametrize("how", ["averaged", "summed"])
@pytest.mark.world(2)
def test_tied_stages(world: World, how: str) -> None:
    """Both stages of each rank have one weight, as the first and the last one of a V may have one embedding."""

    def body(rank: Rank) -> None:
        for schedule in (*LOOPED, *SPLIT):
            own = Pipeline(schedule, rank.device, rank.index, rank.size, scale_grads=how == "averaged")
            model = own.alone(rank.device)
            for index in range(rank.size):
                at = 2 * rank.size - 1 - index if schedule in V_SHAPED else index + rank.size
                model[at].weight = model[index].weight
            first, second = own.layers.values()
            second.weight = first.weight
            x, y = batch(0, rank.device)
            own.call("step", x, y, losses=[])
            losses = chunks(model, x, y)
            (mean(losses) if how == "averaged" else torch.stack(losses).sum()).backward()
            due, found = model[rank.index].weight.grad.tolist(), first.weight.grad.tolist()
            assert found == due, f"{schedule.__name__}: the shared weight has {found} and not {due}"

    world.run(body)


class Counting(nn.Module):
    """A layer that counts its calls and adds up its inputs in buffers."""

    calls: torch.Tensor
    seen: torch.Tensor

    def __init__(self, layer: nn.Module, device: Any) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("calls", torch.zeros(1, device=device))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        self.calls += 1
        self.seen += x.detach().sum(0)
        result: torch.Tensor = self.layer(x)
        return result


@requirement(
    "RFSDP-PIPE-5202",
    "Buffers of a pipeline's stages change in a step as those of the whole model do in calls with its microbatches.",
    source=f"{SOURCE}: PipelineStage; torch.nn.BatchNorm1d: running_mean",
)
@OLD
@pytest.mark.parametrize("shapes", ["given", "inferred"])
@pytest.mark.world(2)
def test_buffers(world: World, shapes: str) -> None:
    """Take two steps with each schedule, and look at buffers of calls and inputs."""

    def body(rank: Rank) -> None:
        for schedule in SCHEDULES:
            wrapped: list[Counting] = []

            def wrap(module: nn.Module, wrapped: list[Counting] = wrapped) -> nn.Module:
                wrapped.append(Counting(module, rank.device))
                return wrapped[-1]

            own = Pipeline(schedule, rank.device, rank.index, rank.size, wrap=wrap, given=shapes == "given")
            model = nn.Sequential(*(Counting(layer, rank.device) for layer in own.alone(rank.device)))
            for step in range(2):
                x, y = batch(step, rank.device)
                own.call("step", x, y, losses=[])
                chunks(model, x, y)
                for place, module in zip(own.places, wrapped, strict=True):
                    what = f"{schedule.__name__}, step {step}, stage {place}"
                    calls = int(module.calls)
                    assert calls == model[place].calls, f"{what}: {calls} calls"
                    assert module.seen.tolist() == model[place].seen.tolist(), what

    world.run(body)


@requirement(
    "RFSDP-PIPE-5203",
    "An evaluation with a pipeline schedule has the outputs and losses of the whole model's calls.",
    source=f"{SOURCE}: ScheduleGPipe.eval, ScheduleZBVZeroBubble, ScheduleDualPipeV",
)
@OLD
@each_schedule
@pytest.mark.world(2)
def test_evaluations(world: World, schedule: Any) -> None:
    """Evaluate twice with one schedule."""

    def body(rank: Rank) -> None:
        own = Pipeline(schedule, rank.device, rank.index, rank.size)
        model = own.alone(rank.device)
        for number in range(2):
            x, y = batch(number, rank.device)
            losses: list[torch.Tensor] = []
            with torch.no_grad():
                output = own.call("eval", x, y, losses=losses)
            if own.is_last:
                assert output.tolist() == model(x).tolist(), f"call {number}"
                assert [v.item() for v in losses] == [v.item() for v in chunks(model, x, y)], f"call {number}"

    world.run(body)


@requirement(
    "RFSDP-PIPE-9309",
    "Without targets, an evaluation with a pipeline schedule has the whole model's output, with a loss function, too.",
    source=f"{SOURCE}: ScheduleGPipe.eval: target=None, 'calling forward only'",
)
@pytest.mark.parametrize("loss", [total, None], ids=["loss", "no loss"])
@pytest.mark.world(2)
def test_evaluations_without_targets(world: World, loss: Any) -> None:
    """Evaluate twice with each schedule that can evaluate."""

    def body(rank: Rank) -> None:
        for schedule in SINGLE + LOOPED:
            own = Pipeline(schedule, rank.device, rank.index, rank.size, loss=loss)
            for number in range(2):
                x = batch(number, rank.device)[0]
                with torch.no_grad():
                    output = own.schedule.eval(*((x,) if 0 in own.places else ()))
                    if own.is_last:
                        assert output.tolist() == own.alone(rank.device)(x).tolist(), f"{schedule.__name__}, {number}"

    world.run(body)


@requirement(
    "RFSDP-PIPE-5204",
    "A pipeline whose stages infer the shapes of their inputs takes the steps of the whole model, in replicas, too.",
    source=f"{SOURCE}: PipelineStage: input_args; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.parametrize("how", ["alone", "fully_shard", "ddp"])
@pytest.mark.world(4)
def test_inferred_shapes(world: World, request: pytest.FixtureRequest, how: str) -> None:
    """Take two steps of two replicas of a pipeline of two ranks, with the same data."""
    if how == "ddp":
        request.getfixturevalue("with_reducer")

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("replicas", "stages"))
        replicas, group = mesh["replicas"], mesh["stages"].get_group()

        def wrap(module: nn.Module) -> nn.Module:
            if how == "fully_shard":
                return fully_shard(module, mesh=replicas)
            return DistributedDataParallel(module, process_group=replicas.get_group()) if how == "ddp" else module

        for schedule in (SINGLE[0], LOOPED[0]):
            own = Pipeline(schedule, rank.device, mesh["stages"].get_local_rank(), 2, group=group, wrap=wrap)
            model = own.alone(rank.device)
            for step in range(2):
                x, y = batch(step, rank.device)
                model.zero_grad()
                mean(chunks(model, x, y)).backward()
                for layer in own.layers.values():
                    layer.zero_grad()
                own.call("step", x, y)
                for place, layer in own.layers.items():
                    found = layer.weight.grad
                    found = found.full_tensor() if isinstance(found, DTensor) else found
                    what = f"{schedule.__name__}, step {step}, stage {place}"
                    assert found.tolist() == model[place].weight.grad.tolist(), what

    world.run(body)
