"""Run a duet: generations of fresh servers, pairs of fresh sets of ranks, rounds in random turns.

Both sides' worlds are alive at once.  A round of one side is measured while the other's ranks sleep.  Which side goes
first is drawn for each turn, so what the machine does in the meantime meets both sides alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from harness.bench.counting.deciding import SETS
from harness.bench.duet import messages
from harness.bench.duet.deciding import MOST_SETS, sets_in
from harness.bench.duet.journal import Journal
from harness.bench.duet.records import (
    SHARES,
    SIDES,
    A,
    Begun,
    Counts,
    Ended,
    Failed,
    Generation,
    Pair,
    Record,
    Round,
    Taken,
)
from harness.bench.duet.sides import Side, SideFailed
from harness.bench.duet.state import State
from harness.bench.records import Series, percentile

TURNS = 4
"""Turns of each series on a pair of sets; both sides measure a round in each."""
_SECONDS = 0.01
"""Approximate duration of a round."""
_LEAST, _MOST, _LEAD = 5, 200, 3
"""Iterations of a round, and uncounted ones before it."""

Offers = Mapping[str, Sequence[Series]]
"""For each side, what it offers, in its own order."""


def without_place(series: Series) -> Series:
    """Return a series without its backend and device, in which two sides may differ."""
    return msgspec.structs.replace(series, backend="", device="")


def ranks_of(series: Series) -> int:
    """Return the number of ranks that a series needs: those of its world, of which a group may be a part."""
    group = dict(series.variant).get("group", "")
    return int(group.rpartition(" of ")[2]) if group else series.world


def shared(offers: Offers) -> list[Series]:
    """Return the series that both sides offer, as A names them."""
    theirs = {without_place(series) for series in offers[SIDES[1]]}
    return [series for series in offers[A] if without_place(series) in theirs]


@dataclass
class Duet:
    """A duet that is being measured."""

    sides: Mapping[str, Side]
    journal: Journal
    state: State
    offers: Offers
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._numbers = {
            side: {without_place(series): number for number, series in enumerate(offered)}
            for side, offered in self.offers.items()
        }

    @property
    def _begun(self) -> Begun:
        return self.state.begun

    def run(self, seconds: float, told: Callable[[State], None] = lambda state: None) -> None:
        """Measure until every series is decided, or for so many seconds in all.

        ``told``: called with the state after each pair of sets and each generation.  Errors: :class:`SideFailed` if a
        side can't go on; OSError; KeyboardInterrupt.  The journal has everything that ended before.
        """
        while not self.state.over and self.state.seconds < seconds:
            began = self.clock()
            self._generation(lambda: told(self.state))
            self._keep(Generation(self.clock() - began))
            told(self.state)
        if not self.state.over:
            self._keep(Ended())
        for side in self.sides.values():
            side.do(messages.End())

    def count(self, told: Callable[[int], None] = lambda series: None) -> None:
        """Count what each series needs on a few sets of fresh ranks of both sides, unless that has been done.

        ``told``: called with each series.  Errors: :class:`SideFailed` if a side can't go on.
        """
        draw = random.Random(f"{self._begun.seed} counts")  # noqa: S311 - of turns
        left = self.state.to_count
        if not left:
            return
        self._servers(left, draw)
        found: dict[int, dict[str, list[dict[str, float]]]] = {one: {side: [] for side in SIDES} for one in left}
        why: dict[int, str] = {}
        for _ in range(SETS):
            for size in sorted({ranks_of(self._begun.series[one]) for one in left}):
                self._both(messages.Ranks(size), draw)
                for one in (one for one in left if one not in why and ranks_of(self._begun.series[one]) == size):
                    try:
                        for side, counted in self._counted(one, draw).items():
                            found[one][side].append(counted)
                    except SideFailed as e:
                        if e.kind == "gone":
                            raise
                        why[one] = str(e)[:4000]
                        self._both(messages.Ranks(size), draw)
        for one in left:
            a, b = (() if one in why else tuple(found[one][side]) for side in SIDES)
            self._keep(Counts(series=one, a=a, b=b, why=why.get(one, "")))
            told(one)

    def _counted(self, series: int, draw: random.Random) -> dict[str, dict[str, float]]:
        numbers = {side: self._numbers[side][without_place(self._begun.series[series])] for side in SIDES}
        order = _order(draw)
        for side in order:  # at the same time: counts do not depend on what else runs
            self.sides[side].send(messages.Count(numbers[side]))
        found: dict[str, dict[str, float]] = {}
        failed: SideFailed | None = None
        for side in order:
            try:
                found[side] = self.sides[side].counted().counts
            except SideFailed as e:
                failed = failed or e
        if failed is not None:
            raise failed
        return found

    def _keep(self, record: Record) -> None:
        self.journal.write(record)
        self.state.add(record)

    def _generation(self, told: Callable[[], None]) -> None:
        """Measure a generation: fresh servers, and pairs of sets for at least as long as the servers took to start."""
        draw = random.Random(f"{self._begun.seed} {self.state.generations} {self.state.ends}")  # noqa: S311 - of turns
        began = self.clock()
        self._servers(self.state.open, draw)
        self._both(messages.Ranks(min(ranks_of(self._begun.series[series]) for series in self.state.open)), draw)
        started = self.clock()
        number = 0
        while number < sets_in(self.state.generations) or (
            number < MOST_SETS and self.clock() - started < started - began
        ):
            taken: list[Taken] = []
            sizes = {ranks_of(self._begun.series[series]) for series in self.state.open}
            for size in sorted(sizes):
                taken += self._on_ranks(size, draw)
            self._keep(Pair(tuple(taken)))
            told()
            number += 1
            if not self.state.open:
                return

    def _servers(self, series: Sequence[int], draw: random.Random) -> None:
        """Start fresh servers on both sides, for these series."""
        self._both(messages.Servers(steps=any(self._begun.series[one].is_step for one in series)), draw)

    def _both(self, request: messages.Request, draw: random.Random) -> None:
        """Ask both sides for something at once; which one is asked first is drawn."""
        order = _order(draw)
        for side in order:
            self.sides[side].send(request)
        for side in order:
            self.sides[side].receive()

    def _on_ranks(self, size: int, draw: random.Random) -> list[Taken]:
        """Measure the open series of so many ranks on a pair of fresh sets of ranks."""
        self._both(messages.Ranks(size), draw)
        series = [one for one in self.state.open if ranks_of(self._begun.series[one]) == size]
        draw.shuffle(series)
        taken = []
        for one in series:
            try:
                taken.append(self._taken(one, draw))
            except SideFailed as e:
                if e.kind not in ("values", "ranks", "impossible"):
                    raise
                self._keep(Failed(one, e.side, e.kind, e.why[:4000]))
                self._both(messages.Ranks(size), draw)
        return taken

    def _taken(self, series: int, draw: random.Random) -> Taken:
        """Measure one series in turns.  Errors: :class:`SideFailed`."""
        numbers = {side: self._numbers[side][without_place(self._begun.series[series])] for side in SIDES}
        ready = {side: self.sides[side].prepare(numbers[side]) for side in _order(draw)}
        typical = max(max(one.typical for one in ready.values()), 1e-9)
        count = min(_MOST, max(_LEAST, int(_SECONDS / typical)))
        samples: dict[str, list[float]] = {side: [] for side in SIDES}
        rounds = []
        for _ in range(TURNS):
            for side in _order(draw):
                seconds = self.sides[side].round(numbers[side], count, min(_LEAD, count))
                samples[side] += seconds
                rounds.append(Round(side, self.now(), percentile(seconds, 50)))
        for side in _order(draw):
            self.sides[side].do(messages.Finish(numbers[side]))
        figures = {side: tuple(percentile(samples[side], 100 * share) for share in SHARES) for side in SIDES}
        for side in SIDES:
            if figures[side][SHARES.index(0.25)] < ready[side].copy:
                raise SideFailed(side, "impossible", _impossible(figures[side][SHARES.index(0.25)], ready[side].copy))
        return Taken(series=series, a=figures["A"], b=figures["B"], rounds=tuple(rounds))


def _order(draw: random.Random) -> tuple[str, ...]:
    return SIDES if draw.random() < 0.5 else SIDES[::-1]


def _impossible(found: float, copy: float) -> str:
    return (
        f"{found * 1e6:.3g} us is less than a copy of what comes from other ranks ({copy * 1e6:.3g} us): "
        "not the time in which it was done"
    )
