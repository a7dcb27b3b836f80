"""HSDP's reduction, groups on hosts, and cold starts: what is timed, and which wrong values are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Pool, Rank, World, WorldSpec
from harness.bench.figures import HSDP, busbw
from harness.bench.measuring import starts
from harness.bench.measuring.collectives import Prepared, Timed, hosts_of, timed_on
from harness.bench.measuring.sweeps import two_levels
from harness.bench.measuring.timing import ONCE, Effort

LITTLE = Effort(rounds=2, visits=2, seconds=0.001, least=2, most=3, warm=0.01)


@pytest.fixture
def four(pool: Pool) -> Iterator[World]:
    found = pool.acquire(WorldSpec(4, record=False))
    yield found
    found.kill()


@pytest.mark.parametrize(
    "wrong", [{"collective": "all_reduce"}, {"mode": "async"}, {"place": "in"}, {"group": (0, 1, 2, 3)}]
)
def test_what_has_no_two_levels(wrong: dict[str, Any]) -> None:
    """Only a reduce_scatter of the whole world has them."""
    with pytest.raises(ValueError, match="two levels: reduce_scatter_tensor of the whole world"):
        Timed(**{"collective": "reduce_scatter_tensor", "bytes": 1024, "shards": 2, **wrong})


def launched(rank: Rank, timed: Timed) -> list[tuple[str, int]]:
    """The collectives of one call, each with the number of its ranks."""
    seen: list[tuple[str, int]] = []
    scatter, reduce = dist.reduce_scatter_tensor, dist.all_reduce
    dist.reduce_scatter_tensor = lambda *a, group, **o: (seen.append(("rs", group.size())), scatter(*a, group=group))
    dist.all_reduce = lambda *a, group, **o: (seen.append(("ar", group.size())), reduce(*a, group=group))
    prepared = Prepared(rank, timed)
    assert prepared.problem == ""
    seen.clear()
    prepared.call()
    dist.reduce_scatter_tensor, dist.all_reduce = scatter, reduce
    prepared.close()
    return seen


def test_two_levels(four: World) -> None:
    """One call is a reduce_scatter of two neighbors, then an all_reduce of the two with the same shard."""
    assert four.run(launched, two_levels(1 << 12, 4)) == [[("rs", 2), ("ar", 2)]] * 4


@pytest.mark.parametrize("size", [8 << 2, 40_004, 1 << 20])
def test_a_figure_of_two_levels(four: World, size: int) -> None:
    """It has the gradients' bytes; the variant says how many replicas of how many shards."""
    found = timed_on(four, two_levels(size, 4), LITTLE)
    assert found.series.operation == HSDP
    assert dict(found.series.variant)["replicas"] == "2 of 2 shards"
    assert size - 16 < found.series.bytes <= size
    assert busbw(HSDP, found.series.bytes, 1.0, 4) == found.series.bytes / 1e9
    assert not found.refused


def without_the_second_level(rank: Rank) -> None:
    """From now on the all_reduce between replicas does nothing."""
    dist.all_reduce = lambda tensor, *args, **options: None


def with_a_lost_element(rank: Rank) -> None:
    """From now on rank 3's reduce_scatter loses its last element."""
    right = dist.reduce_scatter_tensor

    def wrong(output: torch.Tensor, *args: Any, **options: Any) -> None:
        right(output, *args, **options)
        output[-1] *= 1 if rank.index < 3 else 3

    dist.reduce_scatter_tensor = wrong


@pytest.mark.parametrize(
    ("breaks", "says"),
    [(without_the_second_level, "rank 0: the first call"), (with_a_lost_element, "rank 1: the first call")],
)
def test_wrong_values_on_a_level(four: World, breaks: Any, says: str) -> None:
    """A level that gives wrong values is noticed, and the ranks are named."""
    four.run(breaks)
    with pytest.raises(AssertionError, match=f"wrong values\n{says}"):
        timed_on(four, two_levels(1 << 12, 4), ONCE)


def test_on_how_many_hosts() -> None:
    """Figures of worlds over several hosts say how many hosts their ranks are on."""
    near, far = Timed("all_reduce", 1024, group=(0, 1)), Timed("all_reduce", 1024, group=(1, 3))
    spread, local = (World(WorldSpec(4, hosts=hosts), pytest.fail) for hosts in (2, 1))
    assert [hosts_of(local), hosts_of(spread), hosts_of(spread, (0, 1)), hosts_of(spread, (1, 3))] == [
        "",
        "2 of 2",
        "1 of 2",
        "2 of 2",
    ]
    names = {timed.series(world).name for timed in (near, far) for world in (spread, local)}
    assert len(names) == 4
    assert sum("hosts" in name for name in names) == 2


def test_starts(two: World) -> None:
    """Each set of ranks has one first collective, and as many other starts as rounds; ranks are fresh each time."""
    two.run(lambda rank: dist.all_reduce(torch.ones(1)))
    before = two.started
    found = {m.series.operation: m for m in starts.timed_on(two, LITTLE)}
    assert two.started - before == 2
    assert {name: [len(r) for r in m.samples] for name, m in found.items()} == {
        starts.FIRST: [1, 1],
        starts.GROUP: [2, 2],
        starts.AGAIN: [2, 2],
    }
    assert all(seconds > 0 for m in found.values() for seconds in m.iterations())
    assert all(len(ranks) == 2 for m in found.values() for one in m.samples for ranks in one)


def test_wrong_values_of_a_start(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new group that does not sum is told."""
    right = starts.on_rank

    def wrong(rank: Rank, repeats: int) -> starts.Found:
        reduce = dist.all_reduce
        dist.all_reduce = lambda tensor, group=None: reduce(tensor, group=group) if group is None else None
        return right(rank, repeats)

    monkeypatch.setattr(starts, "on_rank", wrong)
    with pytest.raises(AssertionError, match="first collective of a group gives wrong values\nrank 0: start.group"):
        starts.timed_on(two, ONCE)
