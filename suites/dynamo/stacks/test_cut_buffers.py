"""Buffers that a forward changes in place, whose graphs end where DDP's buckets end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import WIDE
from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo


class Changing(nn.Module):
    """Three weights of 1 MiB; after some of their products, buffers are changed in place in many ways."""

    weights: Any
    total: torch.Tensor
    parts: torch.Tensor
    average: torch.Tensor
    copied: torch.Tensor
    steps: torch.Tensor

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__()
        self.places = places
        self.weights = nn.ParameterList(torch.eye(WIDE) * 2.0**key for key in range(3))
        for name in ("total", "parts", "average", "copied"):
            self.register_buffer(name, torch.zeros(WIDE))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, weight in enumerate(self.weights):
            x = x @ weight
            if place in self.places:
                self.change(place)
        return x

    def change(self, place: int) -> None:
        """Change each buffer by numbers, by itself or by a weight, as a whole or in part."""
        self.total.add_(place + 1).mul_(2)
        self.total.sub_(1)
        self.parts[place : place + 2] += 1
        self.parts[-1].fill_(place + 3)
        self.steps += 1
        self.average.lerp_(self.weights[place].detach()[place], 0.5)
        with torch.no_grad():
            self.copied.copy_(self.copied + self.weights[-1][0])


@requirement(
    "DYN-DDP-8000",
    "Buffers that a compiled module under DDP changes in place have the uncompiled module's values, wherever buckets "
    "end.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer; torch.nn.parallel.DistributedDataParallel; "
    "pytorch/pytorch#103488",
)
@pytest.mark.parametrize(("backend", "places"), [("eager", (0, 1, 2)), ("aot_eager", (2,))])
@pytest.mark.world(1)
def test_changed_in_place(world: World, backend: str, places: tuple[int, ...]) -> None:
    """Change buffers in five ways after each layer, or after the last one; layers and buckets have 1 MiB."""

    def body(rank: Rank) -> None:
        found = []
        for compiles in (False, True):
            module = Changing(places).to(rank.device)
            model = DistributedDataParallel(module, bucket_cap_mb=1)
            run = dynamo.compiled(model, fullgraph=False, backend=backend)[0] if compiles else model
            for step in range(2):
                x = dyadic(1, WIDE, key=step, dtype=torch.float32, span=2).to(rank.device)
                result = run(x)
                result.sum().backward()
                gradients = [weight.grad for weight in module.weights]
                found.append([result.detach(), *gradients, *(each.clone() for each in module.buffers())])
                model.zero_grad()
        for step, (right, others) in enumerate(zip(found[:2], found[2:], strict=True)):
            for number, (one, other) in enumerate(zip(right, others, strict=True)):
                assert_same(one, other, f"tensor {number}, step {step}")

    world.run(body)
