"""Backwards that compiled autograd captures: one graph for batches of any size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.tracing import Tracer
from suites.dynamo.objects import summed

SIZES = (4, 6, 8)

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expand": lambda y: y.expand(2, *y.shape).sum(),
    "slice": lambda y: y[1:].square().sum(),
    "split": lambda y: (y.chunk(2)[1] * 2).sum(),
    "reduced": lambda y: summed(y).sum(),
}
"""Losses of float[n, 2] whose backward needs sizes."""


@requirement(
    "DYN-TRACE-5000",
    "With dynamic shapes, compiled autograd compiles the backward of a loss at most twice for batches of all sizes.",
    source="torch/_dynamo/compiled_autograd.py; torch.compile: dynamic=True",
)
@pytest.mark.world(2)
def test_sizes(world: World) -> None:
    """Give batches of three sizes to a layer, whose losses expand, slice, split or reduce its outputs."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        tracer, layer, plain = Tracer("eager"), nn.Linear(2, 2).to(rank.device), nn.Linear(2, 2).to(rank.device)
        plain.load_state_dict({name: dyadic(*p.shape, key=name) for name, p in layer.state_dict().items()})
        layer.load_state_dict(plain.state_dict())
        for size in SIZES:
            x = dyadic(size, 2, key=(rank.index, size), dtype=torch.float32).to(rank.device)
            for model in plain, layer:
                loss = torch.stack([each(model(x)) for each in LOSSES.values()]).sum()
                with dynamo.compiled_backward(tracer, dynamic=True) if model is layer else nullcontext():
                    loss.backward()
            for one, other in zip(plain.parameters(), layer.parameters(), strict=True):
                assert_same(one.grad, other.grad, f"size {size}")
                one.grad = other.grad = None
        assert 1 <= len(tracer.graphs) <= 2, f"{len(tracer.graphs)} graphs"

    world.run(body)
