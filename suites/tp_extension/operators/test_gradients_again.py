"""Gradients of operators on DTensors that are called again with other sizes or numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from fixtures.operators import close, distributed, floats
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
A = floats(5, 7)


def _tokens(x: Any, *shape: int) -> Any:
    """Return positions of the first three rows."""
    return x[: shape[0], : shape[1]].abs().long() % 3


AGAIN: dict[str, dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]]] = {
    "sizes": {
        "rows of an embedding": (lambda x, a: functional.embedding(_tokens(x, 3, 2), x[:a]), (3, 5, 4)),
        "width of an embedding": (lambda x, a: functional.embedding(_tokens(x, 3, 2), x[:, :a]), (3, 7, 5)),
        "slice of columns": (lambda x, a: x[:, :a][:, :2], (3, 7, 5)),
        "slice of rows": (lambda x, a: x[:a][:2], (3, 5, 4)),
        "positions": (lambda x, a: x[:a][_tokens(x, 3, 1)[:, 0]], (3, 5, 4)),
        "index_select": (lambda x, a: x[:, :a].index_select(1, _tokens(x, 1, 4)[0]), (3, 7, 4)),
        "expand": (lambda x, a: x.unsqueeze(0).expand(a, 5, 7).sum(0), (2, 3)),
        "repeat": (lambda x, a: x.repeat(a, 1).sum(0), (2, 3)),
        "interpolate": (lambda x, a: functional.interpolate(x[None, None, :, :a], size=(6, 6)), (3, 7, 5)),
        "max_pool2d": (lambda x, a: functional.max_pool2d(x[None, None, :, :a], 2, ceil_mode=True), (5, 6)),
        "nll_loss": (
            lambda x, a: functional.nll_loss(x[:, :a], _tokens(x, 5, 1)[:, 0], reduction="sum"),
            (3, 7, 5),
        ),
        "diagonal": (lambda x, a: x[:, :a].diagonal(), (5, 7, 6)),
        "topk": (lambda x, a: x[:, :a].topk(2, 1).values, (3, 7, 5)),
        "kthvalue": (lambda x, a: x[:, :a].kthvalue(2, 1).values, (3, 7, 5)),
        "max": (lambda x, a: x[:, :a].max(1).values, (3, 7, 5)),
        "sum": (lambda x, a: x[:, :a].sum(1), (3, 7, 5)),
        "mean": (lambda x, a: x[:, :a].mean(1), (3, 7, 5)),
        "std": (lambda x, a: x[:, :a].std(1), (3, 7, 5)),
        "cat": (lambda x, a: torch.cat([x[:, :a], x[:, a:]], 1), (3, 5)),
        "view": (lambda x, a: x.view(a), ((5, 7), (5, 1, 7))),
    },
    "numbers": {
        "padding of an embedding": (
            lambda x, a: functional.embedding(_tokens(x, 3, 2), x, padding_idx=a),
            (None, 0, 1, 2),
        ),
        "counts of an embedding": (
            lambda x, a: functional.embedding(_tokens(x, 3, 2), x, scale_grad_by_freq=a),
            (False, True),
        ),
        "start of a slice": (lambda x, a: x[:, a : a + 2], (0, 2, 5)),
        "offset of a diagonal": (lambda x, a: x.diagonal(a), (0, 1, 2)),
        "pad": (functional.pad, ((1, 1), (0, 2), (2, 0))),
        "roll": (lambda x, a: x.roll(a, 1), (1, 2)),
        "tril": (torch.tril, (0, 1)),
        "stack": (lambda x, a: torch.stack([x, x], a), (0, 1, 2)),
        "softmax": (lambda x, a: x.softmax(a), (0, 1)),
        "log_softmax": (lambda x, a: x.log_softmax(a), (0, 1)),
        "logsumexp": (lambda x, a: x.logsumexp(a), (0, 1)),
        "vector_norm": (torch.linalg.vector_norm, (1, 2, 3)),
        "layer_norm": (lambda x, a: functional.layer_norm(x, (7,), eps=a), (1e-5, 1.0)),
        "gelu": (lambda x, a: functional.gelu(x, approximate=a), ("none", "tanh")),
        "leaky_relu": (functional.leaky_relu, (0.5, 0.25)),
        "elu": (functional.elu, (1.0, 2.0)),
        "softplus": (functional.softplus, (1.0, 2.0)),
        "threshold": (lambda x, a: functional.threshold(x, a, 0), (1.0, 2.0)),
        "mse_loss": (lambda x, a: functional.mse_loss(x[:4, :6], x[:4, :6] * a, reduction="sum"), (2, 3)),
        "clamp": (lambda x, a: x.clamp(-a, a), (1, 2)),
        "power": (lambda x, a: x**a, (2, 3)),
        "multiple added": (lambda x, a: torch.add(x, x, alpha=a), (1, 2)),
        "lerp": (lambda x, a: torch.lerp(x, x * x, a), (0.25, 0.5)),
        "masked_fill": (lambda x, a: x.masked_fill(x > a, 0), (0, 1)),
    },
}
"""Functions of a matrix and an argument, with the argument's values, for all of which results may have one shape."""
if runs_with("<2.13"):  # which has no backward of it
    del AGAIN["sizes"]["interpolate"]


@requirement(
    "TP-AGAIN-1100",
    "The gradient of an operator that is called again on a DTensor with other numbers or sizes is that for these.",
    source=f"{SOURCE}; pytorch/pytorch#149764",
)
@pytest.mark.parametrize("kind", AGAIN)
@pytest.mark.world(2, keeps="masks of lookups, whose results are not put together")
def test_gradients_again(world: World, kind: str) -> None:
    """Give each argument in turn, and the first one again; the gradient of the result arrives replicated."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for layout, (name, (operator, arguments)) in itertools.product((Replicate(), Shard(0)), AGAIN[kind].items()):
            for argument in (*arguments, arguments[0]):
                plain: Any = A.to(rank.device).clone().requires_grad_()
                own: Any = distributed(A.to(rank.device), layout, rank, mesh).requires_grad_()
                expected = operator(plain, argument)
                weights = floats(*expected.shape, start=2).to(rank.device)
                expected.backward(weights)
                try:
                    operator(own, argument).backward(distributed(weights, Replicate(), rank, mesh))
                except RuntimeError as e:
                    wrong.append(f"{name} of {layout} with {argument}: {str(e).splitlines()[0]}")
                    continue
                if not close(plain.grad, own.grad.full_tensor()):
                    wrong.append(f"{name} of {layout} with {argument}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
