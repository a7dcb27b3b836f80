"""Parametrizations of modules whose parameters are DTensors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, dyadic, requirement

PLACED: list[Placement] = [Replicate(), Shard(0), Shard(1)]


class Twice(nn.Module):
    """Double a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Added(nn.Module):
    """Add two parameters."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def right_inverse(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 4, x * 3 / 4


class Squared(nn.Module):
    """Square a parameter; this has no inverse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


KINDS: dict[str, tuple[list[Callable[[], nn.Module]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "one": ([Twice], lambda w: w),
    "two": ([Twice, Twice], lambda w: 2 * w),  # only the first begins with the inverse
    "of two": ([Added], lambda w: w),
    "without inverse": ([Squared], lambda w: w * w),
}
"""Parametrizations in their order, and what they make of a weight that has been there before."""


def layer(rank: Rank, placement: Placement | None, dtype: torch.dtype = torch.float64) -> Any:
    """Create a layer of six rows and four columns, whose weight is a DTensor unless there is no placement."""
    module = nn.Linear(4, 6, bias=False, device=rank.device, dtype=dtype)
    weight = numbers(6, 4).to(rank.device, dtype) % 7 + 1
    if placement is not None:
        weight = distribute_tensor(weight, rank.mesh(), [placement])
    module.weight = nn.Parameter(weight)
    return module


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@requirement(
    "TP-PARAMETRIZE-3500",
    "A parametrized DTensor has one device's values and gradients, as have its originals, placed as it was.",
    source="torch.nn.utils.parametrize.register_parametrization; torch.distributed.tensor.DTensor",
)
@requirement(
    "TP-PARAMETRIZE-3501",
    "A parametrized DTensor can be assigned, and becomes a parameter of its own when parametrizations are removed.",
    source="torch.nn.utils.parametrize: register_parametrization, remove_parametrizations",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2)
def test_parametrized(world: World, kind: str) -> None:
    """Register, differentiate, assign unless there is no inverse, and remove, with the result left or without."""
    parts, made = KINDS[kind]

    def body(rank: Rank) -> None:
        for placement, leaves in itertools.product(PLACED, (True, False)):
            if not leaves and kind == "of two":
                continue  # which cannot be undone
            what = f"{placement}, {leaves=}"
            modules = [layer(rank, placement), layer(rank, None)]
            before = whole(modules[1].weight.detach()).clone()
            for module in modules:
                for part in parts:
                    parametrize.register_parametrization(module, "weight", part())
                assert torch.equal(whole(module.weight), made(before)), what
                (module.weight * module.weight).sum().backward()
            originals = [list(module.parametrizations.weight.parameters()) for module in modules]
            for ours, theirs in zip(*originals, strict=True):
                assert ours.placements == (placement,), what
                assert torch.equal(whole(ours), theirs), what
                assert torch.equal(whole(ours.grad), theirs.grad), what
            if kind != "without inverse":
                modules[0].weight = distribute_tensor(before + 8, rank.mesh(), [placement])
                modules[1].weight = before + 8
                assert torch.equal(whole(modules[0].weight), before + 8), what
                for ours, theirs in zip(*originals, strict=True):
                    assert torch.equal(whole(ours), theirs), what
            right = whole(modules[1].weight.detach() if leaves else originals[1][0].detach()).clone()
            parametrize.remove_parametrizations(modules[0], "weight", leave_parametrized=leaves)
            (weight,) = modules[0].parameters()
            assert isinstance(weight, nn.Parameter), what
            assert torch.equal(whole(weight), right), what
            assert weight.requires_grad, what
            weight.grad = None
            whole(modules[0].weight).sum().backward()
            assert torch.equal(whole(weight.grad), torch.ones_like(right)), what

    world.run(body)


@requirement(
    "TP-OP-3710",
    "A normed weight that is a DTensor has the plain weight's values, however it is sharded.",
    source="torch.nn.utils.parametrizations: weight_norm; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("along", ["the norm", "the other dimension"])
@pytest.mark.world(2)
def test_normed_weights(world: World, along: str) -> None:
    """Norm rows or columns of weights that two ranks divide evenly or not."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for shape, normed in itertools.product(((4, 6), (3, 5), (5, 4)), (0, 1)):
            plain = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64, device=rank.device)
            with torch.no_grad():
                plain.weight.copy_(dyadic(*shape, key=shape, dtype=torch.float64))
            sharded = copy.deepcopy(plain)
            layout = Shard(normed if along == "the norm" else 1 - normed)
            weight = distribute_tensor(plain.weight.detach(), rank.mesh(), [layout], src_data_rank=None)
            sharded.weight = nn.Parameter(weight)
            for layer in (plain, sharded):
                weight_norm(layer, dim=normed)
            with torch.no_grad():  # their gradients have no sharding strategy
                given: Any = sharded.weight
            if not torch.allclose(given.full_tensor(), plain.weight):
                wrong.append(f"{shape}, normed along {normed}, {layout}: {given.full_tensor().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
