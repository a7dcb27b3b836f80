"""Results of an autograd.Function that are marked in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import World, requirement
from suites.dynamo.objects import summed, unlike


class New(torch.autograd.Function):
    """Gives twice its first argument, and a new tensor without gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x * 2, signs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_signs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


class Given(torch.autograd.Function):
    """Gives twice its first argument, and the second as it is, without gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.mark_non_differentiable(mask)
        return x * 2, mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


@requirement(
    "DYN-FUNCTION-3764",
    "A result of an autograd.Function that mark_non_differentiable was told of requires no gradient in compiled code, "
    "be it new or given.",
    source="torch.autograd.function.FunctionCtx.mark_non_differentiable: 'Mark outputs as non-differentiable'",
)
@pytest.mark.parametrize("function", [New, Given], ids=["new", "given"])
@pytest.mark.world(2)
def test_marked(world: World, function: Any) -> None:
    """Ask the results of a function of a weight and a mask whether they require gradients, beside a sum over ranks."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        results = function.apply(x.clone().requires_grad_(), torch.ones_like(x))
        return summed(x), [result.requires_grad for result in results]

    for wrong in world.run(lambda rank: unlike(rank, {"function": (step, ())})):
        assert not wrong, "\n".join(wrong)
