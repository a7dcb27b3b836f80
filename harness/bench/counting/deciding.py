"""Which counts are steady, and which differ between two sides.  Pure.

Those of :data:`~harness.bench.counting.names.COMPARED` are compared.
A count is *steady* on a side if it is the same on every set of fresh ranks, within :data:`STEADY`.  Whether it is one
is measured in every duet anew, on both sides.  A steady count that differs by more than :data:`LEAST` is told at once:
what would have to be chance is that several sets agree on each side, and disagree between the sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.bench.counting.names import COMPARED

SETS = 3
"""Sets of fresh ranks on each side."""
STEADY = 0.002
"""Largest spread of a steady count on one side, as a share."""
LEAST = 0.008
"""Smallest change that is told, as a share: below 1 %, and four times what is steady."""
ABSOLUTE = 0.5
"""Smallest change that is told, for one call: what happens in few of the calls only is no change of the call."""

Counts = Mapping[str, float]
"""Counts by name, of one call and all ranks together."""


@dataclass(frozen=True)
class Steadiness:
    """A count over several sets of fresh ranks."""

    value: float
    """The median."""
    spread: float
    """The largest minus the smallest, over the median; 0 if all are 0, infinite if only the median is 0."""

    @property
    def steady(self) -> bool:
        """Whether it may be compared."""
        return self.spread <= STEADY


def steadiness(sets: Sequence[Counts]) -> dict[str, Steadiness]:
    """Return how steady each count is that all sets have."""
    names = [name for name in sets[0] if all(name in one for one in sets)] if sets else []
    return {name: _of([one[name] for one in sets]) for name in names}


def _of(values: Sequence[float]) -> Steadiness:
    middle, width = statistics.median(values), max(values) - min(values)
    return Steadiness(middle, 0.0 if width == 0 else width / middle if middle > 0 else float("inf"))


@dataclass(frozen=True)
class Change:
    """A steady count that differs between two sides."""

    count: str
    a: float
    b: float

    @property
    def more(self) -> bool:
        """Whether B needs more."""
        return self.b > self.a

    def __str__(self) -> str:
        share = f"{100 * (self.b / self.a - 1):+.1f} %" if self.a else "none before"
        return f"{self.count} {self.a:g} -> {self.b:g} ({share})"


def changes(a: Sequence[Counts], b: Sequence[Counts]) -> list[Change]:
    """Return the counts that are steady on both sides and differ.  Fewer than two sets of a side show nothing."""
    if min(len(a), len(b)) < 2:
        return []
    first, second = steadiness(a), steadiness(b)
    return [
        Change(name, one.value, second[name].value)
        for name, one in first.items()
        if name in COMPARED
        and name in second
        and one.steady
        and second[name].steady
        and abs(second[name].value - one.value) > max(ABSOLUTE, LEAST * min(one.value, second[name].value))
    ]
