"""A backward through derivatives of a managed module, as a gradient penalty needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.limit import runs_with


class Square(nn.Module):
    """The square of the input times a weight, whose derivative is twice the input times the square of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight) ** 2


def graph(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Keep the graph of a gradient."""
    x.requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def function(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Differentiate a function of the input."""
    result: torch.Tensor = torch.func.grad(lambda x: model(x).sum())(x)
    return result


def function_of_leaf(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Differentiate a function of an input that requires a gradient, too."""
    return function(model, x.requires_grad_())


def forward_mode(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Differentiate along with the forward."""
    result: torch.Tensor = torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
    return result


DERIVATIVES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "graph": graph,
    "function": function,
    "function of a leaf": function_of_leaf,
    "forward mode": forward_mode,
}


@requirement(
    "RFSDP-FUNC-4602",
    "A backward through derivatives of a managed module, with respect to its input, averages one device's gradients.",
    source="torch.autograd.grad: create_graph; torch.func: grad, jvp; torch.distributed.fsdp.fully_shard; "
    "pytorch/pytorch#172543",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, hooks of managed modules take no part in torch.func")
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("kept", [False, True], ids=["resharded", "kept"])
@pytest.mark.world(2)
def test_backward_of_derivatives(world: World, kept: bool, derivative: str) -> None:
    """Shard a module whose parameters the first backward frees or keeps, and train on the sum of derivatives."""

    def body(rank: Rank) -> list[Any]:
        model = ways(rank)["sharded"](Square().to(rank.device))
        model.set_reshard_after_backward(not kept)
        x = torch.full((2,), 1.0 + rank.index, device=rank.device)
        found = DERIVATIVES[derivative](model, x)
        found.sum().backward()
        model.reshard()
        return [found.tolist(), *(g.tolist() for g in replicate_fsdp.gradients(model).values())]

    # The derivative is 2 w w x, and its own by w is 4 w x, of 1 and of 2 on the ranks.
    assert_on_ranks([[[8.0 * (1 + rank)] * 2, [12.0] * 2] for rank in range(2)], world.run(body))
