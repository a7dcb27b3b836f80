"""Compiled code in the caches on disk, for DTensors that require gradients and for others."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo


def product(x: Any, w: Any) -> Any:
    """Multiply matrices, which needs no kernel."""
    return x @ w


@requirement(
    "DYN-DT-5000",
    "Compiled code that the caches keep for frozen DTensors gives no results without gradients to trained ones.",
    source="AOTAutogradCache; DTensor: requires_grad; torch.compiler.reset",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=120)
def test_frozen_before(world: World) -> None:
    """Multiply with the weights, both or neither trained, in two orders; reset the compiler each time."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        neither, weights, both = (False, False), (False, True), (True, True)
        for order in (neither, weights, both), (weights, neither):
            with dynamo.cached_as(f"{tag} of rank {rank.index} {order[0]}"):
                for trained in order:
                    found = []
                    for function in product, dynamo.compiled(product, backend="inductor")[0]:
                        given = [
                            DTensor.from_local(
                                dyadic(2, 2, key=(rank.index, number), dtype=torch.float32).to(rank.device),
                                mesh,
                                [placement],
                                run_check=False,
                            ).requires_grad_(on)
                            for number, (placement, on) in enumerate(zip((Shard(0), Replicate()), trained, strict=True))
                        ]
                        y = function(*given)
                        assert y.requires_grad == any(trained), trained
                        if y.requires_grad:
                            y.redistribute(placements=[Replicate()]).to_local().sum().backward()
                        found.append((y.to_local().detach(), *(d.grad for d in given)))
                    for one, other in zip(*found, strict=True):
                        assert (one is None) == (other is None), trained
                        if one is not None and other is not None:
                            one, other = (d.full_tensor() if isinstance(d, DTensor) else d for d in (one, other))
                            assert_same(one, other, f"trained: {trained}")

    world.run(body)
