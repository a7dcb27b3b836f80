"""Figures beside those of a bare loop, in turns: what suites/perf says of an all_reduce is what it costs.

Run with ``pytest tests/bench/test_fidelity.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.bench.collectives import Timed, timed_on
from harness.bench.records import size_of
from harness.bench.timing import Effort
from harness.worlds.launch import RANK_ENVIRONMENT
from harness.worlds.pool import Pool
from harness.worlds.rank import Rank
from harness.worlds.world import WorldSpec
from tests.bench.bare_loop import loop

HERE = Path(__file__).parent
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20, 4 << 20)
TURNS = 20


class ByHand:
    """Ranks that nothing of Concord has started or watches."""

    def __init__(self, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        environment = {**RANK_ENVIRONMENT, **os.environ, **place}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(HERE / "bare_loop.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "RANK": str(rank)},
            )
            for rank in range(size)
        ]
        for rank in self._ranks:
            self._line(rank)

    @staticmethod
    def _line(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        return rank.stdout.readline()

    def __call__(self, size: int, count: int) -> list[list[float]]:
        """``[rank][iteration]`` in seconds."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{size} {count}\n")
            rank.stdin.flush()
        return [json.loads(self._line(rank)) for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture(scope="module", params=[2, 4], ids=["2ranks", "4ranks"])
def by_hand(request: pytest.FixtureRequest) -> Iterator[tuple[int, ByHand]]:
    if not request.config.getoption("benchmark_enable") and not request.config.getoption("benchmark_only"):
        pytest.skip("a benchmark: runs with --benchmark-enable")
    found = ByHand(request.param)
    yield request.param, found
    found.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


def in_world(rank: Rank, size: int, count: int) -> list[float]:
    return loop(size, count)


def slowest(ranks: list[list[float]]) -> list[float]:
    """Of each iteration."""
    return [max(times) for times in zip(*ranks, strict=True)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES, ids=size_of)
def test_all_reduce(
    size: int, by_hand: tuple[int, ByHand], pool: Pool, benchmark: Any, fidelity: Callable[..., None]
) -> None:
    """An all_reduce as the suite measures it, as a bare loop in the same ranks does, and in ranks started by hand."""
    ranks, bare = by_hand
    world = pool.acquire(WorldSpec(ranks, record=False))
    effort = Effort(rounds=1, visits=1, seconds=0.05, least=10, most=400)
    ours: list[float] = []
    beside: list[float] = []
    alone: list[float] = []

    def turn() -> None:
        found = timed_on(world, Timed("all_reduce", size), effort).iterations()
        ours.extend(found)
        beside.extend(slowest(world.run(in_world, size, len(found))))
        alone.extend(slowest(bare(size, len(found))))

    benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=1)
    fidelity(size_of(size), ranks, median(ours), median(beside), median(alone), 0.03 if size > 64 << 10 else 0.10)
    pool.release(world)
