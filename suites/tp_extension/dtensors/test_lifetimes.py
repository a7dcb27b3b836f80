"""How long operators and conversions of DTensors keep their inputs: no longer than those of plain tensors."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fixtures.operators import floats
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

Operator = Callable[[Any, Any], Any]
OPERATORS: dict[str, dict[str, Operator]] = {
    "one by one": {
        "add": lambda x, w: x + w,
        "scale": lambda x, w: x * 3,
        "product": lambda x, w: x * w,
        "quotient": lambda x, w: w / x,
        "power": lambda x, w: x.square(),
        "relu": lambda x, w: x.relu(),
        "gelu": lambda x, w: functional.gelu(x),
        "sigmoid": lambda x, w: x.sigmoid(),
        "where": lambda x, w: torch.where(w > 0, x, 0),
        "conversion": lambda x, w: x.float(),
        "clone": lambda x, w: x.clone(),
    },
    "reductions": {
        "sum": lambda x, w: x.sum(),
        "sum of rows": lambda x, w: x.sum(1),
        "mean of columns": lambda x, w: x.mean(0),
        "maximum": lambda x, w: x.amax(1),
        "norm": lambda x, w: torch.linalg.vector_norm(x),
        "softmax": lambda x, w: x.softmax(1),
        "log_softmax": lambda x, w: x.log_softmax(0),
        "layer_norm": lambda x, w: functional.layer_norm(x, (4,)),
        "cumsum": lambda x, w: x.cumsum(0),
        "mse_loss": lambda x, w: functional.mse_loss(x, w),
    },
    "shapes": {
        "transposed product": lambda x, w: x.t() @ w,
        "linear": lambda x, w: functional.linear(x, w),
        "cat": lambda x, w: torch.cat([x, w]),
        "stack": lambda x, w: torch.stack([x, w], 1),
        "rows": lambda x, w: x[1:3] + 1,
        "flip": lambda x, w: x.flip(0),
        "pad": lambda x, w: functional.pad(x, (1, 0)),
        "expand": lambda x, w: x.expand(2, *x.shape) + 1,
        "reshape": lambda x, w: x.reshape(2, 2, 4) * 1.5,
        "checkpointed": lambda x, w: checkpoint(lambda y: (y.relu() * w).sigmoid(), x, use_reentrant=False),
    },
}
"""Operators on two matrices of four rows and four columns."""


def lives(x: Any, w: Any, operator: Operator, *, kept: bool | None = None) -> tuple[bool, bool]:
    """Return whether an input is alive after the operator, and after the backward.

    Unless it may be ``kept`` until the backward, wait a little for threads of a backend, which may still have it.
    """
    given = x * 2
    with torch.no_grad():
        seen = weakref.ref(given.to_local() if isinstance(given, DTensor) else given)
    result = operator(given, w)
    del given
    before = alive(seen, waits=kept is False)
    result = result.full_tensor() if isinstance(result, DTensor) else result
    result.sum().backward()
    return before, alive(seen, waits=kept is not None)


def alive(seen: Callable[[], Any], *, waits: bool) -> bool:
    """Return whether a tensor is alive, at once or after at most half a second."""
    gc.collect()
    until = time.monotonic() + (0.5 if waits else 0)
    while seen() is not None and time.monotonic() < until:
        threading.Event().wait(0.001)
    return seen() is not None


@requirement(
    "TP-LIFE-5052",
    "An operator on DTensors keeps an input alive until its backward only where the operator on plain tensors does, "
    "and none after it.",
    source="torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.world(2)
def test_operators(world: World, kind: str) -> None:
    """Shard rows or columns, replicate, or leave a sum pending."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        whole, other = (floats(4, 4).to(rank.device) + i for i in (0, 1))
        placements: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())
        gc.collect()
        gc.freeze()
        for name, operator in OPERATORS[kind].items():
            plain = lives(whole.clone().requires_grad_(), other.clone().requires_grad_(), operator)
            for placement in placements:
                if placement == Partial():
                    own: Any = DTensor.from_local(whole / rank.size, rank.mesh(), [placement]).requires_grad_()
                else:
                    own = distribute_tensor(whole, rank.mesh(), [placement]).requires_grad_()
                second = distribute_tensor(other, rank.mesh(), [Replicate()]).requires_grad_()
                if name == "norm" and placement == Partial():
                    continue  # which PyTorch refuses: a finding
                found = lives(own, second, operator, kept=plain[0])
                if found[0] > plain[0] or found[1]:
                    wrong.append(f"{name} of {placement}: {found}, plain {plain}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-LIFE-5601",
    "Tensor-parallel layers that are checkpointed keep nothing of a backward once it has ended.",
    source="torch.utils.checkpoint.checkpoint; torch.distributed.tensor.parallel.parallelize_module",
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.world(2)
def test_checkpointed_layers(world: World, reentrant: bool) -> None:
    """Train columns and rows, together and layer by layer; the ranks look for what is left when the test ends."""

    def body(rank: Rank) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(rank.device)
        parallelize_module(model, rank.mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for modules in ([model], list(model)):
            x = floats(2, 4).float().to(rank.device).requires_grad_()
            for module in modules:
                x = checkpoint(module, x, use_reentrant=reentrant)
            x.sum().backward()

    world.run(body)
