"""all_to_all and all_to_all_single."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right, functional
from suites.collectives.cases import DTYPES, repeated, shaped, swept


@requirement(
    "COLL-ALLTOALL-01",
    "After all_to_all rank i holds the i-th tensor of every rank's list, in group order.",
    source="torch.distributed.all_to_all",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_of_lists(world: World, thorough: bool) -> None:
    """Test every dtype at many counts."""
    assert_right(world, [*swept(Case("all_to_all"), DTYPES, thorough), *shaped(Case("all_to_all", repeats=2))])


@requirement(
    "COLL-ALLTOALL-02",
    "After all_to_all_single without split sizes rank i holds the i-th equal chunk of every rank's tensor, in "
    "group order.",
    source="torch.distributed.all_to_all_single",
)
@pytest.mark.world(1, 2, 3, 4, 5)
def test_of_tensors(world: World, thorough: bool) -> None:
    """Test every dtype at many counts; shapes with dimensions after the split one."""
    base = Case("all_to_all_single")
    assert_right(world, [*swept(base, DTYPES, thorough), *shaped(base, [(1,), (3, 5), (2, 0, 3), (1, 4, 2, 3)])])


@requirement(
    "COLL-ALLTOALL-03",
    "all_to_all and all_to_all_single exchange chunks of different sizes, including empty ones.",
    source="torch.distributed.all_to_all_single: input_split_sizes",
)
@pytest.mark.parametrize("collective", ["all_to_all", "all_to_all_single"])
@pytest.mark.world(1, 2, 3, 4)
def test_uneven(world: World, collective: str) -> None:
    """Chunks have 0, 1 or 2 rows, which differ in every call."""
    assert_right(world, shaped(Case(collective, uneven=True, repeats=3), [(1,), (1, 3), (1, 2, 2), (1, 0)]))


@requirement(
    "COLL-ALLTOALL-05",
    "all_to_all_single with split sizes accepts complex tensors.",
    source="torch.distributed.all_to_all_single: an example of it has complex tensors",
)
@pytest.mark.world(2)
def test_uneven_complex(world: World) -> None:
    """Exchange complex64 numbers in uneven chunks."""
    assert_right(world, [Case("all_to_all_single", uneven=True, dtype=torch.complex64, shape=(1, 2))])


@requirement(
    "COLL-ALLTOALL-04",
    "Repeated calls of all_to_all or all_to_all_single are correct for large tensors.",
    source="torch.distributed.all_to_all_single",
)
@pytest.mark.world(2, 3)
def test_large_and_repeated(world: World, thorough: bool) -> None:
    """Sizes exceed protocol switches, and every call has different data."""
    assert_right(world, [*repeated(Case("all_to_all"), thorough), *repeated(Case("all_to_all_single"), thorough)])


@requirement(
    "COLL-ALLTOALL-06",
    "all_to_all_single divides the side equally for which no split sizes are given.",
    source="torch.distributed.all_to_all_single: output_split_sizes: 'If None or empty', input_split_sizes",
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.parametrize("given", ["outputs", "inputs", "both", "neither"])
@pytest.mark.world(3)
def test_splits_of_one_side(world: World, given: str, ranks: tuple[int, ...]) -> None:
    """Senders, receivers, both or neither have parts of their own size; none, an empty list or a tuple; or a wait."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        me, size = ranks.index(rank.index), len(ranks)

        def rows(sender: int, receiver: int) -> int:
            return {"outputs": sender + 1, "inputs": receiver + 1, "both": sender + 2 * receiver, "neither": 2}[given]

        def part(sender: int, receiver: int) -> torch.Tensor:
            count = rows(sender, receiver)
            numbers = torch.arange(3.0 * count).reshape(count, 3)
            return numbers + 100 * sender + 1000 * receiver

        mine = torch.cat([part(me, receiver) for receiver in range(size)]).to(rank.device)
        right = torch.cat([part(sender, me) for sender in range(size)])
        received = [rows(sender, me) for sender in range(size)] if given in ("outputs", "both") else None
        sent = [rows(me, receiver) for receiver in range(size)] if given in ("inputs", "both") else None
        for nothing in (None, []):
            for waits in (False, True):
                out = torch.full_like(right, -1, device=rank.device)
                splits = [nothing if sizes is None else list(sizes) for sizes in (received, sent)]
                kept = mine.clone()
                work = dist.all_to_all_single(out, mine, *splits, group=group, async_op=waits)
                if waits:
                    work.wait()
                assert_same(right, out, f"splits {splits}, async: {waits}")
                assert_same(kept, mine, "input")
                assert splits == [nothing if sizes is None else sizes for sizes in (received, sent)]

    world.run(body)


ROWS = {
    "one keeps its rows": [[4, 0, 0], [0, 1, 3], [0, 3, 1]],
    "two keep their rows": [[1, 0, 0], [0, 2, 0], [3, 0, 1]],
    "all keep their rows": [[1, 0, 0], [0, 2, 0], [0, 0, 3]],
    "from one": [[1, 2, 3], [0, 0, 0], [0, 0, 0]],
    "to one": [[0, 2, 0], [0, 1, 0], [0, 3, 0]],
    "to the next": [[0, 2, 0], [0, 0, 1], [3, 0, 0]],
    "between two": [[0, 2, 0], [1, 0, 0], [0, 0, 0]],
    "none": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
}
"""How many rows each rank sends to each."""


@requirement(
    "COLL-ALLTOALL-4806",
    "all_to_all_single is correct if a rank keeps all of its rows, or sends or receives none, while others exchange.",
    source="torch.distributed.all_to_all_single: input_split_sizes, output_split_sizes",
)
@pytest.mark.parametrize(
    "way", ["sync", "async", pytest.param("functional", marks=pytest.mark.needs(features=["functional"]))]
)
@pytest.mark.world(3)
def test_ranks_without_exchange(world: World, way: str) -> None:
    """Exchange rows by each table, as tokens go to experts."""

    def body(rank: Rank) -> None:
        for name, table in ROWS.items():
            sent, received = table[rank.index], [row[rank.index] for row in table]
            right = torch.cat([torch.full((count, 2), float(sender)) for sender, count in enumerate(received)])
            mine = torch.full((sum(sent), 2), float(rank.index), device=rank.device)
            out = torch.full_like(right, -1, device=rank.device)
            if way == "functional":
                out = functional.wait_tensor(functional.all_to_all_single(mine, received, sent, dist.group.WORLD))
            else:
                work = dist.all_to_all_single(out, mine, received, sent, async_op=way == "async")
                if work is not None:
                    work.wait()
            assert_same(right, out, name)

    world.run(body, timeout=8)
