"""Gradients through collectives: the transposed collective of the gradients.

Output i of member r is weighted with (i + 1) 10^r, so that a gradient tells by its digits whose outputs it is from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from harness import Rank, World, requirement
from harness.oracles.exact import assert_same
from harness.stacks.collectives import functional

GROUPS = pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
MODULE = ("broadcast", "gather", "scatter", "reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_single")
FUNCTIONAL = (
    "broadcast",
    "all_reduce-sum",
    "all_reduce-avg",
    "all_reduce_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "permute_tensor",
    "all_gather_single_autograd",
    "reduce_scatter_single_autograd",
)
IN_PARTS = (
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
)
"""Those whose input has a part for each member."""


def expected_gradient(name: str, member: int, size: int) -> list[float]:
    """Of each of two elements, or of each part's two elements; the first member is the root."""
    weights = [10.0**i for i in range(size)]
    parts = {
        "broadcast": [sum(weights) if member == 0 else 0],
        "gather": [weights[0] * (member + 1)],
        "scatter": weights if member == 0 else [0] * size,
        "reduce": [weights[0]],
        "reduce_scatter": weights,
        "reduce_scatter_single_autograd": weights,
        "reduce_scatter_single_coalesced": weights,
        "all_gather": [sum(weights) * (member + 1)],
        "all_gather_single_autograd": [sum(weights)],
        "all_gather_single_coalesced": [sum(weights)],
        "all_to_all": [weight * (member + 1) for weight in weights],
        "all_to_all_single": weights,
        "all_reduce": [sum(weights)],
        "all_reduce-sum": [sum(weights)],
        "all_reduce-avg": [sum(weights) / size],
        "all_reduce_coalesced": [sum(weights)],
        "permute_tensor": [weights[(member + 1) % size]],
    }
    return [part for part in parts[name] for _ in range(2)]


def through_module(name: str, x: torch.Tensor, group: Any, root: int, size: int) -> Any:
    """torch.distributed.nn.functional."""
    into, parts = torch.zeros(2), list(x.chunk(size))
    if name in ("broadcast", "gather", "reduce"):
        return getattr(differentiable, name)(x, root, group=group)
    if name == "scatter":
        return differentiable.scatter(parts, root, group)
    if name == "reduce_scatter":
        return differentiable.reduce_scatter(into, parts, group=group)
    if name == "all_to_all":
        return differentiable.all_to_all([torch.zeros(2) for _ in parts], parts, group)
    if name == "all_to_all_single":
        return differentiable.all_to_all_single(torch.zeros_like(x), x, group=group)
    return getattr(differentiable, name)(x, group=group)


def through_functional(name: str, x: torch.Tensor, group: Any, root: int, size: int) -> Any:
    """torch.distributed._functional_collectives."""
    name, _, op = name.partition("-")
    if name == "broadcast":
        return functional.broadcast(x, 0, group)
    if name == "all_reduce":
        return functional.all_reduce(x, op, group)
    if name == "all_reduce_coalesced":
        return functional.all_reduce_coalesced([x], "sum", group)[0]
    if name == "all_gather_single_coalesced":
        return functional.all_gather_single_coalesced([x], group)[0]
    if name == "reduce_scatter_single_coalesced":
        return functional.reduce_scatter_single_coalesced([x], "sum", [0], group)[0]
    if name == "all_gather_single_autograd":
        return functional.all_gather_single_autograd(x, 0, group)
    if name == "reduce_scatter_single_autograd":
        return functional.reduce_scatter_single_autograd(x, "sum", 0, group)
    return functional.permute_tensor(x, [*range(1, size), 0], group)


def assert_gradients(world: World, name: str, ranks: tuple[int, ...], through: Any) -> None:
    """Every member's gradient, against the table."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        x = torch.arange(2.0 * (size if name in IN_PARTS else 1)).requires_grad_()
        found = through(name, x, group, ranks[0], size)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        sum((out * (i + 1) * 10**member).sum() for i, out in enumerate(found)).backward()
        assert x.grad is not None
        assert_same(torch.tensor(expected_gradient(name, member, size), dtype=torch.float32), x.grad, "gradient")

    world.run(body)


@requirement(
    "COLL-GRAD-01",
    "The gradient of a differentiable collective is the transposed collective of the gradients, in subgroups too.",
    source="torch.distributed.nn.functional: broadcast, gather, scatter, reduce, reduce_scatter, all_gather, "
    "all_to_all, all_to_all_single, all_reduce",
)
@GROUPS
@pytest.mark.parametrize("name", [*MODULE, "all_reduce"])
@pytest.mark.world(3)
def test_differentiable(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """The first member is the root."""
    assert_gradients(world, name, ranks, through_module)


@requirement(
    "COLL-GRAD-02",
    "The gradient of a functional collective is the transposed collective of the gradients, in subgroups too.",
    source="torch.distributed._functional_collectives: broadcast, all_reduce, all_reduce_coalesced, "
    "all_gather_single_coalesced, reduce_scatter_single_coalesced, permute_tensor, all_gather_single_autograd, "
    "reduce_scatter_single_autograd; pytorch/pytorch#190007",
)
@GROUPS
@pytest.mark.parametrize("name", FUNCTIONAL)
@pytest.mark.world(3)
def test_functional(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """The first member is the root."""
    assert_gradients(world, name, ranks, through_functional)
