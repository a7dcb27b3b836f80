"""Stacks that put the optimizer on ranks, too, and stacks that take few dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from harness.programs import execute
from harness.programs.source import source
from harness.programs.strategies import programs
from harness.specs.program import Layout, Linear, Model, Program, Step
from harness.stacks import registry, training
from harness.stacks.limit import Limit
from harness.stacks.stack import Stack

PROGRAM = Program(Model((2,), (Linear(2),)), Layout("counting", world=1), (Step(), Step()))


class Counted:
    """An optimizer that counts its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.steps = optimizer, 0
        self.state, self.zero_grad = optimizer.state, optimizer.zero_grad

    def step(self) -> None:
        self.steps += 1
        self.inner.step()


class Counting(training.Handle):
    """A handle that puts a counter around the optimizer."""

    made: list[Counted] = []

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        self.made.append(Counted(optimizer))
        return self.made[-1]


def on_counting(party: training.Party, model: nn.Module, wrapped: list[str]) -> nn.Module:
    party.model, party.handle = model, Counting()
    return model


def of(monkeypatch: pytest.MonkeyPatch, *limits: Limit) -> None:
    """Register a stack whose handle wraps the optimizer."""
    stack = Stack("counting", on_counting, handle=Counting, limits=limits)
    every = registry.stack
    chosen = lambda name: stack if name == "counting" else every(name)  # noqa: E731  one of several
    monkeypatch.setattr(registry, "stack", chosen)


def test_optimizer_of_the_stack_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks call what the handle returns instead of the optimizer, and the single device calls the optimizer."""
    of(monkeypatch)
    monkeypatch.setattr(Counting, "made", [])
    names = execute.functions(PROGRAM)
    alone, rank = training.Party(), training.Party()
    expected = names["train"](alone, names["build"](alone))
    assert Counting.made == []
    found = names["train"](rank, names["distribute"](rank, names["build"](rank)))
    assert [counted.steps for counted in Counting.made] == [2]
    assert all(torch.equal(expected[seen], found[seen]) for seen in expected)


def test_source_of_other_stacks_is_as_before() -> None:
    """A stack that leaves the optimizer alone has no line for it."""
    program = Program(Model((2,), (Linear(2),)), Layout("replicate", world=1), (Step(),))
    assert "with_optimizer" not in source(program)


def test_dtypes_that_limits_forbid_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack that takes only float32 has programs, all in float32."""
    of(monkeypatch, Limit("Only float32.", lambda case: case.dtype != "float32"))
    drawn: set[str] = set()

    @settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
    @given(program=programs("counting", (1,)))
    def draw(program: Program) -> None:
        drawn.add(program.dtype)

    draw()
    assert drawn == {"float32"}


def test_no_dtype_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack whose limits forbid every dtype is an error that names the stack."""
    of(monkeypatch, Limit("Nothing.", lambda case: True))

    @settings(max_examples=1, database=None)
    @given(program=programs("counting", (1,)))
    def draw(program: Program) -> None:
        raise AssertionError(program)

    with pytest.raises(ValueError, match="the stack 'counting' takes none of the dtypes"):
        draw()
