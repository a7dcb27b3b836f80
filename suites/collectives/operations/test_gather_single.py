"""gather_single, which gathers into one tensor. PyTorch has it since 2.14."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import Case, inputs, poison
from suites.collectives.cases import DTYPES, SHAPES

pytestmark = pytest.mark.needs(collective="gather", torch="torch.distributed.gather_single")
NAMES = ("gather_single", "gather_into_tensor")


def _gathered(rank: Rank, case: Case, stacked: bool, name: str = "gather_single", call: int = 0) -> None:
    """Gather on the default group, and check what each rank holds afterwards."""
    parts = [inputs(case, rank.size, sender, call)[0] for sender in range(rank.size)]
    right = torch.stack(parts) if stacked else torch.cat([part.flatten() for part in parts])
    given = parts[rank.index].to(rank.device, copy=True)
    output = poison(tuple(right.shape), right.dtype).to(rank.device)
    arguments: Any = (given, output) if rank.index == case.root else (given,)
    work = getattr(dist, name)(*arguments, dst=case.root, async_op=call > 0)
    if work is not None:
        work.wait()
    assert_same(parts[rank.index], given, f"{case}: the input")
    if rank.index == case.root:
        assert_same(right, output, str(case))


@requirement(
    "COLL-GATHER-04",
    "gather_single writes every rank's tensor into one tensor of the destination, in group order, whatever the dtype.",
    source="torch.distributed.gather_single",
)
@pytest.mark.parametrize("stacked", [False, True], ids=["flat", "stacked"])
@pytest.mark.world(1, 2, 3)
def test_dtypes_and_shapes(world: World, stacked: bool) -> None:
    """Each rank is the destination in turn; calls are synchronous or asynchronous."""
    real = [dtype for dtype in DTYPES if not dtype.is_complex]
    cases = [Case("gather", dtype=dtype, shape=(7,)) for dtype in real]
    cases += [Case("gather", shape=shape) for shape in (*SHAPES, (0,), (66,))]

    def body(rank: Rank) -> None:
        for number, case in enumerate(cases):
            turn = number + stacked  # each form of the call begins with another name
            _gathered(rank, replace(case, root=number % rank.size), stacked, NAMES[turn % 2], call=turn % 3)

    world.run(body)


@requirement(
    "COLL-GATHER-05",
    "In a subgroup, gather_single takes its destination as a global rank or as a group rank.",
    source="torch.distributed.gather_single: dst, group_dst",
)
@pytest.mark.parametrize("by", ["dst", "group_dst"])
@pytest.mark.world(4)
def test_subgroup(world: World, by: str) -> None:
    """The group has the ranks 1, 2 and 3, each of which is the destination in turn."""

    def body(rank: Rank) -> None:
        members = [1, 2, 3]
        group = dist.new_group(members)
        if rank.index not in members:
            return
        names = NAMES if by == "dst" else NAMES[::-1]
        for (place, member), name in itertools.product(enumerate(members), names):
            output = torch.full((6,), -1.0, device=rank.device) if rank.index == member else None
            given = torch.tensor([rank.index, 10.0 * rank.index], device=rank.device)
            getattr(dist, name)(given, output, group=group, **{by: member if by == "dst" else place})
            if output is not None:
                assert output.tolist() == [1, 10, 2, 20, 3, 30]

    world.run(body)


@requirement(
    "COLL-GATHER-06",
    "gather_single refuses a missing, too small, too large or strided output on the destination, with a Python error.",
    source="torch.distributed.gather_single: gather_tensor",
)
@pytest.mark.parametrize("output", ["missing", "too-small", "too-large", "strided"])
@pytest.mark.world(1, 2)
def test_bad_output(world: World, output: str) -> None:
    """A later gather on the same group is right; no other rank takes part in the refused one."""

    def body(rank: Rank) -> None:
        case = Case("gather", shape=(4,))
        if rank.index == 0:
            bad = {
                "missing": None,
                "too-small": torch.zeros(4 * rank.size - 1, device=rank.device),
                "too-large": torch.zeros(4 * rank.size + 1, device=rank.device),
                "strided": torch.zeros(8 * rank.size, device=rank.device)[::2],
            }[output]
            with pytest.raises((ValueError, RuntimeError, TypeError)):
                dist.gather_single(torch.ones(4, device=rank.device), bad, dst=0)
        _gathered(rank, case, stacked=False, call=1)

    world.run(body)
