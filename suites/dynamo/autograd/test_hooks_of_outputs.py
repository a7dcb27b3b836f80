"""Hooks on the outputs of operations that have several of them, under compiled autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from harness import Rank, World, requirement
from harness.stacks import dynamo
from suites.dynamo.objects import summed


class Three(torch.autograd.Function):
    """Returns a tensor three times, scaled each time by another number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x * 3, x * 5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        one, two, three = gradients
        return one * 2 + two * 3 + three * 5


OPERATIONS: dict[str, Callable[[torch.Tensor], Sequence[torch.Tensor]]] = {
    "chunk": lambda x: x.chunk(3),
    "unbind": lambda x: x.view(3, 2).unbind(),
    "autograd.Function": Three.apply,  # type: ignore[dict-item]
}
"""Operations on six elements whose outputs all have gradients."""


@requirement(
    "DYN-HOOK-5000",
    "Under compiled autograd, a hook on any of an operation's outputs changes the gradient of this output alone.",
    source="torch.Tensor.register_hook; torch/_dynamo/compiled_autograd.py: tensor_pre_hook",
)
@pytest.mark.world(2)
def test_each_output(world: World) -> None:
    """Hook the second and third output of each operation; the hooks sum over ranks."""

    def trained(rank: Rank, *, compiles: bool) -> list[Any]:
        inputs = [torch.arange(6.0, device=rank.device, requires_grad=True) for _ in OPERATIONS]
        parts = []
        for x, operation in zip(inputs, OPERATIONS.values(), strict=True):
            for number, y in enumerate(operation(x * 1)):
                if number:
                    y.register_hook(lambda g, number=number: summed(g) * number)
                parts.append((y * (3.0**number + rank.index)).sum())
        loss = torch.stack(parts).sum()
        with dynamo.compiled_backward("eager") if compiles else nullcontext():
            loss.backward()
        return [None if x.grad is None else x.grad.tolist() for x in inputs]

    def body(rank: Rank) -> list[str]:
        torch.compiler.reset()
        right, found = (trained(rank, compiles=compiles) for compiles in (False, True))
        return [
            f"{name}: {one} uncompiled, {other} compiled"
            for name, one, other in zip(OPERATIONS, right, found, strict=True)
            if one != other
        ]

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
