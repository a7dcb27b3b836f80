"""Modules that are parallelized by each style, in one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Plan = ParallelStyle | dict[str, ParallelStyle]


class Scale(nn.Module):
    """Multiply by a weight and add a bias: exact where a norm would round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``."""
        return x * self.weight + self.bias


class Double(nn.Module):
    """A module without parameters whose second argument may be left out."""

    def forward(self, x: torch.Tensor, *, y: torch.Tensor | None = None) -> torch.Tensor:
        """Return twice ``x``, or the sum of three times ``x`` and ``y``."""
        return x * 2 if y is None else x * 3 + y


def pair() -> nn.Module:
    """Return two linear layers."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


PREPARED: dict[str, Any] = {"input_layouts": S0, "desired_input_layouts": R}
Given = tuple[Placement, bool]
"""The layout of an input, and whether it is a DTensor."""
WHOLE, PART = (R, False), (S0, False)


def as_dtensor(layout: Placement) -> Given:
    """Return an input that is a DTensor."""
    return layout, True


CASES: dict[str, tuple[Callable[[], nn.Module], Plan, Given]] = {
    "columns": (lambda: nn.Linear(6, 8), ColwiseParallel(), WHOLE),
    "columns of a sequence": (lambda: nn.Linear(6, 8), ColwiseParallel(input_layouts=S0), PART),
    "columns made whole": (lambda: nn.Linear(6, 8), ColwiseParallel(output_layouts=R), WHOLE),
    "columns to a sequence": (lambda: nn.Linear(6, 8), ColwiseParallel(output_layouts=S0), WHOLE),
    "uneven columns": (lambda: nn.Linear(6, 7), ColwiseParallel(output_layouts=R), WHOLE),
    "columns of a DTensor": (lambda: nn.Linear(6, 8), ColwiseParallel(), as_dtensor(R)),
    "rows": (lambda: nn.Linear(12, 4), RowwiseParallel(), PART),
    "rows of the whole": (lambda: nn.Linear(6, 4), RowwiseParallel(input_layouts=R), WHOLE),
    "rows to a sequence": (lambda: nn.Linear(12, 4), RowwiseParallel(output_layouts=S0), PART),
    "rows to a DTensor": (lambda: nn.Linear(12, 4), RowwiseParallel(use_local_output=False), PART),
    "rows of a DTensor": (lambda: nn.Linear(12, 4), RowwiseParallel(), as_dtensor(S1)),
    "columns and rows": (pair, {"0": ColwiseParallel(), "2": RowwiseParallel()}, WHOLE),
    "a sequence": (Scale, SequenceParallel(sequence_dim=0), PART),
    "a sequence to local": (Scale, SequenceParallel(sequence_dim=0, use_local_output=True), PART),
    "a sequence of the whole": (Scale, SequenceParallel(sequence_dim=0), as_dtensor(R)),
    "an input": (Double, PrepareModuleInput(**PREPARED), PART),
    "an input that is a DTensor": (Double, PrepareModuleInput(**PREPARED), as_dtensor(S0)),
    "a DTensor to local": (Double, PrepareModuleInput(**PREPARED, use_local_output=True), as_dtensor(S0)),
    "an output": (Double, PrepareModuleOutput(output_layouts=S0, desired_output_layouts=R), PART),
    "an output to a DTensor": (
        Double,
        PrepareModuleOutput(output_layouts=S0, desired_output_layouts=S1, use_local_output=False),
        PART,
    ),
    "an input and an output": (
        Double,
        PrepareModuleInputOutput(**PREPARED, output_layouts=R, desired_output_layouts=S1),
        PART,
    ),
    "a DTensor and an output": (
        Double,
        PrepareModuleInputOutput(**PREPARED, output_layouts=R, desired_output_layouts=S1),
        as_dtensor(S0),
    ),
}
"""Modules, their plans, and their inputs, of which each rank has four rows of six features."""
KEYWORDS: dict[str, Any] = {"input_kwarg_layouts": {"y": S1}, "desired_input_kwarg_layouts": {"y": R}}
EMBEDDINGS: dict[str, tuple[int, Plan]] = {
    "columns made whole": (8, ColwiseParallel(output_layouts=R)),
    "rows": (8, RowwiseParallel(input_layouts=R)),
    "uneven rows": (7, RowwiseParallel(input_layouts=R)),
    "rows to a sequence": (8, RowwiseParallel(input_layouts=R, output_layouts=S0)),
    "uneven rows to columns": (7, RowwiseParallel(input_layouts=R, output_layouts=S1)),
}
"""The number of tokens of embeddings, and their plans."""


class All(nn.Module):
    """A module for each case."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        made = {f"{name}": parallelize_module(make(), mesh, plan) for name, (make, plan, _) in CASES.items()}
        embeddings = {
            name: parallelize_module(nn.Embedding(tokens, 6), mesh, plan) for name, (tokens, plan) in EMBEDDINGS.items()
        }
        self.parts, self.embeddings = nn.ModuleDict(made), nn.ModuleDict(embeddings)
        prepared = PrepareModuleInput(**PREPARED, **KEYWORDS)
        self.named = parallelize_module(Double(), mesh, prepared)
        for key, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                rank = mesh.get_local_rank() if any(p.is_shard() for p in getattr(parameter, "placements", ())) else 0
                local.copy_(dyadic(*local.shape, key=(key, rank), dtype=torch.float32, span=2))

    def forward(self, xs: dict[str, Any], tokens: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """Return the output of each module."""
        results = {name: part(xs[name]) for name, part in self.parts.items()}
        results |= {f"embedding, {name}": part(tokens) for name, part in self.embeddings.items()}
        results["by keyword"] = self.named(xs["an input"], y=y)
        return results


def given(rank: Rank, mesh: Any, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the local parts of inputs, and the inputs; ranks have the same part if it is the whole."""
    leaves: dict[str, torch.Tensor] = {}
    for name, (_, _, (layout, _)) in CASES.items():
        x = dyadic(4, 6, key=(name, step, 0 if layout == R else rank.index), dtype=torch.float32)
        leaves[name] = x.to(rank.device).requires_grad_()
    dtensors = {n: DTensor.from_local(x, mesh, [CASES[n][2][0]]) for n, x in leaves.items() if CASES[n][2][1]}
    return leaves, leaves | dtensors


def local(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor, and any other tensor as it is."""
    part: torch.Tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor) + 0
    return part.detach()


@requirement(
    "DYN-TP-02",
    "A module that is parallelized by any style, with any layouts, is compiled into one graph.",
    source="torch.distributed.tensor.parallel; torch.compile: fullgraph",
)
@requirement(
    "DYN-TP-03",
    "A compiled module that is parallelized by any style has the outputs of the uncompiled one, in the same layouts.",
    source="torch.distributed.tensor.parallel; torch.compile",
)
@requirement(
    "DYN-TP-04",
    "A compiled module that is parallelized by any style has the gradients of the uncompiled one.",
    source="torch.distributed.tensor.parallel; torch.compile",
)
@pytest.mark.world(2)
def test_styles(world: World) -> None:
    """Compile modules of all styles and layouts together; compare outputs and gradients of two steps."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        model = All(mesh).to(rank.device)
        compiled, counter = dynamo.compiled(model)
        for step in range(2):
            tokens = (torch.arange(8, device=rank.device).view(2, 4) + step) % 7
            y = dyadic(8, 3, key=("y", step, rank.index), dtype=torch.float32).to(rank.device)
            results = []
            for run in (model, compiled):
                leaves, xs = given(rank, mesh, step)
                ys = run(xs, tokens, y)
                total = torch.zeros((), device=rank.device)
                for name, out in ys.items():
                    part = out.to_local() if isinstance(out, DTensor) else out
                    weight = dyadic(*part.shape, key=("w", name), dtype=torch.float32, span=2).to(rank.device)
                    total = total + (part * weight).sum()
                total.backward()
                gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
                gradients |= {f"input of {name}": x.grad for name, x in leaves.items() if x.grad is not None}
                model.zero_grad()
                results.append((ys, gradients))
            (rights, right_gradients), (founds, found_gradients) = results
            for name, right in rights.items():
                found = founds[name]
                what = f"{name}, step {step}"
                assert getattr(found, "placements", None) == getattr(right, "placements", None), what
                assert_same(local(right), local(found), what)
            assert right_gradients.keys() == found_gradients.keys()
            assert len(right_gradients) == len(list(model.parameters())) + len(CASES)
            for name, gradient in right_gradients.items():
                assert_same(gradient, found_gradients[name], f"gradient of {name}, step {step}")
        assert counter.graphs == 1

    world.run(body)
