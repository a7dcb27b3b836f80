"""Parameters that compiled code changes without autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks import dynamo


def _without_mode(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(2)


CHANGES: dict[str, list[Callable[[torch.Tensor], object]]] = {
    "no_grad": [_without_mode],
    "detach": [lambda p: p.detach().mul_(2), lambda p: p.data.mul_(2), lambda p: dist.all_reduce(p.detach())],
}
"""Ways to change a parameter, of which autograd hears nothing."""


@requirement(
    "DYN-GRAD-6752",
    "A parameter that compiled code changes without autograd has no gradient, if it has none uncompiled.",
    source="torch.optim.Optimizer.zero_grad: optimizers 'have a different behavior if the gradient is 0 or None'",
)
@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.world(2)
def test_no_gradient(world: World, way: str) -> None:
    """Change a parameter, and take the gradient of a loss to which it is a constant."""

    def body(rank: Rank) -> None:
        for change in CHANGES[way]:

            def step(
                w: torch.Tensor, p: torch.Tensor, change: Callable[[torch.Tensor], object] = change
            ) -> torch.Tensor:
                change(p)
                return (w * p.detach()).sum()

            p = torch.nn.Parameter(torch.ones(2, device=rank.device))
            w = torch.ones(2, device=rank.device, requires_grad=True)
            dynamo.compiled(step, backend="aot_eager")[0](w, p).backward()
            assert w.grad is not None
            assert [w.grad.tolist(), p.tolist()] == [[2.0, 2.0]] * 2
            assert p.grad is None, f"a gradient of {p.grad.tolist()}"

    world.run(body)
