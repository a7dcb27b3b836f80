"""Figures beside those of a bare loop, in turns: what suites/perf says of an all_reduce is what it costs.

Run with ``pytest tests/bench/test_fidelity.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from harness.bench.measuring.collectives import Timed, on_rank
from harness.bench.measuring.timing import Effort
from harness.bench.records import size_of
from harness.worlds.local import RANK_ENVIRONMENT
from harness.worlds.pool import Pool
from harness.worlds.rank import Rank
from harness.worlds.world import WorldSpec
from tests.bench.bare_loop import loop

HERE = Path(__file__).parent
SIZES = (8, 1 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20, 4 << 20)
TURNS, MOST = 20, 100
"""Turns at least, and at most: there are more until the interval is as narrow as what is wanted of the ratio."""
VISIT = 4
"""Turns with one set of ranks; then there are fresh ones, as the suite has them: processes differ by some percent."""
INNER = 10
"""Turns of the suite and the bare loop in the ranks, before ranks started by hand have theirs."""


class ByHand:
    """Ranks that nothing of Concord has started or watches.

    Each has a session of its own, as torchrun gives it: Linux shares out its cores by sessions (autogroup), and four
    ranks in one session take a fifth to a third less time on two cores.
    """

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
                start_new_session=True,
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
def by_hand(request: pytest.FixtureRequest, asked_for: None) -> Iterator[tuple[int, ByHand]]:
    found = ByHand(request.param)
    yield request.param, found
    found.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


EFFORT = Effort(rounds=1, visits=1, least=10, most=50)


def in_turns(rank: Rank, size: int) -> list[tuple[list[float], list[float]]]:
    """Seconds of iterations as the suite takes them and as a bare loop does, over one process group, turn by turn."""
    found: list[tuple[list[float], list[float]]] = []
    count = EFFORT.least
    for number in range(INNER):
        bare = loop(size, count) if number % 2 else []  # which of them goes first is no advantage
        answer = on_rank(rank, Timed("all_reduce", size), EFFORT)
        assert answer is not None
        assert not answer.problem
        (ours,) = answer.timing.rounds
        count = len(ours)
        found.append((ours, bare or loop(size, count)))
    return found


def slowest(ranks: Iterable[list[float]]) -> list[float]:
    """Of each iteration."""
    return [max(times) for times in zip(*ranks, strict=True)]


def ratio(ours: list[list[float]], theirs: list[list[float]]) -> tuple[float, float, float]:
    """Of the medians of turns that followed one another, the middle one, with its 95 % interval (the bootstrap).

    A machine that is slower for a while is so for both of a turn; taking turns together first would leave that in.
    """
    turns = np.array([np.median(a) / np.median(b) for a, b in zip(ours, theirs, strict=True)])
    drawn = np.median(np.random.default_rng(0).choice(turns, (400, len(turns))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.median(turns)), float(low), float(high)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES, ids=size_of)
def test_all_reduce(
    size: int, by_hand: tuple[int, ByHand], pool: Pool, benchmark: Any, fidelity: Callable[..., None]
) -> None:
    """An all_reduce as the suite measures it, as a bare loop in the same ranks does, and in ranks started by hand."""
    ranks, bare = by_hand
    world = pool.acquire(WorldSpec(ranks, record=False))
    ours: list[list[float]] = []
    beside: list[list[float]] = []
    alone: list[list[float]] = []

    def turn() -> None:
        if len(ours) % (INNER * VISIT) == 0:
            world.kill()
        for turns in zip(*world.run(in_turns, size), strict=True):
            ours.append(slowest(rank[0] for rank in turns))
            beside.append(slowest(rank[1] for rank in turns))
            alone.append(slowest(bare(size, len(ours[-1]))))

    wanted = 0.03 if size > 64 << 10 else 0.10
    benchmark.pedantic(turn, rounds=TURNS, warmup_rounds=1)
    for _ in range(MOST - TURNS):
        _, low, high = ratio(ours, beside)
        if high - low <= 2 * wanted:
            break
        turn()
    medians = [median(itertools.chain(*kind)) for kind in (ours, beside, alone)]
    fidelity(size_of(size), ranks, medians, ratio(ours, beside), ratio(beside, alone), wanted)
    pool.release(world)


def test_ratio() -> None:
    """A figure that is a tenth too large is one, on a machine that is now fast, now slow as well; one that varies from
    turn to turn by itself has a wide interval."""
    turns = [[1.0, 1.01], [1.02, 1.0]] * 20

    def every_other(times: float, of: list[list[float]]) -> list[list[float]]:
        return [[figure * (times if turn % 2 else 1) for figure in one] for turn, one in enumerate(of)]

    slow = [[1.1 * figure for figure in turn] for turn in turns]
    for ours, theirs in ((slow, turns), (every_other(3, slow), every_other(3, turns))):
        found, low, high = ratio(ours, theirs)
        assert low <= found <= high
        assert abs(found - 1.1) < 0.02
    _, low, high = ratio(every_other(2, turns), turns)
    assert high > 1.2 * low
