"""Options of mark_unbacked, by which users tell the compiler that a size is unknown, as mark_dynamic has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional

SOURCE = "torch/_dynamo/decorators.py: mark_unbacked"


def fixed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks what needs four rows and four columns."""
    return functional.all_reduce(x + torch.ones(4, 4, device=x.device), "sum", dist.group.WORLD)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks."""
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD)


@requirement(
    "DYN-SIZE-6104",
    "With strict=True, mark_unbacked has an error raised by code that works for one size of a dimension alone.",
    source=f"{SOURCE}: 'strict: an error will be raised if the unbacked dimension is specialized'",
)
@pytest.mark.parametrize("dims", [0, [0], (0, 1)], ids=["number", "list", "tuple"])
@pytest.mark.world(2)
def test_strict(world: World, dims: Any) -> None:
    """Mark a dimension by its number, or in a list or a tuple; without strict, the code has this size."""

    def body(rank: Rank) -> None:
        def given() -> torch.Tensor:
            return torch.full((4, 4), 1.0 + rank.index, device=rank.device)

        function, _ = dynamo.compiled(fixed, backend="eager")
        assert_same(fixed(given()) + 0, function(dynamo.marked("unbacked", given(), dims)) + 0, "not strict")
        function, _ = dynamo.compiled(fixed, backend="eager")
        with pytest.raises(Exception, match="Constraints violated"):
            function(dynamo.marked("unbacked", given(), dims, strict=True))

    world.run(body)


@requirement(
    "DYN-SIZE-6105",
    "Code is compiled once more for a size in specialize_on, whichever function has marked the dimension.",
    source=f"{SOURCE}: specialize_on; torch/_dynamo/decorators.py: mark_dynamic",
)
@pytest.mark.parametrize("how", ["dynamic", "unbacked"])
@pytest.mark.world(2)
def test_specialized(world: World, how: str) -> None:
    """Mark rows with a size, by number or in a list; call with that size and others."""

    def body(rank: Rank) -> None:
        for dims in 0, [0]:
            function, counter = dynamo.compiled(summed, backend="eager")
            for rows in 8, 5, 8:
                x = torch.full((rows, 3), 1.0 + rank.index, device=rank.device)
                dynamo.marked(how, x, dims, specialize_on=[lambda n: n == 8])
                assert_same(summed(x.clone()) + 0, function(x) + 0, f"{rows} rows, {dims}")
            assert counter.graphs == 2, f"compiled {counter.graphs} times for {dims}"

    world.run(body)
