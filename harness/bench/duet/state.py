"""The state of a duet, from its records: differences of generations, looks, what is decided.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.bench.counting.deciding import Change, changes
from harness.bench.duet import deciding
from harness.bench.duet.deciding import FASTEST, MEDIAN, Decided, middle, needed, share_of
from harness.bench.duet.records import (
    SHARES,
    Begun,
    Counts,
    Ended,
    Failed,
    Generation,
    Pair,
    Record,
    Round,
    Session,
    Taken,
)

PLACES = {FASTEST: SHARES.index(0.0), MEDIAN: SHARES.index(0.5)}
"""Where the figures are among the quantiles that a journal keeps."""

FAILED = "failed"


@dataclass
class State:
    """What is known of a duet."""

    begun: Begun
    differences: list[dict[str, list[float]]]
    """For each series and figure, log(B / A) of each generation in which it was measured."""
    decided: dict[int, Decided] = field(default_factory=dict)
    """By series; what no later look changes."""
    latest: dict[int, Decided] = field(default_factory=dict)
    """By series; the last look at those that are not decided."""
    failed: dict[int, Failed] = field(default_factory=dict)
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    """All rounds, each with its series."""
    figures: list[list[tuple[float, float]]] = field(default_factory=list)
    """For each series, the fastest iteration of A and B on each pair of sets, in seconds."""
    counts: dict[int, Counts] = field(default_factory=dict)
    """By series; what was counted before times were measured."""
    generations: int = 0
    ends: int = 0
    """How often the time was used up."""
    seconds: float = 0.0
    """Time that generations took."""
    pairs: int = 0
    _pending: list[Pair] = field(default_factory=list)

    @property
    def open(self) -> list[int]:
        """The series that are neither decided nor failed."""
        return [i for i in range(len(self.begun.series)) if i not in self.decided and i not in self.failed]

    @property
    def over(self) -> bool:
        """Whether nothing is left to measure."""
        return not self.open or self.generations >= deciding.MOST

    def verdict(self, series: int) -> str:
        """Return ``slower``, ``faster``, ``equal``, ``undecided`` or ``failed``."""
        if series in self.failed:
            return FAILED
        return self.decided[series].verdict if series in self.decided else deciding.UNDECIDED

    @property
    def to_count(self) -> list[int]:
        """The series that nobody has tried to count."""
        return [i for i in range(len(self.begun.series)) if i not in self.counts]

    @property
    def uncounted(self) -> str:
        """Why a series was not counted; empty if all that were tried were."""
        return next((one.why for one in self.counts.values() if one.why), "")

    def changes(self, series: int) -> list[Change]:
        """Return the steady counts of a series that differ between the sides."""
        counted = self.counts.get(series)
        return changes(counted.a, counted.b) if counted is not None else []

    def shown(self, series: int) -> Decided | None:
        """Return the look that a series is reported with; None if there was none yet."""
        return self.decided.get(series) or self.latest.get(series)

    def add(self, record: Record) -> None:
        """Count one more record."""
        if isinstance(record, Session):
            self._pending = []  # a generation that was interrupted
        elif isinstance(record, Pair):
            self._pending.append(record)
            self.rounds += [(one.series, each) for one in record.taken for each in one.rounds]
        elif isinstance(record, Counts):
            self.counts[record.series] = record
        elif isinstance(record, Failed):
            self.failed[record.series] = record
        elif isinstance(record, Generation):
            self._end_generation(record)
        elif isinstance(record, Ended):
            self.ends += 1
            self._look(share_of(self.ends, self.begun.rate))

    def _end_generation(self, record: Generation) -> None:
        found: dict[int, list[Taken]] = {}
        for pair in self._pending:
            for one in pair.taken:
                found.setdefault(one.series, []).append(one)
                self.figures[one.series].append((one.a[PLACES[FASTEST]], one.b[PLACES[FASTEST]]))
        self.pairs += len(self._pending)
        self._pending = []
        self.seconds += record.seconds
        self.generations += 1
        for series in self.open:
            for figure, place in PLACES.items():
                logs = [math.log(one.b[place] / one.a[place]) for one in found.get(series, ())]
                if logs:
                    self.differences[series][figure].append(middle(logs))
        if self.generations in deciding.PLANNED:
            self._look(share_of(0, self.begun.rate))

    def _look(self, mistake: float) -> None:
        """Look at what is not decided yet.  ``mistake``: the look's share."""
        seen = deciding.look(
            {i: self.differences[i] for i in self.open},
            mistake,
            len(self.begun.series),
            self.begun.margin,
            self.generations,
        )
        for series, found in seen.items():
            self.latest[series] = found
            if found.verdict != deciding.UNDECIDED:
                self.decided[series] = found

    def left(self) -> float:
        """Return about how many seconds it takes until every series is decided; infinite if nobody can say yet."""
        if not self.open:
            return 0.0
        if not self.generations:
            return math.inf
        goal = max(
            needed(self.differences[i][FASTEST], len(self.begun.series), self.begun.margin, self.begun.rate)
            for i in self.open
        )
        return max(0.0, goal - self.generations) * self.seconds / self.generations


def replayed(records: Iterable[Record]) -> State:
    """Return the state after these records, of which the first is a :class:`Begun`."""
    following = iter(records)
    begun = next(following)
    assert isinstance(begun, Begun)
    count = len(begun.series)
    state = State(begun, [{figure: [] for figure in PLACES} for _ in range(count)], figures=[[] for _ in range(count)])
    for record in following:
        state.add(record)
    return state
