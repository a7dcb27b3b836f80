"""Decide from the differences of two sides which series are slower, faster or equal.  Pure; no input, no output.

A duet is made of *generations*: fresh servers on both sides, then a few pairs of fresh sets of ranks.  All that lasts
longer than a round (the servers, the sets of ranks) is drawn anew for each generation.  So a generation has one
difference for each series, and differences of generations are independent.  If the sides are equal, each side could
have had the other's figures with the same probability, because the order in each turn is drawn.  So the differences
are symmetric about zero, whatever their distribution is, and it may change from generation to generation.

That is all that Wilcoxon's signed-rank test needs.  Its interval (Hodges and Lehmann, 1963; Tukey, 1949) holds exactly,
with heavy tails, bursts and drift.  Looks repeat, there are several series, and each has two figures, so each interval
has a share of the probability of a mistake (Bonferroni).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]

RATE = 0.01
"""The probability that any series of a duet is reported wrongly."""
MARGIN = 0.05
"""Changes within this share are equal, by default."""

FASTEST, MEDIAN = "fastest", "median"
FIGURES = {FASTEST: 0.8, MEDIAN: 0.2}
"""The two figures of a series, the fastest iteration and the median one, and each one's part of a look's share.

Disturbances only add time, so the fastest iteration varies least and shows the smallest steps.  The median shows what
slows most iterations down but leaves a few as fast as they were.
"""

SLOWER, FASTER, EQUAL, UNDECIDED = "slower", "faster", "equal", "undecided"

LEAST, MOST = 14, 1200
"""Generations at the first planned look and at the last, at which a duet ends."""
MOST_SETS = 8
"""Pairs of sets of a generation at most."""
_GROWTH = 1.3
_EXACT = 150
"""Generations up to which the distribution of the statistic is computed exactly; beyond, it is close to normal, and
the normal tail is the heavier one."""


def planned() -> tuple[int, ...]:
    """Return the numbers of generations at which a duet looks, ascending.  They depend on nothing that is measured."""
    counts = [LEAST]
    while counts[-1] < MOST:
        counts.append(min(MOST, math.ceil(counts[-1] * _GROWTH)))
    return tuple(counts)


PLANNED = planned()


def share_of(look: int, rate: float = RATE) -> float:
    """Return the probability of a mistake that a look has for all its series.

    Half of the rate is for the planned looks, in equal parts.  The other half is for looks when the time is used up:
    half of it for the first, a quarter for the second after more time was given, and so on.

    ``look``: 0 for a planned look; n for the n-th look at the end of the time.
    """
    return rate / 2 / len(PLANNED) if look == 0 else rate / 2 / 2**look


@dataclass(frozen=True)
class Interval:
    """The ratio of two sides, B over A: the estimate, and the interval that holds for all series and looks together."""

    ratio: float
    low: float
    """0 if there are too few generations for an interval."""
    high: float
    """Infinite if there are too few generations for an interval."""
    generations: int

    def verdict(self, margin: float) -> str:
        """Return the decision.  ``margin``: the share within which sides are equal, such as 0.05.

        A series is equal if its whole interval is within the margin, even if it does not contain 1.
        """
        if 1 / (1 + margin) <= self.low and self.high <= 1 + margin:
            return EQUAL
        if self.low > 1:
            return SLOWER
        return FASTER if self.high < 1 else UNDECIDED


def middle(values: Sequence[float] | Array) -> float:
    """Return Hodges and Lehmann's estimate: the median of the means of all pairs, each value with itself as well."""
    return float(np.median(_pairs(np.asarray(values, np.float64))))


def interval(differences: Sequence[float] | Array, mistake: float) -> Interval:
    """Return the ratio and its interval.

    ``differences``: log(B / A) of each generation.  ``mistake``: the probability that the interval is wrong.
    """
    values = np.asarray(differences, np.float64)
    if not len(values):
        return Interval(math.nan, 0.0, math.inf, 0)
    means = np.sort(_pairs(values))
    ratio = math.exp(float(np.median(means)))
    rank = critical(len(values), mistake)
    if rank < 0:
        return Interval(ratio, 0.0, math.inf, len(values))
    return Interval(ratio, math.exp(means[rank]), math.exp(means[-1 - rank]), len(values))


def critical(count: int, mistake: float) -> int:
    """Return the largest sum of ranks whose two-sided probability is at most ``mistake``; -1 if there is none."""
    if count <= _EXACT:
        return int(np.searchsorted(_cumulative(count), mistake / 2, side="right")) - 1
    expected, spread = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    return math.floor(expected + spread * float(stats.norm.ppf(mistake / 2)) - 0.5)


@functools.lru_cache(maxsize=_EXACT + 1)
def _cumulative(count: int) -> Array:
    """Return the distribution function of the sum of the ranks 1 to ``count``, each of which counts with 1/2."""
    density = np.array([1.0])
    for rank in range(1, count + 1):
        longer = np.zeros(len(density) + rank)
        longer[: len(density)] += density / 2
        longer[rank:] += density / 2
        density = longer
    return np.asarray(density.cumsum(), np.float64)


def _pairs(values: Array) -> Array:
    first, second = np.triu_indices(len(values))
    return np.asarray((values[first] + values[second]) / 2, np.float64)


Differences = Mapping[str, Sequence[float]]
"""For each figure of a series, log(B / A) of each generation."""


@dataclass(frozen=True)
class Decided:
    """A series as a look saw it."""

    intervals: Mapping[str, Interval]
    """By figure."""
    verdict: str
    figure: str
    """The figure that decided."""
    at: int
    """Generations of the duet at that look."""

    @property
    def interval(self) -> Interval:
        """The interval of the figure that decided."""
        return self.intervals[self.figure]


def decided(intervals: Mapping[str, Interval], margin: float) -> tuple[str, str]:
    """Return the verdict, and the figure that it rests on.

    A series is slower (or else faster) if one of its figures is.  It is equal if the fastest iteration is equal and the
    median is not known to differ.
    """
    each = {figure: interval.verdict(margin) for figure, interval in intervals.items()}
    for verdict in (SLOWER, FASTER):
        for figure in FIGURES:
            if each[figure] == verdict:
                return verdict, figure
    return (EQUAL if each[FASTEST] == EQUAL else UNDECIDED), FASTEST


def look(
    differences: Mapping[int, Differences], mistake: float, series: int, margin: float, at: int
) -> dict[int, Decided]:
    """Look at some series.  Returns what each shows.

    ``mistake``: the look's share (:func:`share_of`); ``series``: the number of all series of the duet, of which these
    are not decided yet; ``at``: the generation.
    """
    found = {}
    for number, values in differences.items():
        intervals = {figure: interval(values[figure], mistake / series * part) for figure, part in FIGURES.items()}
        found[number] = Decided(intervals, *decided(intervals, margin), at)
    return found


def needed(differences: Sequence[float], series: int, margin: float, rate: float = RATE) -> float:
    """Return about how many generations it takes in all until a series is decided; infinite if nobody can say.

    It is decided when the interval is narrow enough to be within the margin, or not to contain 1.  ``differences``: of
    its fastest iteration.
    """
    if len(differences) < 5:
        return math.inf
    center = middle(differences)
    spread = 1.4826 * float(np.median(np.abs(np.asarray(differences) - center)))
    quantile = float(stats.norm.isf(share_of(0, rate) / series * FIGURES[FASTEST] / 2))
    known = abs(center) > 2 * spread / math.sqrt(len(differences))
    room = max(abs(center) if known else 0.0, math.log1p(margin) - abs(center), 1e-6)
    count = max((1.05 * quantile * spread / room) ** 2, LEAST)
    return next((float(n) for n in PLANNED if n >= count), math.inf)


def sets_in(generation: int) -> int:
    """Return how many pairs of fresh sets of ranks a generation has at least.

    The first ones have few, so that large changes are found soon: a look needs a number of generations.  Later ones
    have more, so that less time goes into starting servers.
    """
    return next(sets for last, sets in ((16, 2), (48, 4), (math.inf, MOST_SETS)) if generation < last)
