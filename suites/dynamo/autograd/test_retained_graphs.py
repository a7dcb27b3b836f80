"""Graphs of compiled code that are retained for a second backward, compiled anew or taken from the caches on disk."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional


def _twice_used(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = (x * w).sin()
    k = (h.exp().tanh() * h).sum(0)
    return h, functional.all_reduce(k.detach(), "sum", dist.group.WORLD) * k.sin()


@requirement(
    "DYN-RETAIN-2500",
    "A second backward of compiled code has the right gradients if its graph was retained, whatever the caches have.",
    source="torch.Tensor.backward: retain_graph; torch/_functorch/config.py: donated_buffer; torch.compile",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.parametrize("cached", [False, True], ids=["compiled", "cached"])
@pytest.mark.world(2, timeout=180)
def test_retained_graphs(world: World, cached: bool) -> None:
    """Run a backward for each of two outputs, of code that was or was not compiled before with one for both."""
    tag = uuid.uuid4().hex

    def gradient(rank: Rank, function: Any, retains: bool) -> Any:
        w = torch.ones(2, 4, device=rank.device, requires_grad=True)
        first, second = function(torch.arange(8.0, device=rank.device).view(2, 4) + rank.index, w)
        if retains:
            first.sum().backward(retain_graph=True)
            second.sum().backward()
        else:
            (first.sum() + second.sum()).backward()
        return w.grad

    def body(rank: Rank) -> float:
        right = gradient(rank, _twice_used, True)
        with dynamo.cached_as(f"{tag} of rank {rank.index}"), dynamo.caches_of_graphs_alone():
            if cached:
                gradient(rank, dynamo.compiled(_twice_used, backend="inductor")[0], False)
            found = gradient(rank, dynamo.compiled(_twice_used, backend="inductor")[0], True)
        return float((right - found).abs().max())

    for difference in world.run(body):
        assert difference < 1e-4
