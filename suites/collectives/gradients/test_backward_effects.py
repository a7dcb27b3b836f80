"""What a differentiable collective keeps for its backward, and what the backward changes and launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from harness import Rank, World, assert_same, requirement
from harness.stacks.collectives import functional
from suites.collectives.arguments.test_buffers import assert_freed
from suites.collectives.gradients.test_gradient_modes import BOTH, data, each

TRANSPOSED = {
    "all_reduce-sum": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_gather_single_autograd": "reduce_scatter_tensor",
    "all_gather_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_autograd": "all_gather_into_tensor",
    "reduce_scatter_single_coalesced": "all_gather_into_tensor_coalesced",
    "permute_tensor": "all_to_all_single",
}
"""The collective that is the backward of each."""


@requirement(
    "COLL-GRAD-4800",
    "The backward of a collective leaves the gradient that it is given unchanged, which other branches may share.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.autograd.backward",
)
@BOTH
@pytest.mark.world(2)
def test_given_gradients(world: World, way: str) -> None:
    """Give contiguous gradients of each result, and look at them afterwards."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        results = call(data(name, rank).requires_grad_())
        given = [torch.full_like(out.detach(), (i + 1) * 10.0**rank.index) for i, out in enumerate(results)]
        before = [gradient.tolist() for gradient in given]
        torch.autograd.backward(results, given)
        assert [gradient.tolist() for gradient in given] == before, name
        for out in results:
            functional.wait_tensor(out.detach())  # nothing else reads it

    each(world, way, body)


@requirement(
    "COLL-FREE-4801",
    "A differentiable collective does not keep its input alive until the backward, which does not need it.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.autograd.Function",
)
@BOTH
@pytest.mark.world(2)
def test_inputs_until_backward(world: World, way: str) -> None:
    """Release the inputs of a dozen calls whose results are there, and then call one backward for all."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        x = data(name, rank).requires_grad_()
        losses: list[Any] = []

        def released() -> list[Any]:
            given = x + 1
            losses.extend(result.sum() for result in call(given))
            return [weakref.ref(given)]

        assert_freed([released() for _ in range(12)])
        sum(losses).backward()
        assert x.grad is not None, name

    each(world, way, body)


@requirement(
    "COLL-GRAD-4802",
    "The backward of a functional collective launches the transposed collective once, and no other.",
    source="torch.distributed._functional_collectives: its functions; torch.distributed.tensor.debug.CommDebugMode",
)
@pytest.mark.world(2)
def test_kinds_of_backwards(world: World) -> None:
    """Count by kind what each backward launches, of a contiguous gradient."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        x = data(name, rank).requires_grad_()
        (result,) = call(x)
        functional.wait_tensor(result.detach())
        with CommDebugMode() as mode:
            result.backward(torch.ones_like(result.detach()))
        counts = {str(kind).rpartition(".")[2]: count for kind, count in mode.get_comm_counts().items() if count}
        assert counts == {TRANSPOSED[name]: 1}, name
        assert x.grad is not None
        assert_same(torch.full(x.shape, 2.0 if "gather" in name or "all_reduce" in name else 1.0), x.grad, name)

    each(world, "functional", body)
