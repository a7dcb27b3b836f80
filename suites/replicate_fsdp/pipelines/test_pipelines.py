"""Pipeline schedules: their steps and evaluations, their losses, what they draw and keep, and stages in replicas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.pipelines import (
    BATCHES,
    LOOPED,
    SCHEDULES,
    SINGLE,
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
OLD = pytest.mark.skipif(
    runs_with("<2.12"), reason="unsupported: before 2.12, a schedule's first call decides what later ones can do"
)


ORDERS = ("step eval step", "eval eval step step", "unlisted unlisted step", "unlisted eval step")
"""Calls of a schedule one after the other: an unlisted one is a step without a list for the losses."""


@requirement(
    "RFSDP-PIPE-4960",
    "Steps and evaluations of a pipeline schedule, in any order, have the results of the whole model's calls.",
    source=f"{SOURCE}: ScheduleGPipe.step, eval, losses",
)
@OLD
@each_schedule
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
                    mean(right).backward()
                    for place, layer in own.layers.items():
                        due = model[place].weight
                        assert layer.weight.grad.tolist() == due.grad.tolist(), f"{what}: stage {place}"
                        layer.weight.data.add_(layer.weight.grad.sign())
                        layer.weight.grad = None
                    for layer in model:
                        layer.weight.data.add_(layer.weight.grad.sign())
                        layer.weight.grad = None

    world.run(body)


class Failing:
    """A loss that is the total of products, and raises in one of its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails_in: int | None = None

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the total, or raise."""
        self.calls += 1
        if self.calls - 1 == self.fails_in:
            raise ArithmeticError("not a finite loss")
        return total(output, target)


@requirement(
    "RFSDP-PIPE-8751",
    "After a call of a pipeline schedule that failed in the loss, a step has the gradients and losses of its batch.",
    source=f"{SOURCE}: ScheduleGPipe.step, eval, loss_fn, losses",
)
@OLD
@pytest.mark.parametrize("at", [0, BATCHES - 1], ids=["first", "last"])
@each_schedule
@pytest.mark.world(1)
def test_after_an_error(world: World, schedule: Any, at: int) -> None:
    """The loss of the first or the last microbatch raises in a step or an evaluation; then take two steps."""
    if schedule not in SINGLE and runs_with(">=2.15"):
        pytest.skip("unsupported: since 2.15, stages of one rank refuse what a failed step has handed over")

    def body(rank: Rank) -> None:
        for how in ("step", "eval") if schedule in SINGLE else ("step",):
            loss = Failing()
            own = Pipeline(schedule, rank.device, 0, 1, loss=loss)
            model = own.alone(rank.device)
            own.call("step", *batch(0, rank.device))
            loss.calls, loss.fails_in = 0, at
            with pytest.raises(ArithmeticError, match="not a finite loss"):
                own.call(how, *batch(1, rank.device))
            for number, options in enumerate(({}, {"losses": []})):
                for layer in (*own.layers.values(), *model):
                    layer.zero_grad()
                x, y = batch(2 + number, rank.device)
                own.call("step", x, y, **options)
                right = chunks(model, x, y)
                mean(right).backward()
                what = f"step {number} after a failed {how}"
                for place, layer in own.layers.items():
                    due, found = model[place].weight.grad.tolist(), layer.weight.grad.tolist()
                    assert found == due, f"{what}: stage {place} has {found} and not {due}"
                assert [v.item() for v in options.get("losses", right)] == [v.item() for v in right], what

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
                mean(right).backward()
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


POLICIES = {
    "fully_shard": MixedPrecisionPolicy(),
    "mixed": MixedPrecisionPolicy(torch.float32, torch.float64, output_dtype=torch.float64),
}
"""How stages under fully_shard compute; whole numbers are exact in each dtype."""


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
@pytest.mark.parametrize("how", ["ddp", "fully_shard", "mixed"])
@pytest.mark.world(4)
def test_replicated_stages(world: World, request: pytest.FixtureRequest, how: str) -> None:
    """Two replicas of a pipeline of two ranks take two steps on data of their own."""
    if how == "ddp":
        request.getfixturevalue("with_reducer")

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("replicas", "stages"))
        replicas, group = mesh["replicas"], mesh["stages"].get_group()
        replica, index = mesh.get_coordinate()
        for schedule in (*SINGLE, *LOOPED):
            hook = Counted(replicas.get_group())

            def wrap(module: nn.Module, hook: Any = hook) -> nn.Module:
                if how != "ddp":
                    return fully_shard(module, mesh=replicas, mp_policy=POLICIES[how])
                ddp = DistributedDataParallel(module, process_group=replicas.get_group())
                ddp.register_comm_hook(hook, lambda state, bucket: state.average(bucket))
                return ddp

            own = Pipeline(schedule, rank.device, index, 2, group=group, wrap=wrap, given=True)
            model = own.alone(rank.device)
            for step in range(2):
                model.zero_grad()
                for data in range(2):
                    (mean(chunks(model, *batch(2 * step + data, rank.device))) / 2).backward()
                for layer in own.layers.values():
                    layer.zero_grad()
                hook.calls = 0
                own.call("step", *batch(2 * step + replica, rank.device))
                due = whole(model[place].weight.grad for place in own.layers)
                what = f"{schedule.__name__}, step {step}"
                assert whole(layer.weight.grad for layer in own.layers.values()) == due, what
                assert how != "ddp" or hook.calls == len(own.layers), f"{what}: {hook.calls} reductions"

    world.run(body)
