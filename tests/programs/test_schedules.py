"""What a step may have besides micro-batches: each changes what it should, on one device, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from harness.programs import execute
from harness.programs.check import truth_of
from harness.programs.laws import _differences
from harness.programs.source import source
from harness.specs.program import (
    Checkpointed,
    Layer,
    Linear,
    Model,
    Norm,
    Optimizer,
    Program,
    Step,
)
from harness.stacks.seen import Seen

_with = msgspec.structs.replace
STEPS = (Step(rows=(2, 2)), Step(rows=(3,)))
PLAIN = Program(Model((3,), (Linear(3), Linear(2))), steps=STEPS)
NORMED = _with(PLAIN, model=Model((3,), (Linear(3), Norm("batch"), Linear(2))))


def different(one: Program, other: Program) -> set[str]:
    """The kinds of what two programs see and is not the same."""
    first, second = execute.alone(one)(), execute.alone(other)()
    return {
        seen.kind
        for seen in {**first, **second}
        if seen not in first or seen not in second or not torch.equal(first[seen], second[seen])
    }


def steps(program: Program, **changes: Any) -> Program:
    """The same program with changes of its first step."""
    return _with(program, steps=(_with(program.steps[0], **changes), *program.steps[1:]))


LATER = {"parameter", "output", "losses", "gradient"}
"""What a change in the first optimizer step changes."""


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        (PLAIN, steps(PLAIN, clip_values=0.25), LATER),
        (PLAIN, steps(PLAIN, clip_values=1e6), set()),
        (PLAIN, steps(PLAIN, averaged=True), {"averaged"}),
        (PLAIN, steps(PLAIN, abandoned="loss"), set()),
        (PLAIN, steps(PLAIN, abandoned="layer"), set()),
        (NORMED, steps(NORMED, abandoned="loss"), {"buffer"}),
        (NORMED, steps(NORMED, abandoned="layer"), {"buffer"}),
        (PLAIN, _with(PLAIN, optimizer=Optimizer(decay=0.5)), {"parameter"}),  # of the second step
        (PLAIN, _with(PLAIN, optimizer=Optimizer(form="foreach")), set()),
        (PLAIN, _with(PLAIN, optimizer=Optimizer(form="fused")), set()),
    ],
    ids=[
        "clipped by value",
        "not clipped",
        "averaged",
        "loss not used",
        "interrupted",
        "statistics of what was not used",
        "statistics before the interruption",
        "slower rate",
        "lists",
        "one operation",
    ],
)
def test_what_changes(one: Program, other: Program, kinds: set[str]) -> None:
    """A step's addition changes only what it is about."""
    assert different(one, other) == kinds


def test_average() -> None:
    """The average is the first step's parameters at first, and then moves half of the way to those of each step."""
    program = _with(PLAIN, steps=tuple(_with(step, averaged=True, rows=(1,)) for step in STEPS))
    program = _with(program, model=Model((1,), (Linear(1, bias=False),)))
    seen = execute.alone(program)()
    weights = [float(seen[Seen("parameter", "linear0.weight", step=step)]) for step in (0, 1)]
    before = float(execute.functions(program)["build"](execute.training.Party()).linear0.weight)
    assert len({before, *weights}) == 3
    outputs = [float(seen[Seen("averaged", step=step)].detach()) for step in (0, 1)]
    assert outputs[1] / outputs[0] != weights[1] / weights[0]
    inputs = [outputs[0] / weights[0], outputs[1] / ((weights[0] + weights[1]) / 2)]
    assert [abs(value) in (0.5, 1.0) for value in inputs] == [True, True]  # what data are made of


@pytest.mark.parametrize("layer", [Linear(3), Linear(3, bias=False)], ids=["bias", "weight"])
def test_checkpointed(layer: Layer) -> None:
    """A layer's forward runs again in the backward, and its gradients are those that it has otherwise."""
    program = Program(Model((3,), (Checkpointed(layer), Linear(2))), steps=STEPS)
    assert "Checkpointed(nn.Linear(3, 3" in source(program)
    calls = []
    model = execute.functions(program)["build"](execute.training.Party())
    inner = model.checkpointed0.get_submodule("0")
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    x = torch.ones(1, 3, dtype=torch.float64)
    model(x, 0).sum().backward()
    assert len(calls) == 2
    expected = torch.autograd.grad(model.linear1(inner(x)).sum(), inner.weight)
    assert torch.equal(inner.weight.grad, expected[0])


def test_exact() -> None:
    """All of it together is still proven exact where numbers are small, so that bits are compared."""
    program = _with(
        PLAIN,
        optimizer=Optimizer(decay=0.5, form="foreach"),
        steps=(Step(rows=(2, 2), clip_values=0.5, abandoned="layer", averaged=True), Step(rows=(2,))),
        span=1,
        denominator=1,
    )
    assert truth_of(program).exact


def test_rounded_lists() -> None:
    """Tolerances are known for an optimizer that updates lists of parameters."""
    program = _with(PLAIN, optimizer=Optimizer("adamw", 0.01, form="foreach"), dtype="float32", span=0, denominator=1)
    bounded = truth_of(program).bounded
    assert bounded is not None
    assert all(bool(tolerance.isfinite().all()) for tolerance in bounded.tolerance.values())


def test_laws_leave_averages_alone() -> None:
    """An output with averaged parameters is of one rank's rows, which differ between the runs of a law."""
    kept, averaged = Seen("parameter", "a", step=0), Seen("averaged", step=0)
    one, other = torch.ones(2), torch.zeros(3)
    assert list(_differences({kept: one, averaged: one}, {kept: one, averaged: other})) == []
    assert [p.what for p in _differences({kept: one}, {kept: one + 1})] == [kept]
