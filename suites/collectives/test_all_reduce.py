"""all_reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.oracles.exact import assert_same

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """float[7]: whole numbers, different for each rank and element, whose sums over a world every dtype can hold."""
    return torch.arange(7).mul(3).add(rank + 1).remainder(11).to(dtype)


def reduce_all(rank: Rank, dtype: torch.dtype) -> torch.Tensor:
    tensor = contribution(rank.index, dtype).to(rank.device)
    dist.all_reduce(tensor)
    return tensor


@requirement(
    "COLL-ALLREDUCE-01",
    "After all_reduce with SUM every rank holds the sum of all ranks' tensors, bitwise the same on all.",
    source="torch.distributed.all_reduce",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.world(1, 2, 3, 4)
def test_sum_of_all_ranks(world: World, dtype: torch.dtype) -> None:
    """The sum of small whole numbers is exact in every dtype and any order."""
    expected = sum(contribution(i, torch.int64) for i in range(world.size)).to(dtype)
    for index, tensor in enumerate(world.run(reduce_all, dtype)):
        assert_same(expected, tensor, f"rank {index}: all_reduce")
