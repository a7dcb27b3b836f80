"""torch.distributed.collective_utils: values that ranks compute and give to all, and errors that all ranks raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import collective_utils

from fixtures.beginnings import started
from harness import Rank, World, assert_on_ranks, requirement, spmd
from suites.collectives.objects.test_object_kinds import FALSE, FULL

VALUES = (*FALSE, *(value for value in FULL if not callable(value)))

STAGES: dict[str, tuple[str | None, str | None]] = {
    "alike": ("load", "load"),
    "none": (None, None),
    "different": ("load", "save"),
    "missing": ("load", None),
}
"""Names of stages on two ranks."""


def same(right: Any, found: Any) -> None:
    assert type(found) is type(right), f"{right!r}: {found!r}"
    assert found == right, f"{right!r}: {found!r}"


@requirement(
    "COLL-OBJECT-26",
    "collective_utils.all_gather returns every rank's value in the group's order, whatever the value.",
    source="torch.distributed.collective_utils.all_gather: 'a list of synced data from all ranks'",
)
@requirement(
    "COLL-OBJECT-27",
    "collective_utils.broadcast returns the source's value on every rank, whatever the value.",
    source="torch.distributed.collective_utils.broadcast: 'the value after synchronization'",
)
@spmd(2)
def test_values(rank: Rank) -> None:
    """Give values, also those that are false, or functions, of which only the source's is called; with pg or alone."""
    pg, me = dist.group.WORLD, rank.index
    calls: list[Any] = []

    def made(value: Any) -> Any:
        def compute() -> Any:
            calls.append(value)
            return value

        return compute

    for number, value in enumerate(VALUES):
        pair = [value, VALUES[number - 1]]
        for data in (pair[me], made(pair[me])):
            for found, right in zip(collective_utils.all_gather(data, pg=pg), pair, strict=True):
                same(right, found)
            for found in collective_utils.all_gather(data, stage_name="stage", pg=None):
                same(pair[me], found)
            assert len(collective_utils.all_gather(data)) == 1
            for root in range(2):
                calls.clear()
                same(pair[root], collective_utils.broadcast(data, rank=root, stage_name="stage", pg=pg))
                assert len(calls) == (callable(data) and me == root)
            same(pair[me], collective_utils.broadcast(data))
    gathered: list[Any] = ["old", "old"]
    collective_utils.all_gather_object_enforce_type(pg, gathered, me)  # type: ignore[arg-type]
    assert gathered == [0, 1]


@requirement(
    "COLL-OBJECT-28",
    "If a value fails on one rank, or has the wrong type there, collective_utils raises an error on every rank.",
    source="torch.distributed.collective_utils.broadcast: 'If the function raises an exception, all ranks will raise'; "
    "all_gather, all_gather_object_enforce_type: 'all ranks will fail with exception'",
)
@spmd(2)
def test_failures(rank: Rank) -> None:
    """Fail on each rank in turn, or report a failure; afterwards values are given as before."""
    pg: Any = dist.group.WORLD

    def fails() -> Any:
        raise KeyError("no such value")

    for bad in range(2):
        mine: Any = fails if rank.index == bad else 7
        own: Any = "text" if rank.index == bad else 7
        wrong: list[Callable[[], Any]] = [
            lambda mine=mine: collective_utils.all_gather(mine, pg=pg),
            lambda bad=bad: collective_utils.broadcast(fails, rank=bad, pg=pg),
            lambda bad=bad: collective_utils.broadcast(None, success=rank.index != bad, rank=bad, pg=pg),
            lambda own=own: collective_utils.all_gather_object_enforce_type(pg, [None, None], own),
            lambda own=own: collective_utils.all_gather_object_enforce_type(pg, [0, 0], 7, lambda one, other: False),
            lambda: collective_utils.broadcast(fails),
            lambda: collective_utils.all_gather(fails),
        ]
        for call in wrong:
            with pytest.raises((RuntimeError, TypeError)):
                call()
        collective_utils.all_gather_object_enforce_type(pg, [None, None], own, lambda one, other: True)
        assert collective_utils.all_gather(rank.index, pg=pg) == [0, 1]


@requirement(
    "COLL-OBJECT-27",
    "collective_utils.broadcast returns the source's value on every rank, whatever the value.",
    source="torch.distributed.collective_utils.broadcast: 'the value after synchronization'",
)
@pytest.mark.parametrize("group", ["0", "01", "1", "12"])
@pytest.mark.world(3)
def test_values_of_groups(world: World, group: str) -> None:
    """Each rank of a group in turn is the source, with and without the world's first rank."""
    members = [int(member) for member in group]

    def body(rank: Rank) -> list[int]:
        pg = dist.new_group(members)
        if rank.index not in members:
            return []
        return [collective_utils.broadcast(10 * rank.index, rank=root, pg=pg) for root in range(len(members))]

    right = [10 * member for member in members]
    assert_on_ranks([right if index in members else [] for index in range(world.size)], world.run(body))


@requirement(
    "COLL-OBJECT-3609",
    "The error of collective_utils for a value that fails on a rank is a RuntimeError that says why.",
    source="torch.distributed.collective_utils.broadcast, all_gather: 'RuntimeError from original exception trace'",
)
@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
@pytest.mark.world(2)
def test_kind_of_error(world: World, name: str) -> None:
    """The first rank's value fails."""

    def body(rank: Rank) -> None:
        def fails() -> Any:
            raise KeyError("no such value")

        with pytest.raises((RuntimeError, TypeError)) as caught:
            getattr(collective_utils, name)(fails if rank.index == 0 else 7, pg=dist.group.WORLD)
        assert caught.type is RuntimeError, f"raised {caught.value!r}"
        assert "no such value" in str(caught.value)

    world.run(body)


@requirement(
    "COLL-OBJECT-3610",
    "collective_utils.all_gather returns the values of all ranks, or raises an error if their stage names differ.",
    source="torch.distributed.collective_utils.all_gather: 'checking payload from all ranks has the same stage name'",
)
@pytest.mark.parametrize("names", STAGES)
@pytest.mark.world(2)
def test_stages(world: World, names: str) -> None:
    """Give the same name, none, different ones, and one on the first rank alone."""
    stages = STAGES[names]

    def body(rank: Rank) -> str:
        try:
            return str(collective_utils.all_gather(rank.index, stages[rank.index], dist.group.WORLD))
        except RuntimeError:
            return "an error"

    right = "[0, 1]" if stages[0] == stages[1] else "an error"
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "COLL-OBJECT-26",
    "collective_utils.all_gather returns every rank's value in the group's order, whatever the value.",
    source="torch.distributed.collective_utils.all_gather: 'a list of synced data from all ranks'",
)
@requirement(
    "COLL-OBJECT-27",
    "collective_utils.broadcast returns the source's value on every rank, whatever the value.",
    source="torch.distributed.collective_utils.broadcast: 'the value after synchronization'",
)
@spmd(1)
def test_without_a_group(rank: Rank) -> None:
    """Without pg, nothing needs a default group, neither values nor errors; what fails is told by its error."""
    dist.destroy_process_group()
    assert not dist.is_initialized()

    def fails() -> Any:
        raise KeyError("no such value")

    try:
        for value in (7, None, lambda: 7):
            right = value() if callable(value) else value
            assert collective_utils.broadcast(value) == right
            assert collective_utils.all_gather(value) == [right]
        for call in (collective_utils.broadcast, collective_utils.all_gather):
            with pytest.raises(RuntimeError, match="no such value"):
                call(fails)
        assert not dist.is_initialized()
    finally:
        started(rank, "back", 0, 1)
