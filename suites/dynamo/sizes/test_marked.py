"""Dimensions that are marked as dynamic or static: of tensors that collectives are given, and of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
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


@requirement(
    "DYN-MARK-9001",
    "The bounds that mark_dynamic was given for a dimension of a DTensor are those of its own size, not of a rank's "
    "part.",
    source="torch._dynamo.mark_dynamic: min, max, tensor subclasses",
)
@pytest.mark.parametrize("least", [3, 6], ids=["small", "large"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=["rows", "columns", "replicated"])
@pytest.mark.world(2)
def test_bounds(world: World, placement: Placement, least: int) -> None:
    """Call with three sizes from 6 to 32, of which a rank may have half."""

    def body(rank: Rank) -> int:
        compiled, counter = dynamo.compiled(_doubled)
        for rows in (6, 16, 32):
            whole = dyadic(rows, 6, key=rows, dtype=torch.float32).to(rank.device)
            given = distribute_tensor(whole, rank.mesh(2), [placement])
            result = compiled(dynamo.marked("dynamic", given, 0, min=least, max=32))
            assert_same((whole * 2).cpu(), result.full_tensor(), f"{rows} rows")
        return counter.graphs

    assert_on_ranks([1] * world.size, world.run(body))


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


@requirement(
    "DYN-MARK-63",
    "With both dimensions of DTensors marked as dynamic, code with its backward is compiled once for each branch on a "
    "size.",
    source="torch._dynamo.mark_dynamic: tensor subclasses; test_dtensor_compile.py: test_dtensor_dynamic_recompiles",
)
@pytest.mark.world(2)
def test_both_dimensions(world: World) -> None:
    """Use a function in four sizes, of which the last takes another branch; compare gradients with uncompiled code."""

    def everything(given: list[Any]) -> list[Any]:
        factor = 3 if given[0].shape[0] > 24 else 2
        return [*(d * d * factor for d in given), (given[0] * factor).full_tensor()]

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        compiled, counter = dynamo.compiled(everything)
        for shape, graphs in [((4, 6), 1), ((6, 8), 1), ((10, 4), 1), ((32, 6), 2)]:
            found = []
            for call in (everything, compiled):
                locals_ = [
                    dyadic(*shape, key=(k, rank.index), dtype=torch.float32, span=2).to(rank.device).requires_grad_()
                    for k in range(len(PLACEMENTS))
                ]
                given = [
                    dynamo.marked("dynamic", DTensor.from_local(x, mesh, [p], run_check=False), (0, 1))
                    for x, p in zip(locals_, PLACEMENTS, strict=True)
                ]
                results = call(given)
                ends = [y.to_local() if isinstance(y, DTensor) else y for y in results]
                torch.autograd.backward(ends, [torch.full_like(y, 1 + k) for k, y in enumerate(ends)])
                found.append(([y.shape for y in results], [x.grad for x in locals_]))
            (shapes, gradients), (others, grads) = found
            assert shapes == others, shape
            for placement, one, other in zip(PLACEMENTS, gradients, grads, strict=True):
                assert one is not None
                assert other is not None
                assert_same(one + 0, other + 0, f"{placement}, {shape}")
            assert counter.graphs == graphs, shape

    world.run(body)


@requirement(
    "DYN-MARK-64",
    "A product of DTensors whose sizes are marked as unbacked has the placements and values of uncompiled code.",
    source="torch._dynamo.decorators.mark_unbacked; test_dtensor_compile.py: test_dtensor_unbacked_matmuls",
)
@requirement(
    "DYN-MARK-65",
    "A product of DTensors whose sizes are marked as unbacked is compiled once for all sizes.",
    source="torch._dynamo.decorators.mark_unbacked; test_dtensor_compile.py: test_dtensor_matmul_zero_size_shards",
)
@pytest.mark.world(2)
def test_unbacked_products(world: World) -> None:
    """Multiply replicated matrices, and those sharded by the inner or an outer dimension, in several sizes."""
    layouts: list[tuple[Placement, Placement, Placement]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(1), Shard(0), Partial()),
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
    ]

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def made(placement: Placement, rows: int, columns: int, *key: Any) -> Any:
            whole = dyadic(rows, columns, key=key, dtype=torch.float32).to(rank.device)
            return distribute_tensor(whole, mesh, [placement], src_data_rank=None)

        for first, second, right in layouts:
            compiled, counter = dynamo.compiled(torch.mm)
            for number, (rows, inner, columns) in enumerate([(8, 8, 8), (3, 4, 2), (6, 2, 5), (5, 8, 3)]):
                a, b = made(first, rows, inner, "a"), made(second, inner, columns, "b")
                if number == 0:
                    dynamo.marked("unbacked", a, (0, 1))
                    dynamo.marked("unbacked", b, (0, 1))
                what = f"{first}, {second}, {rows} x {inner} x {columns}"
                found, expected = compiled(a, b), torch.mm(a, b)
                assert found.placements == expected.placements == (right,), what
                assert found.shape == expected.shape, what
                assert_same(expected.full_tensor() + 0, found.full_tensor() + 0, what)
                assert counter.graphs == 1, what

    world.run(body)


def _result(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dynamo.graph_break()
    return y + 1


def _two_results(x: torch.Tensor) -> torch.Tensor:
    y, z = x * 2, x.sum(1)
    dynamo.graph_break()
    return y + z[:, None]


def _collected(x: torch.Tensor) -> torch.Tensor:
    y = functional.all_gather_tensor(x, 0, dist.group.WORLD) * 2
    dynamo.graph_break()
    return y.sum(0) + x


BROKEN = (_result, _two_results, _collected)
"""Functions whose second graph is given results of the first."""


@requirement(
    "DYN-MARK-5000",
    "A dimension that mark_dynamic has marked remains dynamic after a graph break, in results of the graph before it.",
    source="torch._dynamo.mark_dynamic; torch.compile: fullgraph=False",
)
@pytest.mark.world(2)
def test_breaks(world: World) -> None:
    """Break the graph between parts that use one result or two; call with several sizes, once with a backward."""

    def body(rank: Rank) -> None:
        for function in BROKEN:
            backward = function is _two_results
            compiled, counter = dynamo.compiled(function, fullgraph=False)
            for shape in SHAPES[0]:
                found = []
                for run in function, compiled:
                    x = dyadic(*shape, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_(backward)
                    y = run(dynamo.marked("dynamic", x, 0))
                    if backward:
                        y.sum().backward()
                    found.append((y.detach(), x.grad))
                for one, other in zip(*found, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None and other is not None:
                        assert_same(one, other, f"{function.__name__.strip('_')}, {shape}")
            assert counter.graphs == 2, function.__name__.strip("_")

    world.run(body)
