"""Pipelines whose stages pass several tensors and take keyword arguments, in any number of stages and microbatches."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

from fixtures import pipelines as steps
from fixtures.pipelines import BATCHES, LOOPED, SCHEDULES, SINGLE, SPLIT, V_SHAPED, Pipeline, each_schedule, mean
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.pipelining"
ROWS = 3
"""Rows of a microbatch."""


class Part(nn.Module):
    """A stage that takes two tensors and passes on two, of which both or one have gradients; the last returns one.

    The first one makes marks of them, which are no floating-point tensors, and all pass them on. A turned pipeline
    splits its second input and its output along their second dimension.
    """

    def __init__(self, index: int, count: int, both: bool, turned: bool) -> None:
        super().__init__()
        self.index, self.count, self.both, self.turned = index, count, both, turned
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 1.0 + index % 2]], dtype=torch.float64))

    def forward(self, a: torch.Tensor, b: torch.Tensor, *marks: torch.Tensor, factor: torch.Tensor, shift: Any) -> Any:
        """Map two of double[rows, 2] to two, or to their sum."""
        b = b.T.contiguous() if self.index == 0 and self.turned else b
        marked, numbers, small = marks or (b.detach() > 0, b.detach().long(), b.detach().to(torch.int8))
        b = b * factor * (self.weight.sum().sign() if self.both else 1)
        a = a @ self.weight + b * (shift.T if isinstance(shift, torch.Tensor) else shift) + marked * (numbers + small)
        if self.index < self.count - 1:
            return a, b, marked, numbers, small
        return (a + b).T if self.turned else a + b


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products with the target."""
    return ((output if output.shape == target.shape else output.T) * target).sum()


def batch(step: int, parts: int, turned: bool, device: Any) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a step, their factors and targets, of some microbatches."""
    x = (torch.arange(2.0 * ROWS * parts, dtype=torch.float64, device=device).view(-1, 2) + step) % 5 - 2
    return x, (x + 1).T.contiguous() if turned else x + 1, (x[:, :1] % 2) + 1, x.flip(0) + 1


def alone(stages: nn.ModuleList, parts: int, shift: Any, given: tuple[torch.Tensor, ...]) -> tuple[Any, list[Any]]:
    """Return the output, and the losses of the microbatches."""
    shifts = shift.chunk(parts, 1) if isinstance(shift, torch.Tensor) else [shift] * parts
    x, w, factor, y = given
    outputs, losses = [], []
    columns, every = (
        w.chunk(parts, int(w.shape[0] == 2)),
        zip(x.chunk(parts), factor.chunk(parts), y.chunk(parts), strict=True),
    )
    for number, (a, one, target) in enumerate(every):
        passed: Any = (a, columns[number])
        for stage in stages:
            passed = stage(*passed, factor=one, shift=shifts[number])
        outputs.append(passed)
        losses.append(total(passed, target))
    return torch.cat(outputs, int(outputs[0].shape[0] == 2)), losses


NUMBERS: list[tuple[Any, int, int, bool]] = [
    (SINGLE[0], 1, 3, True),
    (SINGLE[1], 1, 5, True),
    (SINGLE[1], 1, 2, False),
    (LOOPED[0], 3, 3, False),
    (LOOPED[1], 3, 3, True),
    (SPLIT[0], 3, 3, True),
    (V_SHAPED[0], 2, 5, True),
    (V_SHAPED[1], 2, 5, False),
]
"""Schedules, stages of each rank, microbatches, and whether both tensors that stages pass on have gradients."""


@requirement(
    "RFSDP-PIPE-5491",
    "Stages of a pipeline pass several tensors on, with gradients or without, while keyword arguments reach each.",
    source=f"{SOURCE}: PipelineStage: 'Example input tensors (single tensor or tuple)'; 'kwargs can be passed to all "
    "stages via respective step calls'",
)
@requirement(
    "RFSDP-PIPE-5703",
    "Stages of a pipeline pass integers and booleans on beside tensors with gradients, in training, too.",
    source=f"{SOURCE}: PipelineStage: 'Example input tensors (single tensor or tuple)'",
)
@requirement(
    "RFSDP-PIPE-5492",
    "A schedule splits and merges a batch along the dimensions of its specifications.",
    source=f"{SOURCE}: ScheduleGPipe: args_chunk_spec, kwargs_chunk_spec, output_merge_spec; "
    "TensorChunkSpec.from_tuple, from_dict",
)
@requirement(
    "RFSDP-PIPE-5493",
    "A pipeline schedule takes any number of stages and microbatches that it is documented for.",
    source=f"{SOURCE}: ScheduleInterleaved1F1B: 'relaxing the requirement of num_microbatch % pp_size == 0'",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: 2.12 raises for tensors that have no gradients")
@pytest.mark.world(2)
def test_arguments(world: World) -> None:
    """Take two steps, with an evaluation between, and give the list for losses twice."""

    def body(rank: Rank) -> None:
        for number, (schedule, each, parts, both) in enumerate(NUMBERS):
            what = f"{schedule.__name__}, {each} stages, {parts} microbatches"
            count = each * rank.size
            places = [rank.index + rank.size * n for n in range(each)]
            if schedule in V_SHAPED:
                places[1] = count - 1 - rank.index
            turned = "args_chunk_spec" in inspect.signature(schedule).parameters
            model = nn.ModuleList(Part(place, count, both, turned) for place in range(count)).to(rank.device)
            own = {place: Part(place, count, both, turned).to(rank.device) for place in places}
            stages = [PipelineStage(module, place, count, rank.device) for place, module in own.items()]
            specs: dict[str, Any] = {}
            if turned:
                specs = {
                    "args_chunk_spec": TensorChunkSpec.from_tuple((0, 1)),
                    "kwargs_chunk_spec": TensorChunkSpec.from_dict({"factor": 0, "shift": 1}) if number % 2 else None,
                    "output_merge_spec": TensorChunkSpec(1),
                }
            runs = schedule(stages[0] if schedule in SINGLE else stages, parts, loss_fn=total, **specs)
            losses: list[torch.Tensor] = []
            for step, how in enumerate(("step", "eval", "step")):
                shift: Any = step + 1
                if turned and number % 2:
                    shift = torch.arange(ROWS * parts, dtype=torch.float64, device=rank.device)[None] + shift
                if how == "eval" and schedule not in SINGLE:
                    continue
                x, w, factor, y = batch(step, parts, turned, rank.device)
                given = {"target": y, "losses": losses} if count - 1 in own else {}
                with torch.set_grad_enabled(how == "step"):
                    output = getattr(runs, how)(*((x, w) if 0 in own else ()), factor=factor, shift=shift, **given)
                right, due = alone(model, parts, shift, (x, w, factor, y))
                if count - 1 in own:
                    assert output.tolist() == right.tolist(), f"{what}: {how}"
                    assert [v.item() for v in losses] == [v.item() for v in due], f"{what}: {how}"
                if how == "step":
                    model.zero_grad()
                    mean(due).mul(BATCHES / parts).backward()
                    for place, module in own.items():
                        assert module.weight.grad is not None
                        expected = model[place].weight.grad
                        torch.testing.assert_close(module.weight.grad, expected, msg=f"{what}: stage {place}")
                        module.weight.grad = None

    world.run(body)


class Scaled(nn.Module):
    """A stage that multiplies its layer's result by what it is given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        result: torch.Tensor = self.layer(x) * scale
        return result


@requirement(
    "RFSDP-PIPE-6900",
    "A pipeline schedule gives a keyword argument the sum of the gradients of all stages that take it.",
    source=f"{SOURCE}: PipelineStage: 'kwargs can be passed to all stages via respective step calls'; "
    "torch.Tensor.grad",
)
@each_schedule
@pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: before 2.12, V-shaped schedules send to themselves")
@pytest.mark.world(2)
def test_gradients_of_keywords(world: World, schedule: Any) -> None:
    """Stages multiply by a tensor that is learned, and that each rank gives as a keyword argument."""

    def body(rank: Rank) -> None:
        own = Pipeline(schedule, rank.device, rank.index, rank.size, wrap=Scaled, given=True)
        scale = torch.tensor([2.0, 1.0, -1.0, 1.0] * 2, dtype=torch.float64, device=rank.device).view(-1, 1)
        model = own.alone(rank.device)
        scales = [scale.clone().requires_grad_() for _ in model]
        mine = scale.clone().requires_grad_()
        x, y = steps.batch(0, rank.device)
        result = x
        for layer, each in zip(model, scales, strict=True):
            result = layer(result) * each
        (steps.total(result, y) / BATCHES).backward()
        own.call("step", x, y, scale=mine, losses=[])
        due = torch.stack([scales[place].grad for place in own.places]).sum(0)  # type: ignore[misc]
        what = f"{schedule.__name__}: the keyword argument's gradient"
        assert mine.grad is not None, f"{what} is missing"
        assert (mine.grad / BATCHES).tolist() == due.tolist(), what

    world.run(body)


@requirement(
    "RFSDP-PIPE-5494",
    "get_schedule_class finds each schedule by its name in any case, and raises for others.",
    source=f"{SOURCE}.schedules.get_schedule_class: 'case insensitive'",
)
@requirement(
    "RFSDP-PIPE-5495",
    "A schedule refuses numbers of stages or microbatches that it is not for, before anything is sent.",
    source=f"{SOURCE}: ScheduleZBVZeroBubble: 'requires exactly two stages per rank'; ScheduleInterleaved1F1B: "
    "'works as long as n_microbatches % num_rounds is 0'",
)
@requirement(
    "RFSDP-PIPE-5496",
    "Arguments that are no tensors are the same in each microbatch, and the arguments that are split stay as they are.",
    source=f"{SOURCE}.microbatch.split_args_kwargs_into_chunks",
)
@pytest.mark.world(2)
def test_refused_numbers(world: World) -> None:
    """Ask for schedules by their names, give them wrong numbers, and split arguments of each kind."""

    def body(rank: Rank) -> None:
        for schedule in SCHEDULES:
            name = schedule.__name__.removeprefix("Schedule")
            for form in (name, name.lower(), name.upper()):
                assert schedules.get_schedule_class(form) is schedule, form
        with pytest.raises(ValueError, match="Unknown"):
            schedules.get_schedule_class("1F2B")

        def stages(each: int) -> list[PipelineStage]:
            places = [rank.index + rank.size * n for n in range(each)]
            return [PipelineStage(nn.Linear(2, 2), n, each * rank.size, rank.device) for n in places]

        for schedule, each in itertools.product(V_SHAPED, (1, 3)):
            with pytest.raises(ValueError, match="2"):
                schedule(stages(each), 4, loss_fn=total)
        for schedule in (LOOPED[0], SPLIT[0]):
            with pytest.raises(ValueError, match="5"):
                schedule(stages(2), 5, loss_fn=total)
        values = {"x": torch.arange(8.0).view(4, 2), "number": 3, "text": "a", "none": None, "flag": True}
        arguments = (values["x"] + 1, "b", 2.5)
        parts, named = split_args_kwargs_into_chunks(arguments, values, 2)
        assert [[getattr(v, "tolist", lambda v=v: v)() for v in part] for part in parts] == [
            [[[1.0, 2.0], [3.0, 4.0]], "b", 2.5],
            [[[5.0, 6.0], [7.0, 8.0]], "b", 2.5],
        ]
        for part, x in zip(named, ([[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]), strict=True):
            assert part.pop("x").tolist() == x
            assert part == {"number": 3, "text": "a", "none": None, "flag": True}
        assert list(values) == ["x", "number", "text", "none", "flag"]

    world.run(body)
