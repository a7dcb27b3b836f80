"""reduce_scatter and reduce_scatter_tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import Case, inputs, outputs
from harness.stacks.collectives import assert_right, reduction
from suites.collectives.cases import OPS, dtypes_of, repeated, shaped, swept


@requirement(
    "COLL-REDUCESCATTER-01",
    "After reduce_scatter rank i holds the reduction of the i-th tensors of all ranks' lists.",
    source="torch.distributed.reduce_scatter",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 5)
@pytest.mark.each_choice
def test_of_lists(world: World, op: str, thorough: bool) -> None:
    """Test every dtype at many counts."""
    assert_right(world, swept(Case("reduce_scatter", op), dtypes_of(op), thorough))


@requirement(
    "COLL-REDUCESCATTER-02",
    "After reduce_scatter_tensor rank i holds the i-th chunk of the reduction of all ranks' tensors.",
    source="torch.distributed.reduce_scatter_tensor",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 4, 5)
@pytest.mark.each_choice
def test_of_tensors(world: World, op: str, thorough: bool) -> None:
    """Test every dtype at many counts, joined along dimension 0."""
    assert_right(world, swept(Case("reduce_scatter_tensor", op), dtypes_of(op), thorough))


@requirement(
    "COLL-REDUCESCATTER-03",
    "Repeated calls of reduce_scatter or reduce_scatter_tensor are correct for tensors of any shape or size.",
    source="torch.distributed.reduce_scatter_tensor",
)
@pytest.mark.world(2, 3)
def test_shapes_and_sizes(world: World, thorough: bool) -> None:
    """Test shapes from none to three dimensions, joined along dimension 0; large tensors, repeated."""
    joined = Case("reduce_scatter_tensor", repeats=2)
    cases = [*shaped(Case("reduce_scatter", repeats=2)), *shaped(joined, [(1,), (3, 5), (2, 0, 3)])]
    assert_right(world, [*cases, *repeated(Case("reduce_scatter"), thorough), *repeated(joined, thorough)])


@requirement(
    "COLL-REDUCESCATTER-04",
    "reduce_scatter_tensor accepts an input with one more dimension than the output.",
    source="torch.distributed.reduce_scatter_tensor: 'a stack of the output tensors along the primary dimension'",
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=["scalar", "one", "matrix"])
@pytest.mark.world(1, 2, 3)
def test_stacked(world: World, shape: tuple[int, ...]) -> None:
    """The input has the shape [world size, *shape]."""
    assert_right(world, [Case("reduce_scatter_tensor", stacked=True, shape=shape)])


@requirement(
    "COLL-REDUCESCATTER-05",
    "reduce_scatter_single gives the same result as reduce_scatter_tensor.",
    source="torch.distributed.reduce_scatter_single",
)
@pytest.mark.needs(collective="reduce_scatter_tensor", torch="torch.distributed.reduce_scatter_single")
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.world(3)
def test_newer_name(world: World, ranks: tuple[int, ...]) -> None:
    """The calls are synchronous or asynchronous: SUM of floats, MAX of integers."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        for call, (op, dtype, shape) in enumerate([("SUM", torch.float32, (7,)), ("MAX", torch.int64, (3, 5))]):
            case = Case("reduce_scatter_tensor", op, dtype, shape)
            (given,), (right,) = inputs(case, size, member, call), outputs(case, size, member, call)
            output = torch.full_like(right, 5, device=rank.device)
            work = dist.reduce_scatter_single(
                output, given.to(rank.device), op=reduction(op), group=group, async_op=call > 0
            )
            if work is not None:
                work.wait()
            assert_same(right, output, str(case))

    world.run(body)


@requirement(
    "COLL-REDUCESCATTER-06",
    "reduce_scatter takes parts of a different size for each rank, including empty ones.",
    source="torch.distributed.reduce_scatter; test_c10d_gloo.py: test_reduce_scatter; test_c10d_ops_nccl.py: "
    "test_reduce_scatter_v",
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.world(3)
def test_uneven(world: World, ranks: tuple[int, ...]) -> None:
    """The part for each rank has one row more than the one before, or less; with several operations and dtypes."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        me, size = ranks.index(rank.index), len(ranks)
        for op, dtype in (("SUM", torch.float32), ("MAX", torch.int64), ("PRODUCT", torch.float64)):
            for rows in ([*range(size)], [2 * (size - i) for i in range(size)], [7, *[1] * (size - 1)]):
                for waits in (False, True):

                    def part(sender: int, receiver: int) -> torch.Tensor:
                        count = rows[receiver]  # noqa: B023 - called within the turn
                        return (torch.arange(3.0 * count).view(count, 3) + 1 + 2 * sender).to(dtype)  # noqa: B023

                    given = [part(me, receiver).to(rank.device) for receiver in range(size)]
                    kept = [tensor.clone() for tensor in given]
                    every = torch.stack([part(sender, me) for sender in range(size)])
                    right = {"SUM": every.sum(0), "MAX": every.amax(0), "PRODUCT": every.prod(0)}[op]
                    out = torch.full_like(right, 5, device=rank.device)
                    work = dist.reduce_scatter(out, given, reduction(op), group, async_op=waits)
                    if waits:
                        work.wait()
                    assert_same(right.to(dtype), out, f"{op}, {rows}, async: {waits}")
                    for before, after in zip(kept, given, strict=True):
                        assert_same(before, after, "the input")

    world.run(body)
