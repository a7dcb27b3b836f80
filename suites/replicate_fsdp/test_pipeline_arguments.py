"""Pipelines whose stages pass several tensors and take keyword arguments, in any number of stages and microbatches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

from fixtures.pipelines import BATCHES, LOOPED, SCHEDULES, SINGLE, SPLIT, V_SHAPED, mean
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.pipelining"
OLD = pytest.mark.skipif(
    runs_with("<2.12"), reason="unsupported: before 2.12, a schedule's first call decides what later ones can do"
)
ROWS = 2
"""Rows of a microbatch."""


class Part(nn.Module):
    """A stage that takes two tensors and passes on two, of which both or one have gradients; the last returns one."""

    def __init__(self, index: int, count: int, both: bool) -> None:
        super().__init__()
        self.index, self.count, self.both = index, count, both
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 1.0 + index % 2]], dtype=torch.float64))

    def forward(self, a: torch.Tensor, b: torch.Tensor, *, factor: torch.Tensor, shift: int = 1) -> Any:
        """Map two of double[rows, 2] (the first stage takes the second as columns) to two, or to their sum."""
        b = b.T if self.index == 0 else b
        b = b * factor * (self.weight.sum().sign() if self.both else 1)
        a = a @ self.weight + b * shift
        return (a + b).T if self.index == self.count - 1 else (a, b)


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products with the target."""
    return (output.T * target).sum()


def batch(step: int, parts: int, device: Any) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a step, their factors and targets, of some microbatches."""
    x = (torch.arange(2.0 * ROWS * parts, dtype=torch.float64, device=device).view(-1, 2) + step) % 5 - 2
    return x, (x + 1).T.contiguous(), (x[:, :1] % 2) + 1, x.flip(0) + 1


def alone(stages: nn.ModuleList, step: int, parts: int, device: Any, shift: int) -> tuple[list[Any], list[Any]]:
    """Return the outputs and the losses of the microbatches."""
    x, w, factor, y = batch(step, parts, device)
    outputs, losses = [], []
    for a, b, one, target in zip(x.chunk(parts), w.chunk(parts, 1), factor.chunk(parts), y.chunk(parts), strict=True):
        passed: Any = (a, b)
        for stage in stages:
            passed = stage(*passed, factor=one, shift=shift)
        outputs.append(passed)
        losses.append(total(passed, target))
    return outputs, losses


NUMBERS: list[tuple[Any, int, int]] = [
    *((schedule, 1, parts) for schedule, parts in itertools.product(SINGLE, (2, 3, 5))),
    *((schedule, 3, parts) for schedule, parts in itertools.product((*LOOPED, SPLIT[0]), (2, 3, 6))),
    *((schedule, 2, parts) for schedule, parts in itertools.product(V_SHAPED, (4, 5))),
]
"""Schedules, stages of each rank, and microbatches."""


@requirement(
    "RFSDP-PIPE-5491",
    "Stages of a pipeline pass several tensors on, with gradients or without, while keyword arguments reach each.",
    source=f"{SOURCE}: PipelineStage: 'Example input tensors (single tensor or tuple)'; 'kwargs can be passed to all "
    "stages via respective step calls'",
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
@OLD
@pytest.mark.parametrize("both", [True, False], ids=["gradients of both", "gradients of one"])
@pytest.mark.world(2)
def test_arguments(world: World, both: bool) -> None:
    """Take two steps, with an evaluation between, and give the list for losses twice."""

    def body(rank: Rank) -> None:
        for schedule, each, parts in NUMBERS:
            what = f"{schedule.__name__}, {each} stages, {parts} microbatches"
            count = each * rank.size
            places = [rank.index + rank.size * n for n in range(each)]
            if schedule in V_SHAPED:
                places[1] = count - 1 - rank.index
            own = {place: Part(place, count, both).to(rank.device) for place in places}
            model = nn.ModuleList(Part(place, count, both).to(rank.device) for place in range(count))
            stages = [PipelineStage(module, place, count, rank.device) for place, module in own.items()]
            runs = schedule(
                stages[0] if schedule in SINGLE else stages,
                parts,
                loss_fn=total,
                args_chunk_spec=TensorChunkSpec.from_tuple((0, 1)),
                kwargs_chunk_spec=TensorChunkSpec.from_dict({"factor": 0, "shift": 0}),
                output_merge_spec=TensorChunkSpec(1),
            )
            losses: list[torch.Tensor] = []
            for step, (how, shift) in enumerate((("step", 1), ("eval", 2), ("step", 3))):
                if how == "eval" and schedule in V_SHAPED:
                    continue  # docs/findings/pipeline_v_evaluation.py
                x, w, factor, y = batch(step, parts, rank.device)
                given = {"target": y, "losses": losses} if count - 1 in own else {}
                with torch.set_grad_enabled(how == "step"):
                    output = getattr(runs, how)(*((x, w) if 0 in own else ()), factor=factor, shift=shift, **given)
                outputs, due = alone(model, step, parts, rank.device, shift)
                if count - 1 in own:
                    assert output.tolist() == torch.cat(outputs, 1).tolist(), f"{what}: {how}"
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
