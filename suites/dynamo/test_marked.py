"""Dimensions that are marked as dynamic or static: of tensors that collectives are given, and of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

PLACEMENTS = [Shard(0), Shard(1), Replicate(), Partial()]
SHAPES = {0: [(4, 6), (6, 6), (8, 6), (4, 6)], 1: [(4, 6), (4, 8), (4, 10), (4, 6)]}
"""The shapes of the calls, by the dimension that differs. Three are different."""


def _doubled(d: Any) -> Any:
    return d * 2


def _whole(d: Any) -> Any:
    return d.full_tensor() * 2


def _replicated(d: Any) -> Any:
    return d.redistribute(placements=[Replicate()]) * 2


def _local(d: Any) -> Any:
    return d.to_local() * 2


@requirement(
    "DYN-MARK-01",
    "A function of DTensors is compiled once for all sizes of a dimension that mark_dynamic has marked.",
    source="torch._dynamo.mark_dynamic: tensor subclasses",
)
@requirement(
    "DYN-MARK-02",
    "A function of DTensors is compiled for each size of a dimension that mark_static has marked.",
    source="torch._dynamo.mark_static: tensor subclasses",
)
@pytest.mark.parametrize(
    ("function", "how", "graphs"),
    [
        *((function, "dynamic", 1) for function in (_doubled, _whole, _replicated, _local)),
        (_doubled, "maybe-dynamic", 1),
        (_doubled, "static", 3),
    ],
    ids=lambda given: given.__name__.strip("_") if callable(given) else None,
)
@pytest.mark.world(2)
def test_dtensors(world: World, function: Callable[[Any], Any], how: str, graphs: int) -> None:
    """Mark each dimension of DTensors of each placement."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        cases: list[tuple[Placement, int]] = [(PLACEMENTS[0], 0), (PLACEMENTS[1], 0), (Replicate(), 1), (Partial(), 1)]
        for placement, dim in cases:
            compiled, counter = dynamo.compiled(function)
            for shape in SHAPES[dim]:
                local = dyadic(*shape, key=rank.index, dtype=torch.float32).to(rank.device)
                given = DTensor.from_local(local, mesh, [placement], run_check=False)
                right, result = function(given), compiled(dynamo.marked(how, given, dim))
                what = f"{placement}, dimension {dim}, {shape}"
                if isinstance(right, DTensor):
                    assert result.shape == right.shape, what
                    right, result = right.to_local(), result.to_local()
                assert_same(right + 0, result + 0, what)
            assert counter.graphs == graphs, f"{placement}, dimension {dim}"

    world.run(body)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    into = x.new_empty(2 * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(into, x)
    return into * 2


def _scattered(x: torch.Tensor) -> torch.Tensor:
    into = x.new_empty(x.shape[0] // 2, x.shape[1])
    dist.reduce_scatter_tensor(into, x)
    return into * 2


def _listed(x: torch.Tensor) -> torch.Tensor:
    into = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(into, x)
    return torch.cat(into) * 2


def _summed(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    dist.all_reduce(y)
    return y * 2


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": _summed,
    "all_gather_into_tensor": _gathered,
    "all_gather": _listed,
    "reduce_scatter_tensor": _scattered,
    "functional gather": lambda x: functional.all_gather_tensor(x, 1, dist.group.WORLD) * 2,
    "functional scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD) * 2,
    "functional exchange": lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD) * 2,
    "functional broadcast": lambda x: functional.broadcast(x, 1, dist.group.WORLD) * 2,
}


@requirement(
    "DYN-MARK-03",
    "A collective is compiled once for all sizes of the dimensions that mark_dynamic has marked.",
    source="torch._dynamo.mark_dynamic; torch/distributed/_functional_collectives.py",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, not all of these collectives can be traced")
@pytest.mark.world(2)
def test_collectives(world: World) -> None:
    """Mark one dimension, and both."""

    def body(rank: Rank) -> None:
        both = [(4, 6), (6, 8), (8, 6)]
        for name, function in COLLECTIVES.items():
            for dims, shapes in ((0, SHAPES[0]), ((0, 1), both)):
                compiled, counter = dynamo.compiled(function, backend="eager")
                for shape in shapes:
                    x = dyadic(*shape, key=rank.index, dtype=torch.float32).to(rank.device)
                    right, result = function(x), compiled(dynamo.marked("dynamic", x, dims))
                    assert_same(right + 0, result + 0, f"{name}: {dims}, {shape}")
                assert counter.graphs == 1, f"{name}: {dims}"

    world.run(body)
