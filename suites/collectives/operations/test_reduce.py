"""reduce."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import OPS, dtypes_of, for_every_root, repeated, shaped, swept


@requirement(
    "COLL-REDUCE-01",
    "After reduce the destination holds the reduction of all ranks' tensors, whatever the op, dtype or count.",
    source="torch.distributed.reduce",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(1, 2, 3, 5)
def test_destination_has_the_reduction(world: World, op: str, thorough: bool) -> None:
    """Test every dtype at many counts; the last rank is the destination."""
    assert_right(world, swept(Case("reduce", op, root=world.size - 1), dtypes_of(op), thorough))


@requirement(
    "COLL-REDUCE-02",
    "Any rank can be the destination of reduce, given by its global rank or by its rank in the group.",
    source="torch.distributed.reduce",
)
@pytest.mark.world(1, 2, 3, 4)
def test_every_destination(world: World) -> None:
    """Each rank in turn is the destination."""
    assert_right(world, for_every_root(Case("reduce", repeats=2), world.size))


@requirement(
    "COLL-REDUCE-03",
    "Repeated calls of reduce are correct for tensors of any shape or size.",
    source="torch.distributed.reduce",
)
@pytest.mark.world(2, 3)
def test_shapes_and_sizes(world: World, thorough: bool) -> None:
    """Test shapes from none to three dimensions; large tensors, repeated."""
    assert_right(world, [*shaped(Case("reduce", root=1)), *repeated(Case("reduce", root=1), thorough)])


class Labelled(torch.Tensor):
    """A tensor with another class, which goes through ``__torch_function__``."""


@requirement(
    "COLL-SUBCLASS-01",
    "Reductions of a tensor of a subclass have the operation that they are given.",
    source="torch.distributed: all_reduce, reduce; torch.overrides",
)
@pytest.mark.parametrize("name", ["all_reduce", "reduce"])
@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN"])
@pytest.mark.world(2, 3)
def test_subclass(world: World, op: str, name: str) -> None:
    """Rank 0 reads the result."""

    def body(rank: Rank) -> float:
        tensor = torch.full((2,), 1.0 + rank.index, device=rank.device).as_subclass(Labelled)
        reduction = getattr(dist.ReduceOp, op)
        if name == "reduce":
            dist.reduce(tensor, dst=0, op=reduction)
        else:
            dist.all_reduce(tensor, op=reduction)
        return float(tensor.as_subclass(torch.Tensor)[0])

    ranks = range(1, world.size + 1)
    assert world.run(body)[0] == {"SUM": sum(ranks), "MAX": max(ranks), "MIN": min(ranks)}[op]
