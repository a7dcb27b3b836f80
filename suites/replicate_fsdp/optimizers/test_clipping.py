"""Gradients of fully sharded, hybrid sharded and replicated models, clipped by every kind of norm, and unscaled."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import get_total_norm

from fixtures.clipping import check_clipping
from fixtures.scaling import check_scaling
from fixtures.states import Net, train, whole
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages, replicate_fsdp


def sharded(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Shard over two ranks, or over two of four with two replicas of each shard."""
    mesh = rank.mesh() if rank.size == 2 else rank.mesh(2, 2, names=("replicas", "shards"))
    return fully_shard(model.to(rank.device), mesh=mesh), rank.index % 2, 2


def replicated(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Replicate over two or four ranks."""
    return replicate_fsdp.apply(model, rank), rank.index % 2, 2


STACKS = {"sharded": sharded, "replicated": replicated}


@requirement(
    "RFSDP-CLIP-01",
    "Gradients are clipped as on one device by every kind of norm, whether whole, sharded or in empty shards.",
    source="torch.nn.utils: clip_grad_norm_, get_total_norm, clip_grads_with_norm_, clip_grad_value_",
)
@requirement(
    "RFSDP-CLIP-02",
    "With error_if_nonfinite=True, a gradient that is not finite on one rank raises an error on every rank.",
    source="torch.nn.utils.clip_grad_norm_",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
def test_clipping(world: World, stack: str) -> None:
    """Use norms of finite and infinite order, bounds below and above them, and loops or foreach functions."""
    distribute = STACKS[stack]
    world.run(lambda rank: check_clipping(rank, distribute, "first", "second", "third"))


@requirement(
    "RFSDP-CLIP-152",
    "Gradients of parameters on different meshes are clipped by the norm of all, as on one device.",
    source="torch.nn.utils.clip_grad_norm_; torch.distributed.fsdp.fully_shard: mesh; pytorch/pytorch#180346",
)
@pytest.mark.parametrize("meshes", ["one", "several"])
@pytest.mark.world(4)
def test_clipping_over_meshes(world: World, meshes: str) -> None:
    """One layer is sharded over all ranks, the other over pairs with a replica or also over all."""

    def body(rank: Rank) -> list[tuple[float, float]]:
        layers = [nn.Linear(4, 4, bias=False).to(rank.device) for _ in range(2)]
        every = rank.mesh()
        fully_shard(layers[0], mesh=rank.mesh(2, 2, names=("replicas", "shards")) if meshes == "several" else every)
        fully_shard(layers[1], mesh=every)
        weights: list[Any] = [layer.weight for layer in layers]
        found = []
        for foreach in None, True, False:
            for weight in weights:
                weight.grad = torch.ones_like(weight) * 2
            total = torch.nn.utils.clip_grad_norm_(weights, 1.0, 1.0, foreach=foreach)  # a norm of 2 * 32
            found.append((round(float(whole(total)), 3), round(64 * float(whole(weights[0].grad)[0, 0]), 3)))
        return found

    assert_on_ranks([[(64.0, 2.0)] * 3] * world.size, world.run(body))


@requirement(
    "RFSDP-CLIP-332",
    "Gradients of which a rank has no elements are clipped by each kind of norm as on one device.",
    source="torch.nn.utils.clip_grad_norm_; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf, -math.inf], ids=["one", "two", "infinity", "minus-infinity"])
@pytest.mark.world(2, timeout=5)
def test_clipping_without_elements(world: World, norm: float) -> None:
    """A weight has one row, which is on rank 0."""

    def body(rank: Rank) -> list[float]:
        layer: Any = fully_shard(nn.Linear(4, 1, bias=False).to(rank.device), mesh=rank.mesh())
        layer.weight.grad = torch.ones_like(layer.weight) * 2
        total = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, norm)
        return [round(float(whole(total)), 3), round(float(whole(layer.weight.grad)[0, 0]), 3)]

    right = {1.0: [8.0, 0.25], 2.0: [4.0, 0.5]}.get(norm, [2.0, 1.0])
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "RFSDP-SCALE-01",
    "A GradScaler unscales whole or sharded gradients as on one device.",
    source="torch.amp.GradScaler: scale, unscale_, step, update",
)
@requirement(
    "RFSDP-SCALE-02",
    "With a GradScaler, a gradient that is not finite on one rank skips the step on every rank and halves the scale.",
    source="torch.amp.GradScaler: step, update",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2, 4)
def test_scaling(world: World, stack: str) -> None:
    """Step with finite gradients, with one that has an infinity or a NaN in its first or last shard, and again."""
    distribute = STACKS[stack]
    world.run(lambda rank: check_scaling(rank, distribute, "first", "second", "third"))


@requirement(
    "RFSDP-CLIP-93",
    "The norm of all gradients of sharded parameters takes one all-reduce for each mesh dimension that shards them.",
    source="torch.nn.utils.get_total_norm; test_fully_shard_clip_grad_norm_.py: test_clip_grad_norm_1d",
)
@pytest.mark.world(2, 4)
def test_collectives(world: World) -> None:
    """Count the collectives of each kind of norm, of six parameters, until the whole norm is known."""

    def body(rank: Rank) -> None:
        model, part, parts = sharded(rank, Net())
        train(model, torch.optim.SGD([torch.zeros(())]), 0, part, parts)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for norm, foreach in itertools.product((1.0, 2.0, 3.0, math.inf), (True, False)):
            at = messages.mark()
            total: Any = get_total_norm(gradients, norm, foreach=foreach)
            total.full_tensor()
            found = messages.since(at)
            assert len(found) == 1, f"{norm=}, {foreach=}: {found}"

    world.run(body)
