"""Which parameters DDP takes for unused, whatever container the outputs are in."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement


@dataclass
class Held:
    """A tensor."""

    x: torch.Tensor


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda x: [x, None], lambda given: given[0]),
    "dict": (lambda x: {"x": (x,)}, lambda given: given["x"][0]),
    "dataclass": (Held, lambda given: given.x),
    "deque": (lambda x: deque([x]), lambda given: given[0]),
    "set": (lambda x: {x}, lambda given: next(iter(given))),
    "object": (lambda x: SimpleNamespace(x=x), lambda given: given.x),
    "user's dict": (lambda x: UserDict(x=x), lambda given: given["x"]),
}


class Gives(nn.Module):
    """Two layers, of which one is used, and a way to return its output."""

    def __init__(self, put: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers, self.put = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2)), put

    def forward(self, x: torch.Tensor, used: int) -> Any:
        return self.put(self.layers[used](x))


@requirement(
    "REPL-UNUSED-3802",
    "With find_unused_parameters, parameters in the graph of any tensor that the output contains are averaged.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters, 'all tensors contained in'",
)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.world(2)
def test_output_in_container(world: World, container: str) -> None:
    """Use one of two layers in each of two steps, and return its output in a container."""
    put, take = CONTAINERS[container]

    def body(rank: Rank) -> list[list[float | None]]:
        model = DistributedDataParallel(Gives(put).to(rank.device), find_unused_parameters=True)
        gradients = []
        for used in (0, 1):
            model.zero_grad()
            take(model(torch.full((1, 1), 1.0 + rank.index, device=rank.device), used)).sum().backward()
            gradients.append([None if p.grad is None else float(p.grad) for p in model.parameters()])
        return gradients

    assert_on_ranks([[[1.5, None], [None, 1.5]]] * 2, world.run(body))
