"""all_reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import OPS, dtypes_of, repeated, shaped, swept


@requirement(
    "COLL-ALLREDUCE-01",
    "After all_reduce every rank holds the reduction of all ranks' tensors, whatever the op, dtype or count.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_every_rank_has_the_reduction(world: World, op: str, thorough: bool) -> None:
    """Compare every dtype at many counts with an exact fold, bit for bit."""
    assert_right(world, swept(Case("all_reduce", op), dtypes_of(op), thorough))


@requirement(
    "COLL-ALLREDUCE-02",
    "Repeated calls of all_reduce are correct for tensors of any shape, including empty or zero-dimensional ones.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.world(1, 2, 3, 4)
def test_shapes(world: World) -> None:
    """Tensors have up to three dimensions, and two calls have different data."""
    assert_right(world, shaped(Case("all_reduce", repeats=2)))


@requirement(
    "COLL-ALLREDUCE-03",
    "Repeated calls of all_reduce are correct for large tensors.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.world(2, 3)
def test_large_and_repeated(world: World, thorough: bool) -> None:
    """Sizes exceed protocol switches, and every call has different data."""
    assert_right(world, repeated(Case("all_reduce"), thorough))


@requirement(
    "COLL-ALLREDUCE-04",
    "all_reduce of sparse tensors gives every rank their sum, at the indices of all ranks, or is refused.",
    source="torch.distributed.all_reduce; torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: AsyncSparseAllreduceWork",
)
@pytest.mark.world(1, 2, 3)
def test_sparse(world: World) -> None:
    """Indices differ, overlap, occur twice or are none, in one or two sparse dimensions, with dense ones or not."""

    def given(kind: str, rank: int, dtype: torch.dtype) -> torch.Tensor:
        indices, shape = {
            "different": ([[rank, 4 + rank]], (8,)),
            "overlapping": ([[rank, rank + 1, 7]], (8,)),
            "equal": ([[1, 6]], (8,)),
            "twice": ([[rank, 5, rank]], (8,)),
            "none on rank 0": ([[2] * rank], (8,)),
            "none": ([[]], (8,)),
            "rows": ([[rank, 3]], (4, 2)),
            "two dimensions": ([[rank, 0, 2], [1, rank, 2]], (3, 3)),
        }[kind]
        table = torch.tensor(indices, dtype=torch.int64)
        values = torch.arange(table.size(1) * torch.Size(shape[len(indices) :]).numel()).to(dtype) + 1 + 10 * rank
        return torch.sparse_coo_tensor(table, values.view(table.size(1), *shape[len(indices) :]), shape)

    kinds = ("different", "overlapping", "equal", "twice", "none on rank 0", "none", "rows", "two dimensions")

    def body(rank: Rank) -> list[str]:
        ends = []
        for kind in kinds:
            for dtype in (torch.float32, torch.float64, torch.int64):
                everyone = [given(kind, i, dtype) for i in range(rank.size)]
                whole = torch.stack([tensor.to_dense() for tensor in everyone]).sum(0, dtype=dtype)
                for way in ("sync", "async"):
                    tensor = given(kind, rank.index, dtype).to(rank.device)
                    try:
                        work = dist.all_reduce(tensor, async_op=way == "async")
                        if work is not None:
                            work.wait()
                    except (RuntimeError, NotImplementedError):
                        ends.append("refused")
                        continue
                    ends.append("right")
                    assert tensor.is_sparse
                    assert_same(whole, tensor.to_dense(), f"{kind}, {dtype}, {way}")
                    indices = {tuple(index) for one in everyone for index in one.coalesce().indices().t().tolist()}
                    assert {tuple(index) for index in tensor.coalesce().indices().t().tolist()} == indices, kind
        return ends

    ends = world.run(body)
    assert ends == ends[:1] * world.size


@requirement(
    "COLL-ALLREDUCE-05",
    "all_reduce of sparse tensors with another operation than SUM is refused, or right.",
    source="torch.distributed.all_reduce; test_c10d_gloo.py: test_sparse_allreduce_checks",
)
@pytest.mark.world(2)
def test_sparse_operations(world: World) -> None:
    """Every operation, waited for at once or later; then sums of sparse and of dense tensors."""

    def body(rank: Rank) -> None:
        def given(of: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.sparse_coo_tensor([[0, 2]], torch.tensor([6, 5] if of else [3, 2]).to(dtype), (3,))

        rights = {"PRODUCT": [18, 0, 10], "MIN": [3, 0, 2], "MAX": [6, 0, 5], "AVG": [4.5, 0, 3.5]}
        rights |= {"BAND": [2, 0, 0], "BOR": [7, 0, 7], "BXOR": [5, 0, 7], "SUM": [9, 0, 7]}
        for op, right in rights.items():
            dtype = torch.float32 if op == "AVG" else torch.int64
            for waits in (False, True):
                tensor = given(rank.index, dtype).to(rank.device)
                try:
                    work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=waits)
                    if waits:
                        work.wait()
                except (RuntimeError, ValueError, NotImplementedError):
                    right = given(rank.index, dtype).to_dense().tolist()
                assert tensor.to_dense().tolist() == right, op
        total = torch.ones(2, device=rank.device)
        dist.all_reduce(total)
        assert total.tolist() == [2, 2]

    world.run(body)


@requirement(
    "COLL-ALLREDUCE-4411",
    "The former name of the operations has those of the present one, with a warning that it is deprecated.",
    source="torch.distributed.reduce_op: 'Deprecated enum-like class for reduction operations: SUM, PRODUCT, MIN, and "
    "MAX'",
)
@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
@spmd(2)
def test_former_operations(rank: Rank, op: str) -> None:
    """Reduce by the operation of either name."""
    right = {"SUM": [5.0, 1.0], "PRODUCT": [6.0, -2.0], "MIN": [2.0, -1.0], "MAX": [3.0, 2.0]}[op]
    given = [[2.0, -1.0], [3.0, 2.0]][rank.index]
    with pytest.warns(FutureWarning, match="reduce_op"):
        former = getattr(dist.reduce_op, op)
    for reduction in former, getattr(dist.ReduceOp, op):
        tensor = torch.tensor(given, device=rank.device)
        dist.all_reduce(tensor, op=reduction, group=dist.group.WORLD)
        assert tensor.tolist() == right
