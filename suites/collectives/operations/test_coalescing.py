"""Coalescing managers: empty and used blocks one after the other, of several groups, with what they do not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import Case, inputs, outputs
from harness.stacks.collectives import assert_right, claimed_cases, coalescing_manager, reduction
from suites.collectives.cases import COALESCED, every_collective

OPS = ("SUM", "MAX", "MIN", "PRODUCT")


def calls(name: str, op: str, dtype: torch.dtype, group: Any, member: int, size: int, rank: Rank) -> list[Any]:
    """Issue a collective with tensors of three sizes, and return each expected result with the tensor for it."""
    issued = []
    for count in (1, 4, 33):
        case = Case(name, op, dtype, (count,))
        given = inputs(case, size, member)[0].to(rank.device)
        right = outputs(case, size, member)[0]
        out = given if name == "all_reduce" else torch.full_like(right, -1).to(rank.device)
        options: dict[str, Any] = {"group": group} | ({} if "gather" in name else {"op": reduction(op)})
        getattr(dist, name)(*((given,) if name == "all_reduce" else (out, given)), **options)
        issued.append((right, out, f"{case}"))
    return issued


@requirement(
    "COLL-COALESCED-05",
    "Collectives after a coalescing block work as before it, whether or not anything was issued in it.",
    source="torch.distributed: _coalescing_manager",
)
@pytest.mark.parametrize("waits", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.world(3)
def test_after_blocks(world: World, ranks: tuple[int, ...], waits: bool) -> None:
    """Every collective follows empty blocks, blocks of one call and of three calls, of a group and of the world."""

    def body(rank: Rank) -> None:
        made = dist.new_group(list(ranks))
        group = None if len(ranks) == 3 else made
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        for _ in range(2):
            for name in COALESCED:
                with coalescing_manager(group, async_ops=waits) as manager:
                    pass
                manager.wait()
                for right, out, label in calls(name, "SUM", torch.float32, group, member, size, rank):
                    assert_same(right, out, f"{label}, after an empty block")
                with coalescing_manager(group, async_ops=waits) as manager:
                    issued = calls(name, "SUM", torch.float32, group, member, size, rank)
                manager.wait()
                for right, out, label in issued:
                    assert_same(right, out, f"{label}, in a block")
                for right, out, label in calls(name, "SUM", torch.float32, group, member, size, rank):
                    assert_same(right, out, f"{label}, after a block")

    world.run(body)
    assert_right(world, every_collective())


@requirement(
    "COLL-COALESCED-06",
    "The end of a coalescing block without async_ops waits for its collectives.",
    source="torch.distributed: _coalescing_manager: async_ops",
)
@requirement(
    "COLL-COALESCED-07",
    "Coalesced reductions have the operation and dtype that they are given.",
    source="torch.distributed: _coalescing_manager",
)
@pytest.mark.parametrize("waits", [True, False], ids=["async", "sync"])
@pytest.mark.world(2, 3)
def test_operations_in_blocks(world: World, waits: bool) -> None:
    """Every operation, of whole, floating-point and complex numbers; one block after the other."""

    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.complex64)
    cases = claimed_cases(
        [
            Case(name, op, dtype)
            for name in COALESCED
            for op in (OPS if "gather" not in name else OPS[:1])
            for dtype in dtypes
            if op == "SUM" or not dtype.is_complex
        ]
    )

    def body(rank: Rank) -> None:
        for case in cases:
            with coalescing_manager(async_ops=waits) as manager:
                issued = calls(case.collective, case.op, case.dtype, None, rank.index, rank.size, rank)
            if waits:
                manager.wait()
            for right, out, label in issued:
                assert_same(right, out, label)

    world.run(body)


@requirement(
    "COLL-COALESCED-08",
    "A coalescing block takes collectives of its own group only, and those of other groups run as usual.",
    source="torch.distributed: _coalescing_manager: group",
)
@spmd(3)
def test_blocks_of_two_groups(rank: Rank) -> None:
    """Blocks of the world and of a subgroup are inside each other; collectives of the other group are done at once."""
    subgroup = dist.new_group([1, 2])
    everyone: list[tuple[Any, int, int]] = [(None, rank.index, 3)]
    some: list[tuple[Any, int, int]] = [(subgroup, rank.index - 1, 2)] if rank.index > 0 else []

    def issue(name: str, groups: list[tuple[Any, int, int]]) -> list[Any]:
        return [each for of in groups for each in calls(name, "SUM", torch.float32, *of, rank)]

    for name in COALESCED:
        with coalescing_manager(async_ops=True) as manager:
            held = issue(name, everyone)
            for right, out, label in issue(name, some):
                assert_same(right, out, f"{label}, of another group than the block's")
        manager.wait()
        for right, out, label in held:
            assert_same(right, out, f"{label}, of the block")
        if not some:
            continue
        with coalescing_manager(subgroup, async_ops=True) as inner:
            held = issue(name, some)
        inner.wait()
        for right, out, label in held:
            assert_same(right, out, f"{label}, of a subgroup's block")
    total = torch.ones(1, device=rank.device)
    dist.all_reduce(total)
    assert total.item() == 3


@requirement(
    "COLL-COALESCED-09",
    "A coalescing block refuses collectives of two kinds, and the group stays usable.",
    source="torch.distributed: _coalescing_manager: 'requires all collectives to be the same type'",
)
@pytest.mark.needs(torch="torch.distributed.barrier(timeout)")  # which came together with this refusal
@spmd(2)
def test_refused_kinds(rank: Rank) -> None:
    """Mix kinds in both orders; each kind follows alone."""
    for names in (COALESCED[:2], COALESCED[1:], COALESCED[::-2]):
        with pytest.raises((RuntimeError, ValueError)), coalescing_manager():
            _ = [calls(name, "SUM", torch.float32, None, rank.index, 2, rank) for name in names]
        for name in names:
            for right, out, label in calls(name, "SUM", torch.float32, None, rank.index, 2, rank):
                assert_same(right, out, f"{label}, after a block of two kinds")


@requirement(
    "COLL-COALESCED-10",
    "A second coalescing block within one of the same group is refused once the first has collectives.",
    source="torch.distributed: _coalescing_manager",
)
@spmd(2)
def test_refused_blocks(rank: Rank) -> None:
    """Begin a block within another, and use the outer one."""
    with coalescing_manager(async_ops=True) as manager:
        issued = calls("all_reduce", "SUM", torch.float32, None, rank.index, 2, rank)
        with pytest.raises((RuntimeError, ValueError)), coalescing_manager():
            pass
    manager.wait()
    for right, out, label in issued:
        assert_same(right, out, f"{label}, of the outer block")


@requirement(
    "COLL-COALESCED-11",
    "Collectives of lists leave the tensors of the lists in place, with any operation, waited for at once or later.",
    source="torch.distributed.all_reduce_coalesced, all_gather_coalesced: op, group, async_op",
)
@spmd(3)
def test_lists_in_a_subgroup(rank: Rank) -> None:
    """Reduce and gather lists in a subgroup and in the world."""
    subgroup = dist.new_group([1, 2])
    for group, ranks in ((None, [0, 1, 2]), (subgroup, [1, 2])):
        if rank.index not in ranks:
            continue
        member, size = ranks.index(rank.index), len(ranks)
        for waits in (True, False):
            for op in (*OPS, "AVG", "BAND", "BOR", "BXOR"):
                dtype = torch.int64 if op[0] == "B" else torch.float32
                cases = claimed_cases([Case("all_reduce", op, dtype, (count,)) for count in (1, 4, 33)])
                tensors = moved((inputs(case, size, member)[0] for case in cases), rank.device)
                kept = list(tensors)
                work = dist.all_reduce_coalesced(tensors, reduction(op), group, async_op=waits)
                if waits:  # for a future, which has the results
                    assert [result.tolist() for result in work.wait()] == [tensor.tolist() for tensor in tensors]
                assert all(tensor is same for tensor, same in zip(tensors, kept, strict=True))
                for case, tensor in zip(cases, tensors, strict=True):
                    assert_same(outputs(case, size, member)[0], tensor, f"{case}, async: {waits}")
            cases = [Case("all_gather", shape=(count,)) for count in (1, 4, 33)]
            given = moved((inputs(case, size, member)[0] for case in cases), rank.device)
            gathered = [[torch.full_like(tensor, -1) for tensor in given] for _ in ranks]
            work = dist.all_gather_coalesced(gathered, given, group, async_op=waits)
            if waits:
                work.wait()
            for number, case in enumerate(cases):
                for sender, right in enumerate(outputs(case, size, member)):
                    assert_same(right, gathered[sender][number], f"{case} from member {sender}, async: {waits}")
