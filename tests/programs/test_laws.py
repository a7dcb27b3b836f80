"""Each law holds on healthy ranks, and does not on ranks that break it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import Rank
from harness.programs import execute
from harness.programs.check import Different
from harness.programs.laws import LAWS, assert_law
from harness.programs.spec import Layout, Linear, Model, Optimizer, Program, Step
from tests.programs.damaged import Damaged, unreduced

MODEL = Model((3,), (Linear(4), Linear(2)))
PLAIN = Program(MODEL, steps=(Step(rows=(4,), reload=True),), optimizer=Optimizer(momentum=0.5))
WRAPPED = Program(MODEL, Layout("replicate_fsdp", wrapped=("linear0",)), PLAIN.steps, PLAIN.optimizer)


def healthy(rank: Rank) -> None:
    """Nothing."""


def last_micro_batch_only(rank: Rank) -> None:
    """Gradients are forgotten before each backward."""
    plain = torch.Tensor.__dict__.get("_undamaged", torch.Tensor.backward)

    def backward(self: torch.Tensor, *args: Any, **options: Any) -> None:
        for tensor in _parameters:
            tensor.grad = None
        plain(self, *args, **options)

    _parameters: list[torch.Tensor] = []
    torch.Tensor.backward, torch.Tensor._undamaged = backward, plain  # type: ignore[method-assign,attr-defined]
    made = execute.training.replicate_ddp

    def replicate(model: torch.nn.Module, **options: Any) -> Any:
        _parameters.extend(model.parameters())
        return made(model, **options)

    execute.training.replicate_ddp = replicate  # type: ignore[assignment]


def loads_nothing(rank: Rank) -> None:
    """Optimizers forget what they are given."""
    torch.optim.Optimizer.load_state_dict = lambda self, state: None  # type: ignore[method-assign,assignment]


def wrapped_layers_stand_still(rank: Rank) -> None:
    """What is wrapped on its own is not trained."""
    plain = execute.training.replicate_fsdp

    @functools.wraps(plain)  # its signature is looked at
    def replicate(module: torch.nn.Module, **options: Any) -> Any:
        if isinstance(module, torch.nn.Linear):
            module.requires_grad_(False)
        return plain(module, **options)

    execute.training.replicate_fsdp = replicate  # type: ignore[assignment]


DAMAGES: dict[str, tuple[Callable[[Rank], None], Program]] = {
    "permuted": (unreduced, PLAIN),
    "spread": (unreduced, PLAIN),
    "accumulated": (last_micro_batch_only, PLAIN),
    "unwrapped": (wrapped_layers_stand_still, WRAPPED),
    "never-saved": (loads_nothing, Program(MODEL, steps=PLAIN.steps * 2, optimizer=PLAIN.optimizer)),
}


@pytest.mark.parametrize("law", LAWS)
def test_law(law: str) -> None:
    """Quiet on healthy ranks; on damaged ones it says which law is broken, and by which number."""
    damage, program = DAMAGES[law]
    for do, broken in ((healthy, False), (damage, True)):
        worlds = Damaged(do)
        try:
            if broken:
                with pytest.raises(Different, match=f"the law '{law}' does not hold\nstep"):
                    assert_law(worlds, program, law)
            else:
                assert_law(worlds, program, law)
        finally:
            worlds.close()
