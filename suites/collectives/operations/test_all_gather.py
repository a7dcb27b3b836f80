"""all_gather and all_gather_into_tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import Case, inputs, outputs
from harness.stacks.collectives import assert_right
from suites.collectives.cases import DTYPES, repeated, shaped, swept


@requirement(
    "COLL-ALLGATHER-01",
    "After all_gather every rank holds every rank's tensor, in group order, whatever the dtype or count.",
    source="torch.distributed.all_gather",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_into_a_list(world: World, thorough: bool) -> None:
    """Test every dtype at many counts."""
    assert_right(world, swept(Case("all_gather"), DTYPES, thorough))


@requirement(
    "COLL-ALLGATHER-02",
    "all_gather_into_tensor concatenates all ranks' tensors along dimension 0, in group order.",
    source="torch.distributed.all_gather_into_tensor",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_into_a_tensor(world: World, thorough: bool) -> None:
    """Test every dtype at many counts."""
    assert_right(world, swept(Case("all_gather_into_tensor"), DTYPES, thorough))


@requirement(
    "COLL-ALLGATHER-05",
    "all_gather_into_tensor stacks all ranks' tensors if the output has one more dimension than the input.",
    source="torch.distributed.all_gather_into_tensor: 'a stack of all the input tensors along the primary dimension'",
)
@pytest.mark.world(1, 2, 3)
def test_stacked(world: World) -> None:
    """The output has the shape [world size, *shape]."""
    assert_right(world, [Case("all_gather_into_tensor", stacked=True)])


@requirement(
    "COLL-ALLGATHER-03",
    "Repeated calls of all_gather or all_gather_into_tensor are correct for tensors of any shape or size.",
    source="torch.distributed.all_gather",
)
@pytest.mark.world(2, 3)
def test_shapes_and_sizes(world: World, thorough: bool) -> None:
    """Test shapes from none to three dimensions; large tensors, repeated."""
    joined = Case("all_gather_into_tensor")
    cases = [*shaped(Case("all_gather", repeats=2)), *repeated(Case("all_gather"), thorough)]
    assert_right(world, [*cases, *shaped(joined, [(1,), (3, 5), (2, 0, 3)]), *repeated(joined, thorough)])


@requirement(
    "COLL-ALLGATHER-04",
    "all_gather accepts tensors of a different size from each rank.",
    source="torch.distributed.all_gather: 'Uneven sized tensors are supported'",
)
@spmd(2, 3)
def test_uneven(rank: Rank) -> None:
    """Rank r contributes r + 1 elements."""
    expected = [torch.arange(i + 1.0) + 10 * i for i in range(rank.size)]
    received = [torch.full_like(e, -1, device=rank.device) for e in expected]
    dist.all_gather(received, expected[rank.index].to(rank.device, copy=True))
    for sender, (right, tensor) in enumerate(zip(expected, received, strict=True)):
        assert_same(right, tensor, f"from rank {sender}")


@requirement(
    "COLL-ALLGATHER-06",
    "all_gather_single gives the same result as all_gather_into_tensor.",
    source="torch.distributed.all_gather_single",
)
@pytest.mark.needs(collective="all_gather_into_tensor", torch="torch.distributed.all_gather_single")
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.world(3)
def test_newer_name(world: World, ranks: tuple[int, ...]) -> None:
    """The calls are synchronous or asynchronous, on floats or integers."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        for call, (op, dtype, shape) in enumerate([("SUM", torch.float32, (7,)), ("SUM", torch.int64, (3, 5))]):
            case = Case("all_gather_into_tensor", op, dtype, shape)
            (given,), (right,) = inputs(case, size, member, call), outputs(case, size, member, call)
            output = torch.full_like(right, 5, device=rank.device)
            work = dist.all_gather_single(output, given.to(rank.device), group=group, async_op=call > 0)
            if work is not None:
                work.wait()
            assert_same(right, output, str(case))

    world.run(body)
