"""Whose turn it is to take devices, without processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.leases.turns import Place, in_order, may_take


@dataclass
class Worker:
    """One process of a simulated session: it runs tests one after the other, each on a lease of its own."""

    session: str
    count: int
    """Devices of each test."""
    seconds: float
    """Of each test."""
    left: int
    """Tests."""
    ends: float = 0.0
    place: Place | None = None
    waited: float = 0.0


def simulate(devices: int, workers: list[Worker], *, keeps: bool = True) -> dict[str, float]:
    """When each session has ended, if its workers take turns; the longest wait of each worker is in ``waited``.

    ``keeps``: whether a worker that ends a test is in the queue for its next one at once, as it is with a claim.
    """
    now, number, ended = 0.0, 0, dict[str, float]()
    asked = {id(w): 0.0 for w in workers}
    for worker in workers:
        number += 1
        worker.place = Place(worker.session, worker.count, number, f"{number}")
    running: list[Worker] = []
    while running or any(w.place for w in workers):
        again = True
        while again:
            again = False
            held = Counter[str]()
            for worker in running:
                held[worker.session] += worker.count
            free = devices - sum(held.values())
            waiting = [w for w in workers if w.place is not None]
            for worker in waiting:
                others = [w.place for w in waiting if w is not worker and w.place is not None]
                assert worker.place is not None
                if may_take(worker.place, others, held, free):
                    worker.waited = max(worker.waited, now - asked[id(worker)])
                    worker.place, worker.ends, again = None, now + worker.seconds, True
                    running.append(worker)
                    break
        assert running, "everybody waits, and nobody holds anything"
        assert sum(w.count for w in running) <= devices
        now = min(w.ends for w in running)
        for worker in [w for w in running if w.ends == now]:
            running.remove(worker)
            worker.left -= 1
            if worker.left:
                number += 1
                worker.place = Place(worker.session, worker.count, number, f"{number}")
                asked[id(worker)] = now
            else:
                ended[worker.session] = now
    return ended


class TestMayTake:
    def test_nobody_else(self) -> None:
        """Devices that are free go to whoever is alone."""
        assert may_take(Place("a", 2, 1), [], {}, 2)
        assert not may_take(Place("a", 2, 1), [], {}, 1)

    def test_enough_for_both(self) -> None:
        """Whoever comes later need not wait for the first to take what it needs, if there is enough for both."""
        assert may_take(Place("b", 1, 2), [Place("a", 2, 1)], {}, 3)
        assert not may_take(Place("b", 1, 2), [Place("a", 2, 1)], {}, 2)

    def test_large_is_not_overtaken(self) -> None:
        """A lease that does not fit yet holds up smaller ones behind it."""
        assert not may_take(Place("b", 1, 2), [Place("a", 4, 1)], {}, 3)

    @pytest.mark.parametrize(
        ("held", "expected"), [({}, "abc"), ({"a": 1}, "bca"), ({"a": 2, "b": 1}, "cba"), ({"d": 9}, "abc")]
    )
    def test_order(self, held: dict[str, int], expected: str) -> None:
        """Sessions that hold fewer devices come first, then those that came earlier."""
        queue = [Place(name, 1, number) for number, name in enumerate("abc")]
        assert "".join(place.session for place in in_order(queue, held)) == expected

    @given(
        counts=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), min_size=1, max_size=8),
        held=st.dictionaries(st.sampled_from("abc"), st.integers(0, 4)),
        free=st.integers(0, 4),
    )
    def test_never_more_than_there_are(self, counts: list[tuple[str, int]], held: dict[str, int], free: int) -> None:
        """All that may take at the same time fit together; if the first one fits, it may."""
        queue = [Place(session, count, number) for number, (session, count) in enumerate(counts)]
        may = [place for place in queue if may_take(place, [p for p in queue if p is not place], held, free)]
        assert sum(place.count for place in may) <= free
        first = in_order(queue, held)[0]
        assert (first in may) == (first.count <= free)


class TestFairness:
    def test_short_tests_beside_long_ones(self) -> None:
        """30 tests of 0.2 s beside a session that fills both slots with tests of 4 s wait for one of those."""
        ended = simulate(2, [Worker("long", 1, 4.0, 60), Worker("long", 1, 4.0, 60), Worker("short", 1, 0.2, 30)])
        assert ended["short"] <= 4.0 + 30 * 0.2 + 1e-6

    def test_exclusive_among_many(self) -> None:
        """A test of all devices waits for each of the others at most once."""
        small = [Worker(name, 1, 1.0, 50) for name in "abcabc"]
        large = Worker("x", 4, 1.0, 10)
        simulate(4, [*small, large])
        assert large.waited <= 3.0

    @given(
        devices=st.integers(1, 4),
        workers=st.lists(
            st.tuples(st.sampled_from("abcd"), st.integers(1, 4), st.sampled_from([0.25, 1.0, 4.0])),
            min_size=1,
            max_size=7,
        ),
    )
    def test_nobody_is_starved(self, devices: int, workers: list[tuple[str, int, float]]) -> None:
        """Whatever demands meet, everybody gets devices before long, and nobody waits for ever."""
        made = [Worker(session, min(count, devices), seconds, 12) for session, count, seconds in workers]
        simulate(devices, made)
        assert [worker.left for worker in made] == [0] * len(made)
        for worker in made:
            others = sum(other.seconds for other in made if other is not worker)
            assert worker.waited <= 13 * others
