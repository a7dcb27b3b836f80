"""Compiled modules of each stack whose attributes, modes or parameters are changed between calls."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import dynamo, replicate_fsdp


class Way(enum.Enum):
    """Two ways to compute."""

    FIRST = 1
    SECOND = 2


ATTRIBUTES: dict[str, tuple[Any, Any]] = {
    "flag": (True, False),
    "maybe": (None, 2),
    "whole": (1, 2),
    "text": ("a", "bc"),
    "pair": ((1, 2), (1, 3)),
    "table": ({"k": 1}, {"k": 4}),
    "way": (Way.FIRST, Way.SECOND),
    "function": (torch.sin, torch.cos),
}
"""An attribute of each kind, with two values."""


def number(module: Any) -> float:
    """Compute a number of the attributes of a module: each of them has a part of its own."""
    parts = [
        *(1.0 if module.flag else 2.0, 0.0 if module.maybe is None else 4.0, module.whole * 8.0),
        *(len(module.text) * 32.0, module.pair[1] * 128.0, module.table["k"] * 1024.0),
        *(0.0 if module.way is Way.FIRST else 8192.0, 0.0 if module.function is torch.sin else 16384.0),
        32768.0 if module.training else 0.0,
    ]
    return sum(parts)


class Inner(nn.Module):
    """A layer that adds the number of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, (first, _) in ATTRIBUTES.items():
            setattr(self, name, first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        result: torch.Tensor = self.layer(x) * 0 + number(self)
        return result


class Outer(Inner):
    """Such a layer with another one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        return super().forward(x) - 3 * self.inner(x)


def _fsdp1(module: nn.Module, rank: Rank) -> nn.Module:
    return FullyShardedDataParallel(module.to(rank.device), device_id=rank.device, use_orig_params=True)


def _wrapped(module: nn.Module, rank: Rank) -> nn.Module:
    module.inner = _fsdp1(module.inner, rank)  # type: ignore[arg-type]
    return _fsdp1(module, rank)


def _fully_sharded(module: nn.Module, rank: Rank) -> nn.Module:
    return fully_shard(module.to(rank.device), mesh=rank.mesh())


def _parallelized(module: nn.Module, rank: Rank) -> nn.Module:
    style = ColwiseParallel(output_layouts=Replicate())
    plan: dict[str, Any] = {"layer": style, "inner.layer": style}
    return parallelize_module(module.to(rank.device), rank.mesh(2), plan)


STACKS: dict[str, Callable[[nn.Module, Rank], Any]] = {
    "DDP": lambda module, rank: DistributedDataParallel(module.to(rank.device)),
    "replicate_fsdp": lambda module, rank: replicate_fsdp.apply(module, rank, groups=False),
    "fully_shard": _fully_sharded,
    "FSDP": _fsdp1,
    "nested FSDP": _wrapped,
    "parallel": _parallelized,
}


@requirement(
    "DYN-GUARD-8605",
    "A compiled module on any stack computes with the attributes of every kind that it and its submodules then have.",
    source="torch.compile: guards; torch.nn.Module",
)
@requirement(
    "DYN-GUARD-8606",
    "A compiled module on any stack computes in the mode of training or evaluation that it and its submodules then "
    "have.",
    source="torch.compile: guards; torch.nn.Module.train, eval",
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.world(2)
def test_attributes(world: World, stack: str) -> None:
    """Change one attribute or mode of the outer or the inner layer before each call."""

    def body(rank: Rank) -> None:
        plain = Outer()
        inner = plain.inner
        placed = STACKS[stack](plain, rank)
        changes: list[tuple[str, Callable[[], Any]]] = [("nothing", lambda: None)]
        for i, (name, (_, second)) in enumerate(ATTRIBUTES.items()):
            module = (plain, inner)[i % 2]
            changes.append((name, lambda m=module, n=name, v=second: setattr(m, n, v)))  # type: ignore[misc]
        changes += [("inner.eval", inner.eval), ("eval", lambda: placed.eval()), ("inner.train", inner.train)]
        with dynamo.settings(recompile_limit=64, accumulated_recompile_limit=512):
            function, counter = dynamo.compiled(placed, backend="eager", fullgraph=False)
            for what, change in changes:
                change()
                right = number(plain) - 3 * number(inner)
                result = function(torch.ones(1, 2, device=rank.device)).detach() + 0
                assert result.tolist() == [[right] * 2], what
        assert counter.graphs > 0

    world.run(body)
