"""Begin a program in one world and finish it in another: the whole state moves from the first to the second."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from harness.programs import execute, prelude
from harness.programs.execute import Tensors
from harness.specs.program import Program
from harness.stacks import training
from harness.worlds.rank import Rank

State = tuple[dict[str, Any], dict[str, Any]]
"""Whole state dicts of model and optimizer, with tensors on the CPU."""


def begin(rank: Rank, program: Program, steps: int) -> State:
    """Execute the first ``steps`` steps, and return the state after them."""
    kept: list[State] = []

    class Beginning(prelude.Run):
        """A run that does nothing after the last of the steps."""

        over = False

        def backward(self, model: Any, rows: int, **how: Any) -> None:
            if not self.over:
                super().backward(model, rows, **how)

        def evaluate(self, model: Any, rows: int) -> None:
            if not self.over:
                super().evaluate(model, rows)

        def abandon(self, model: Any, rows: int, **how: Any) -> None:
            if not self.over:
                super().abandon(model, rows, **how)

        def average(self, number: int, model: Any, rows: int) -> None:
            pass

        def step(self, number: int, model: Any, optimizer: torch.optim.Optimizer, **how: Any) -> None:
            if not self.over:
                super().step(number, model, optimizer, **how)
            if number == steps - 1:
                kept.append(save(self.party, model, optimizer))
                self.over = True

        def reload(self, number: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
            pass

    _train(rank, program, Beginning)
    return kept[0]


def finish(rank: Rank, program: Program, steps: int, state: State) -> Tensors:
    """Load a state, execute what comes after the first ``steps`` steps, and return what was seen."""

    class End(prelude.Run):
        """A run that does nothing before the end of the last of the steps."""

        begun = False

        def backward(self, model: Any, rows: int, **how: Any) -> None:
            if self.begun:
                super().backward(model, rows, **how)
            else:
                self.turn += 1

        def evaluate(self, model: Any, rows: int) -> None:
            if self.begun:
                super().evaluate(model, rows)

        def abandon(self, model: Any, rows: int, **how: Any) -> None:
            if self.begun:
                super().abandon(model, rows, **how)

        def average(self, number: int, model: Any, rows: int) -> None:
            pass

        def step(self, number: int, model: Any, optimizer: torch.optim.Optimizer, **how: Any) -> None:
            if self.begun:
                super().step(number, model, optimizer, **how)
            elif number == steps - 1:
                load(self.party, model, optimizer, state)
                self.begun = True

        def reload(self, number: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
            pass

    return _train(rank, program, End)


def _train(rank: Rank, program: Program, run: type[prelude.Run]) -> Tensors:
    names = execute.functions(program)
    names["Run"] = run
    party = execute.party(rank, program)
    build: Callable[..., Any] = names["build"]
    try:
        seen: Tensors = names["train"](party, names["distribute"](party, build(party)))
    finally:
        training.clean_up(rank.device)
    return seen


def save(party: training.Party, model: Any, optimizer: torch.optim.Optimizer) -> State:
    """Return the whole state of model and optimizer, on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = get_state_dict(party.root(model), optimizer, options=StateDictOptions(full_state_dict=True))
    return training.copied(states[0], "cpu"), training.copied(states[1], "cpu")


def load(party: training.Party, model: Any, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load the state that :func:`save` returned."""
    model_state, optimizer_state = (training.copied(part) for part in state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not optimizer_state.get("state"):  # docs/findings/stateless_optimizer.py
            set_model_state_dict(party.root(model), model_state, options=StateDictOptions(full_state_dict=True))
            return
        set_state_dict(
            party.root(model),
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=StateDictOptions(full_state_dict=True),
        )


__all__ = ["begin", "finish"]
