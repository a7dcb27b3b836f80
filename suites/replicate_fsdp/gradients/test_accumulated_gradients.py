"""Gradients of several backwards without synchronization, of parameters that a forward combines."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp

COMBINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "added": lambda a, b: a + b,
    "concatenated": lambda a, b: torch.cat([a, b]).view(2, 2).sum(0),
    "multiplied": lambda a, b: (torch.stack([a, b]) * 1.0).sum(0),
    "as a matrix": lambda a, b: torch.ones_like(a) @ torch.stack([a, b]),
    "stacked": lambda a, b: torch.stack([a, b]).sum(0),
    "averaged": lambda a, b: 2 * torch.stack([a, b]).mean(0),
}
"""Ways to compute the sum of two parameters with two elements."""


class Two(nn.Module):
    """Two parameters, whose sum multiplies the input."""

    def __init__(self, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in "ab")
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.combine(self.a, self.b) * x).sum()


@requirement(
    "RFSDP-ACCUM-3805",
    "Gradients of backwards without synchronization add up as on one device, however a forward combines parameters.",
    source="torch.nn.parallel.DistributedDataParallel.no_sync; torch.distributed.fsdp: set_requires_gradient_sync",
)
@pytest.mark.parametrize("combined", COMBINED)
@pytest.mark.world(2)
def test_combined_parameters(world: World, combined: str) -> None:
    """Run two backwards without synchronization and one with it, in each way to manage a module."""

    def body(rank: Rank) -> None:
        found = {}
        for way, manage in {"DDP": DistributedDataParallel, **ways(rank)}.items():
            module = Two(COMBINED[combined]).to(rank.device)
            model: Any = manage(module)
            for step in range(3):
                last = step == 2
                if way != "DDP":
                    model.set_requires_gradient_sync(last)
                with model.no_sync() if way == "DDP" and not last else contextlib.nullcontext():
                    model(torch.tensor(1.0 + step + rank.index, device=rank.device)).backward()
            found[way] = {name: each.tolist() for name, each in replicate_fsdp.gradients(module).items()}
        assert found == {way: {"a": [7.5, 7.5], "b": [7.5, 7.5]} for way in found}

    world.run(body)


HALF, NARROW, SINGLE, WIDE = torch.float16, torch.bfloat16, torch.float32, torch.float64
HELD: dict[str, list[tuple[bool, bool]]] = {
    "everything": [(False, True), (False, False), (True, True)],
    "all-reduce": [(True, False), (True, False), (True, True)],
    "in turn": [(False, False), (True, False), (True, True)],
}
"""What micro-batches hold back: whether each synchronizes gradients, and whether it needs an all-reduce."""


@requirement(
    "RFSDP-ACCUM-9171",
    "Gradients that await a reduction, or an all-reduce only, accumulate in the dtype of reduction, whatever dtype "
    "parameters have or are computed in.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype; torch.distributed.fsdp: "
    "set_requires_gradient_sync, set_requires_all_reduce",
)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.world(2)
def test_dtypes_of_accumulation(world: World, held: str) -> None:
    """Add one twice to a gradient to which the narrowest dtype would round both sums."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        managers = {name: manage for name, manage in ways(rank).items() if held == "everything" or name != "sharded"}
        for stored, param, reduce, (way, manage) in itertools.product(
            (HALF, NARROW, SINGLE), (None, NARROW), (None, NARROW, SINGLE, WIDE), managers.items()
        ):
            module = nn.Linear(2, 2, bias=False, dtype=stored, device=rank.device)
            model: Any = manage(module, mp_policy=MixedPrecisionPolicy(param, reduce))
            reduced = reduce or (stored if replicate_fsdp.REDUCES_IN_PARAMETER_DTYPE else param or stored)
            large = 2 / max(torch.finfo(dtype).eps for dtype in (stored, param or stored, reduced))
            right = torch.zeros((), dtype=reduced)
            for value, (synced, whole) in zip((large, 1.0, 1.0), HELD[held], strict=True):
                model.set_requires_gradient_sync(synced)
                model.set_requires_all_reduce(whole)
                model(torch.full((1, 2), value, dtype=stored, device=rank.device)).sum().backward()
                right += value
            found = {(g.dtype, n) for g in replicate_fsdp.gradients(model).values() for n in g.unique().tolist()}
            if found != {(stored, right.item())}:
                wrong.append(f"{way}, {stored}, {param}, {reduce}: {found} for {right.item()}")
        return wrong

    assert_on_ranks([[]] * 2, world.run(body))
