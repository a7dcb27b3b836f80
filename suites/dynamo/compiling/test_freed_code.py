"""Compiled code is freed with the objects that it was compiled for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, requirement

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "Adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
}


@requirement(
    "DYN-FREED-5000",
    "The graphs that one function was compiled to for several optimizers are freed with these.",
    source="torch.compile: guards; torch/_dynamo/guards.py: 'Cache line invalidated because … got deallocated'",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.world(2)
def test_optimizers(world: World, name: str) -> None:
    """Step optimizers of new parameters, whose gradients are sums over ranks, by one compiled function."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        graphs: list[weakref.ref[Any]] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            graphs.append(weakref.ref(graph))
            return graph

        def step(optimizer: torch.optim.Optimizer) -> None:
            optimizer.step()

        compiled = torch.compile(step, backend=backend)
        for _ in range(3):
            parameter = nn.Parameter(torch.ones(2, device=rank.device))
            parameter.grad = torch.ones(2, device=rank.device)
            dist.all_reduce(parameter.grad)
            optimizer = OPTIMIZERS[name]([parameter])
            compiled(optimizer)
            del parameter, optimizer
            gc.collect()
        assert len(graphs) >= 3
        alive = sum(graph() is not None for graph in graphs)
        assert not alive, f"{alive} of {len(graphs)} graphs are alive"

    world.run(body)
