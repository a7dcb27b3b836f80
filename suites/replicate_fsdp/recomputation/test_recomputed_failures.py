"""Checkpointed modules whose forward or recomputation raises an error, and what is left of it."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.dynamo import checkpointed, checkpointed_in_place
from suites.replicate_fsdp.recomputation.test_recomputed import PLAIN, REENTRANT


class Interrupted(Exception):
    """What interrupts a forward."""


class Failing(nn.Module):
    """Square the product with a weight; a call whose number is ``fails`` raises an error once it has multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))
        self.calls, self.fails = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = x * self.weight
        if self.calls == self.fails:
            raise Interrupted
        return y.square()


HOWS: dict[str, Callable[[Any], Any]] = {
    "hooks": checkpointed_in_place,
    "wrapper": checkpointed,
    "around": lambda module: functools.partial(PLAIN, module),
    "reentrant": lambda module: functools.partial(REENTRANT, module),
}


@requirement(
    "RFSDP-CKPT-4107",
    "After a checkpointed module's forward or recomputation raised an error, it trains as before.",
    source="torch.utils.checkpoint.checkpoint; torch/distributed/_composable/checkpoint_activation.py: 'in case of "
    "exception in fwd pass'; torch.distributed.fsdp.FSDPModule.reset_iter_state",
)
@requirement(
    "RFSDP-CKPT-4108",
    "A checkpointed module whose forward raised an error keeps neither its input nor hooks on what others save.",
    source="torch/distributed/_composable/checkpoint_activation.py: 'Ensure that we no longer hold on to the "
    "generator'; torch.autograd.graph.saved_tensors_hooks",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.world(2)
def test_after_an_error(world: World) -> None:
    """Checkpoint in each way, managed or not; the first forward raises, or its recomputation; then train."""

    def body(rank: Rank) -> None:
        every: dict[str, Callable[..., Any]] = {"alone": lambda module: module, **ways(rank)}
        for way, manage in every.items():
            for how, checkpoint in HOWS.items():
                for fails in 1, 2:
                    what = f"{way}, {how}, call {fails} fails"
                    module: Any = Failing().to(rank.device)
                    model = checkpoint(module)
                    manage(module)
                    train(rank, model, what)
                    module.zero_grad()
                    module.calls, module.fails = 0, fails
                    x = torch.full((4,), 5.0, device=rank.device, requires_grad=True)
                    with pytest.raises(Interrupted):
                        model(x).sum().backward()
                    kept = weakref.ref(x)
                    del x
                    if kept() is not None:
                        gc.collect()  # the frames of the error may be in cycles
                    assert (way, fails) != ("alone", 1) or kept() is None, f"{what}: the input is kept"
                    weight = torch.full((2,), 3.0, requires_grad=True)
                    square = weight * weight
                    assert square.grad_fn._saved_self is weight, f"{what}: hooks change what others save"  # type: ignore[union-attr]
                    if way != "alone":
                        module.reset_iter_state()
                    train(rank, model, what)
                    value = 2 * 3.0 * (2.5 if way != "alone" else (1.0 + rank.index) ** 2)  # of 1 and of 4
                    (gradient,) = replicate_fsdp.gradients(module).values()
                    assert gradient.tolist() == [value] * 4, f"{what}: {gradient}"

    def train(rank: Rank, model: Any, what: str) -> None:
        """Run a step on 1 or 2, and check the gradient of the input."""
        x = torch.full((4,), 1.0 + rank.index, device=rank.device, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None, what
        assert x.grad.tolist() == [2 * 9.0 * (1.0 + rank.index)] * 4, what

    world.run(body)
