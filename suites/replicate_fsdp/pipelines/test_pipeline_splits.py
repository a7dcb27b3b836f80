"""Models that pipeline() splits into stages, at submodules or at marks in their code, once or several times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipe_split, pipeline
from torch.distributed.pipelining.stage import build_stage

from fixtures.pipelines import BATCHES, Layer, batch, mean, total
from harness import Rank, World, requirement

SOURCE = "torch.distributed.pipelining"


class Shifted(Layer):
    """A layer that adds a buffer."""

    shift: torch.Tensor

    def __init__(self, index: int) -> None:
        super().__init__(index, 0.0)
        self.register_buffer("shift", torch.full((2,), float(index), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        return super().forward(x) + self.shift


class Model(nn.Module):
    """Three layers and a head, which also takes what the second layer gave, with marks before some of them or none."""

    def __init__(self, marks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifted(index) for index in range(3))
        self.head = Shifted(3)
        self.marks = marks

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        x = self.layers[0](x * scale)
        if 1 in self.marks:
            pipe_split()
        x = second = self.layers[1](x)
        if 2 in self.marks:
            pipe_split()
        x = self.layers[2](x)
        result: torch.Tensor = self.head(x + second)
        return result


SPLITS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "before": ((), {"split_spec": {"layers.2": SplitPoint.BEGINNING}}),
    "after": ((), {"split_spec": {"layers.1": SplitPoint.END}}),
    "marked": ((2,), {}),
}
"""Marks in the model, and options that split it before its third layer."""


@requirement(
    "RFSDP-PIPE-5497",
    "pipeline() splits a model before or after the submodules that are named, or at its marks, into stages with their "
    "parameters and buffers by the model's names.",
    source=f"{SOURCE}.pipeline: split_spec; SplitPoint.BEGINNING, END; pipe_split; Pipe.num_stages, get_stage_module",
)
@requirement(
    "RFSDP-PIPE-5498",
    "Stages that are built from a split model take its steps, also where one passes several tensors on.",
    source=f"{SOURCE}: Pipe.build_stage, info; build_stage: stage_module, stage_index, pipe_info, group",
)
@requirement(
    "RFSDP-PIPE-5499",
    "Splitting a model leaves it as it was, with pipe_split as a no-op in its own forwards.",
    source=f"{SOURCE}.pipeline; pipe_split: 'It is a no-op if your annotated module is run eagerly'",
)
@pytest.mark.world(2)
def test_split_models(world: World) -> None:
    """Split a model into two stages in each way, of which one passes two tensors on, and take two steps."""

    def body(rank: Rank) -> None:
        for how, (marks, options) in SPLITS.items():
            check(rank, how, marks, options)

    world.run(body)


def check(rank: Rank, how: str, marks: tuple[int, ...], options: dict[str, Any]) -> None:
    """Compare the stages of a model with the model."""
    model, right = Model(marks).to(rank.device), Model().to(rank.device)
    x, y = batch(0, rank.device)
    scale = x[:, :1] % 2 + 1
    state = {name: (id(value), value.tolist()) for name, value in model.state_dict(keep_vars=True).items()}
    modules = list(model.named_modules())
    rows = len(x) // BATCHES
    pipe = pipeline(model, (x[:rows],), {"scale": scale[:rows]}, **options)
    assert (pipe.num_stages, pipe.info().num_stages) == (2, 2), how
    assert {n: (id(v), v.tolist()) for n, v in model.state_dict(keep_vars=True).items()} == state, how
    assert list(model.named_modules()) == modules, how
    assert model(x, scale).tolist() == right(x, scale).tolist(), how
    for index, inside in enumerate((("layers.0", "layers.1"), ("layers.2", "head"))):
        names = {f"{name}.{kind}" for name in inside for kind in ("weight", "shift")}
        assert set(pipe.get_stage_module(index).state_dict()) == names, f"{how}, stage {index}"
    with torch.no_grad():
        again = x[rows : 2 * rows], scale[rows : 2 * rows]
        assert pipe(again[0], scale=again[1])[0].tolist() == right(*again).tolist(), how
    for schedule in (ScheduleGPipe, Schedule1F1B):
        module = pipe.get_stage_module(rank.index)
        stage: Any = (
            pipe.build_stage(rank.index, rank.device)
            if schedule is ScheduleGPipe
            else build_stage(module, rank.index, pipe.info(), rank.device)
        )
        runs: Any = schedule(stage, BATCHES, loss_fn=total)
        for step in range(2):
            what = f"{how}, {schedule.__name__}, step {step}"
            x, y = batch(step, rank.device)
            scale = x[:, :1] % 2 + 1
            stage.submod.zero_grad()
            right.zero_grad()
            losses: list[torch.Tensor] = []
            parts = zip(x.chunk(BATCHES), scale.chunk(BATCHES), y.chunk(BATCHES), strict=True)
            due = [total(right(a, s), b) for a, s, b in parts]
            if rank.index == 0:
                runs.step(x, scale=scale)
            else:
                assert runs.step(target=y, losses=losses).tolist() == right(x, scale).tolist(), what
                assert [v.item() for v in losses] == [v.item() for v in due], what
            mean(due).backward()
            for name, parameter in stage.submod.named_parameters():
                expected = right.get_parameter(name).grad
                assert parameter.grad is not None, f"{what}: {name}"
                assert expected is not None
                assert parameter.grad.tolist() == expected.tolist(), f"{what}: {name}"


TIMES: dict[str, tuple[str, str]] = {"once": ("1", ""), "same": ("1", "1"), "elsewhere": ("1", "2")}
"""Submodules before which a model is split at first and then, if it is."""


@requirement(
    "RFSDP-PIPE-5631",
    "A model that was split by pipeline() can be split again, at the submodules of the second specification alone.",
    source=f"{SOURCE}.pipeline: split_spec: 'A dictionary using submodule names as split marker'",
)
@requirement(
    "RFSDP-PIPE-5499",
    "Splitting a model leaves it as it was, with pipe_split as a no-op in its own forwards.",
    source=f"{SOURCE}.pipeline; pipe_split: 'It is a no-op if your annotated module is run eagerly'",
)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.world(1)
def test_split_again(world: World, times: str) -> None:
    """Split three layers before one of them, and then before the same or another one; each stage has its layers."""

    def body(rank: Rank) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).to(rank.device)
        x = torch.ones(2, 2, device=rank.device)
        right = model(x)
        for name in filter(None, TIMES[times]):
            pipe = pipeline(model, (x,), split_spec={name: SplitPoint.BEGINNING})
            found = [sorted({n[0] for n in pipe.get_stage_module(i).state_dict()}) for i in range(pipe.num_stages)]
            at = int(name)
            due = [[str(i) for i in range(at)], [str(i) for i in range(at, 3)]]
            assert found == due, f"split before {name}: {len(found)} stages, with layers {found}"
            assert torch.equal(model(x), right), f"split before {name}: the model itself"

    world.run(body)
