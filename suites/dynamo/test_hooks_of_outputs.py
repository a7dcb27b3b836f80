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
    "split": lambda x: x.split([1, 2, 3]),
    "unbind": lambda x: x.view(3, 2).unbind(),
    "meshgrid": lambda x: torch.meshgrid(x[:2], x[2:4], indexing="ij"),
    "autograd.Function": Three.apply,  # type: ignore[dict-item]
}
"""Operations on six elements whose outputs all have gradients."""


@requirement(
    "DYN-HOOK-5000",
    "Under compiled autograd, a hook on any of an operation's outputs gets and changes the gradient of this output.",
    source="torch.Tensor.register_hook; torch/_dynamo/compiled_autograd.py: tensor_pre_hook",
)
@pytest.mark.world(2)
def test_each_output(world: World) -> None:
    """Hook each output alone, and all together; the hooks sum over ranks."""

    def trained(name: str, hooked: list[int], rank: Rank, *, compiles: bool) -> list[Any]:
        x = torch.arange(6.0, device=rank.device, requires_grad=True)
        seen: list[Any] = []

        def hook(g: torch.Tensor) -> torch.Tensor:
            return summed(g) * 2

        outputs = OPERATIONS[name](x * 1)
        for number in hooked:
            if number < len(outputs):
                outputs[number].register_hook(hook)
        loss = torch.stack([(y * (3.0**n + rank.index)).sum() for n, y in enumerate(outputs)]).sum()
        with dynamo.compiled_backward("eager") if compiles else nullcontext():
            loss.backward()
        assert x.grad is not None
        return [*seen, x.grad.tolist()]

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name in OPERATIONS:
            torch.compiler.reset()
            for hooked in ([0], [1], [2], [0, 1, 2]):
                right, found = (trained(name, hooked, rank, compiles=compiles) for compiles in (False, True))
                if found != right:
                    wrong.append(f"{name}, outputs {hooked}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
