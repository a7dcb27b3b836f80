"""Ranks that could not connect a process group are asked once more, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Pool, Rank, RanksFailed, WorldSpec
from harness.programs.connecting import NotConnected, once_connected


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


def fails(rank: Rank, counted: Path, times: int, message: str) -> int:
    """Fail on rank 1 so many times; each call leaves a byte in a file."""
    if rank.index == 1:
        with counted.open("ab") as file:
            file.write(b".")
        if counted.stat().st_size <= times:
            raise RuntimeError(message)
    return rank.index


MESSAGE = "Gloo connectFullMesh failed with Connection closed by peer"


@pytest.mark.parametrize(("times", "calls"), [(0, 1), (1, 2)])
def test_once_more(pool: Pool, tmp_path: Path, times: int, calls: int) -> None:
    """A group that did not connect the first time is no failure, and a warning says so."""
    counted = tmp_path / "calls"

    def run() -> list[int]:
        return pool.acquire(WorldSpec(2)).run(fails, counted, times, MESSAGE)

    if times:
        with pytest.warns(NotConnected, match="connectFullMesh"):
            assert once_connected(run) == [0, 1]
    else:
        assert once_connected(run) == [0, 1]
    assert counted.stat().st_size == calls


@pytest.mark.filterwarnings("ignore::harness.programs.connecting.NotConnected")
@pytest.mark.parametrize(("times", "message", "calls"), [(2, MESSAGE, 2), (1, "Connection closed by peer", 1)])
def test_not_twice(pool: Pool, tmp_path: Path, times: int, message: str, calls: int) -> None:
    """Who fails again has failed, and so has who fails otherwise."""
    counted = tmp_path / "calls"
    with pytest.raises(RanksFailed, match=message):
        once_connected(lambda: pool.acquire(WorldSpec(2)).run(fails, counted, times, message))
    assert counted.stat().st_size == calls
