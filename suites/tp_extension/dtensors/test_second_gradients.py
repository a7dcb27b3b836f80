"""Gradients of gradients through conversions of DTensors, and gradients that do not come."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

SINCE = pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, conversions cut gradients off from their graph")
PLACEMENTS = (Shard(0), Shard(1), Replicate())
Way = Callable[[torch.Tensor, Any], torch.Tensor]

WAYS: dict[str, Way] = {
    "to_local": lambda x, mesh: x.to_local(),
    "to shards": lambda x, mesh: x.redistribute(placements=[Shard(0)]),
    "to other shards": lambda x, mesh: x.redistribute(placements=[Shard(1)]),
    "to replicas": lambda x, mesh: x.redistribute(placements=[Replicate()]),
    "there and back": lambda x, mesh: DTensor.from_local(
        x.to_local(), mesh, x.placements, run_check=False
    ).redistribute(placements=[Replicate()]),
}
"""Conversions of a DTensor on a mesh."""


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@requirement(
    "TP-SECOND-01",
    "Conversions of DTensors can be differentiated twice, with the second gradients of plain tensors.",
    source="torch.distributed.tensor.DTensor: to_local, full_tensor, redistribute, from_local; torch.autograd.grad: "
    "create_graph",
)
@SINCE
@pytest.mark.world(2)
def test_twice(world: World) -> None:
    """The loss is the sum of cubes; the second loss is the sum of the squares of its gradient."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        whole = torch.arange(1.0, 17.0, device=rank.device).reshape(4, 4)
        right = 36 * whole**3  # of (3 x^2)^2
        for placement, (name, way) in itertools.product(PLACEMENTS, WAYS.items()):
            if name == "to_local" and placement == Replicate():
                continue  # what the gradient of a local tensor is, its placement alone does not say
            x = distribute_tensor(whole, mesh, [placement]).requires_grad_()
            (first,) = torch.autograd.grad(plain((way(x, mesh) ** 3).sum()), x, create_graph=True)
            (second,) = torch.autograd.grad(plain((first**2).sum()), x)
            if not torch.allclose(plain(second), right):
                wrong.append(f"{name} of {placement}: {plain(second).tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


class Stop(torch.autograd.Function):
    """Passes a tensor on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:  # type: ignore[override]
        """Give none."""


@requirement(
    "TP-SECOND-02",
    "A conversion of a DTensor to which no gradient comes back gives its input none, as on one device.",
    source="torch.distributed.tensor.DTensor: to_local, from_local, redistribute; torch.autograd.Function",
)
@SINCE
@pytest.mark.parametrize("way", ["to_local", "from_local"])
@pytest.mark.world(2)
def test_none(world: World, way: str) -> None:
    """A function behind the conversion returns no gradient."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for placement in (*PLACEMENTS, Partial()):
            if way == "from_local":
                x: Any = torch.ones(4, 4, device=rank.device).requires_grad_()
                y: Any = DTensor.from_local(x, mesh, [placement], run_check=False)
            else:
                x = DTensor.from_local(torch.ones(4, 4, device=rank.device), mesh, [placement], run_check=False)
                x = x.detach().requires_grad_()
                y = x.to_local()
            passed = Stop.apply(y)
            (passed.to_local() if isinstance(passed, DTensor) else passed).sum().backward()
            if x.grad is not None:
                wrong.append(f"{placement}: {x.grad}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-SECOND-3500",
    "The zeros that autograd.grad materializes for a DTensor are placed as it, and require a gradient only if a graph "
    "is created.",
    source="torch.autograd.grad: materialize_grads, create_graph; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_materialized(world: World) -> None:
    """Differentiate by a tensor that the output uses and by one that it does not, plain or placed."""

    def body(rank: Rank) -> None:
        whole = torch.arange(1.0, 17.0, device=rank.device).reshape(4, 4)
        for placement, graph in itertools.product((None, *PLACEMENTS), (False, True)):
            tensors = [whole if placement is None else distribute_tensor(whole, rank.mesh(), [placement])] * 2
            used, unused = (tensor.clone().requires_grad_() for tensor in tensors)
            output = plain((used**3).sum())
            found = torch.autograd.grad(output, (used, unused), create_graph=graph, materialize_grads=True)
            what = f"{placement}, {graph=}"
            assert [gradient.requires_grad for gradient in found] == [graph, graph], what
            for gradient, right in zip(found, (3 * whole**2, torch.zeros_like(whole)), strict=True):
                assert torch.equal(plain(gradient), right), what
                assert isinstance(gradient, DTensor) == (placement is not None), what
            if isinstance(found[1], DTensor):
                assert found[1].placements == (placement,), what

    world.run(body)
