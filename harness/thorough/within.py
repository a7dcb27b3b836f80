"""Which tests ask the most within a given time: how long each takes, and the choice."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

FILE = Path("fixtures/durations.json")
BETWEEN = 0.02
"""Seconds between two tests."""
_TIERS = 8


class Durations(msgspec.Struct, frozen=True):
    """How long tests took, in a run of all of them; kept in ``fixtures/durations.json``."""

    machine: str
    """On what, for people."""
    torch: str
    seconds: dict[str, dict[str, float]]
    """By file and by what follows ``::`` in a test's id."""

    def of(self, nodeids: Collection[str]) -> dict[str, float]:
        """Return what each test is expected to take; one that is new, as long as half of those of its file."""
        halves = {file: statistics.median(tests.values()) for file, tests in self.seconds.items() if tests}
        otherwise = statistics.median(halves.values()) if halves else 0.0
        expected = {}
        for nodeid in nodeids:
            file, _, test = nodeid.partition("::")
            expected[nodeid] = self.seconds.get(file, {}).get(test, halves.get(file, otherwise))
        return expected


@dataclass(frozen=True)
class Chosen:
    """The tests that are chosen, those of most value for their time first, and what all of them ask."""

    nodeids: list[str]
    seconds: float
    """What they are expected to take, one after the other."""
    asked: int
    noticed: int


def choose(
    expected: Mapping[str, float],
    requirements: Mapping[str, Collection[str]],
    notices: Mapping[str, Collection[str]],
    budget: float,
) -> Chosen:
    """Choose tests that take no more than ``budget`` seconds and ask the most.

    A test is worth one for each requirement that no test before it proves, and one for each fault of the catalog that
    it notices and no test before it; next is the one with the most worth for its time (the greedy way, which is at
    least 63 % as good as the best choice).  What then is left of the time goes to the shortest of the other tests.
    ``expected``: seconds by test; ``requirements`` and ``notices``: ids and names by test.
    """
    worth = {
        nodeid: {
            *(("asks", each) for each in requirements.get(nodeid, ())),
            *(("notices", each) for each in notices.get(nodeid, ())),
        }
        for nodeid in expected
    }
    cost = {nodeid: seconds + BETWEEN for nodeid, seconds in expected.items()}
    covered: set[tuple[str, str]] = set()
    chosen: list[str] = []
    spent = 0.0
    heap = [(-len(worth[nodeid]) / cost[nodeid], i, nodeid) for i, nodeid in enumerate(expected)]
    heapq.heapify(heap)
    while heap:
        _, i, nodeid = heapq.heappop(heap)
        density = -len(worth[nodeid] - covered) / cost[nodeid]
        if density == 0 or spent + cost[nodeid] > budget:
            continue
        if heap and density > heap[0][0]:  # worth less than when it was put there: others have come first
            heapq.heappush(heap, (density, i, nodeid))
            continue
        chosen.append(nodeid)
        spent += cost[nodeid]
        covered |= worth[nodeid]
    first = set(chosen)
    for nodeid in sorted(expected, key=expected.__getitem__):
        if nodeid not in first and spent + cost[nodeid] <= budget:
            chosen.append(nodeid)
            spent += cost[nodeid]
    asked = sum(kind == "asks" for kind, _ in covered)
    return Chosen(chosen, spent, asked, len(covered) - asked)


def in_order(nodeids: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the chosen tests in the order to run: the most valuable eighth first, and each eighth as collected."""
    tier = {nodeid: rank * _TIERS // len(chosen) for rank, nodeid in enumerate(chosen)}
    return sorted((nodeid for nodeid in nodeids if nodeid in tier), key=tier.__getitem__)
