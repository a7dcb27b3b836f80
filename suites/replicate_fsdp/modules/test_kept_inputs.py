"""Inputs that a managed module writes into, and what is kept of its inputs and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from fixtures.wrapped import STRATEGIES, wrapped
from harness import Rank, World, requirement
from harness.stacks import replicate

SOURCE = (
    "torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp: fully_shard, FullyShardedDataParallel; "
    "torch.nn.Module: forward"
)


class Cached(nn.Module):
    """A layer that writes into tensors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, *, seen: torch.Tensor, more: dict[str, list[torch.Tensor]]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Count, and return two outputs."""
        with torch.no_grad():
            cache.add_(1)
            seen.fill_(True)
            more["counts"][0].add_(2)
        y: torch.Tensor = self.layer(x)
        return y, {"double": 2 * y}


def stacks(rank: Rank, stack: str) -> dict[str, Callable[[], Any]]:
    """Return functions that make the module under a stack with options."""
    if stack == "DDP":
        options: list[dict[str, Any]] = [
            {},
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"gradient_as_bucket_view": True},
        ]
        return {
            str(each): lambda each=each: DistributedDataParallel(Cached().to(rank.device), **each) for each in options
        }
    if stack == "replicate":
        return {stack: lambda: replicate.apply(Cached(), rank)}
    if stack == "FSDP1":
        return {
            strategy.name: lambda strategy=strategy: wrapped(rank, Cached(), sharding_strategy=strategy)  # type: ignore[misc]
            for strategy in STRATEGIES
        }
    policies = {"": {}, " cast": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}}
    return {
        way + name: lambda manage=manage, given=given: manage(Cached().to(rank.device), **given)  # type: ignore[misc]
        for way, manage in ways(rank).items()
        for name, given in policies.items()
    }


STACKS = ("DDP", "replicate", "FSDP1", "FSDP2")


@requirement(
    "RFSDP-KEPT-9457",
    "Tensors that a managed module is called with, and that are not cast, have what the module writes into them.",
    source=SOURCE,
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_written(world: World, stack: str) -> None:
    """Give integers and truth values by position, by name and in containers, to be changed in two calls."""

    def body(rank: Rank) -> None:
        for option, make in stacks(rank, stack).items():
            model = make()
            for training in True, False:
                model.train(training)
                cache, count = (torch.zeros(2, dtype=torch.int64, device=rank.device) for _ in range(2))
                seen = torch.zeros(2, dtype=torch.bool, device=rank.device)
                for call in 1, 2:
                    y, _ = model(torch.ones(1, 2, device=rank.device), cache, seen=seen, more={"counts": [count]})
                    y.sum().backward()
                    assert (cache.tolist(), count.tolist()) == ([call] * 2, [2 * call] * 2), option
                    assert seen.all(), option

    world.run(body)


@requirement(
    "RFSDP-KEPT-9458",
    "A managed module keeps no input or output alive after a backward, or after a forward that has none.",
    source=SOURCE,
)
@pytest.mark.parametrize("then", ["backward", "nothing", "no gradients"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_freed(world: World, stack: str, then: str) -> None:
    """Look without a garbage collection whether the tensors are there, in two calls."""

    def body(rank: Rank) -> None:
        for option, make in stacks(rank, stack).items():
            if "static_graph" in option and then != "backward":
                continue  # each forward is to have its backward
            model = make()
            for call in range(2):
                x = torch.ones(1, 2, device=rank.device, requires_grad=True)
                cache, count, seen = (torch.zeros(2, device=rank.device) for _ in range(3))
                with torch.set_grad_enabled(then != "no gradients"):
                    y, others = model(x, cache, seen=seen, more={"counts": [count]})
                if then == "backward":
                    (y.sum() + others["double"].sum()).backward()
                tensors = {"x": x, "cache": cache, "count": count, "seen": seen, "y": y, "double": others["double"]}
                there = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
                del x, cache, count, seen, y, others, tensors
                assert [name for name, tensor in there.items() if tensor() is not None] == [], f"{option}, call {call}"

    world.run(body)
