"""What others do to tell a step from noise, so that the gate can be compared with them on the same nights.

Each takes the nights up to the newest and says of each series whether it raises an alarm: ``values[night, series]`` in
logarithms, ``rounds[night, series, round]`` in seconds; ``of``: how many series there are in all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import stats

from harness.bench.detection.changes import CONFIRM, Array
from harness.bench.detection.tails import RATE

Flags = npt.NDArray[np.bool_]
Rival = Callable[[Array, Array, int], Flags]

_REFERENCE = 30
"""Nights that a mean is taken of."""

_PERMUTATIONS = 99
"""Enough to tell at 0.05."""


def fixed(values: Array, rounds: Array, of: int) -> Flags:
    """The newest night's mean is more than 5 % above the mean of the nights before."""
    means = rounds.mean(2)
    return np.asarray(means[-1] > 1.05 * means[-1 - _REFERENCE : -1].mean(0), np.bool_)


def compare_fail(values: Array, rounds: Array, of: int) -> Flags:
    """pytest-benchmark's ``--benchmark-compare-fail=mean:5%`` against the run before."""
    means = rounds.mean(2)
    return np.asarray(100 * (means[-1] - means[-2]) / means[-2] > 5, np.bool_)


def welch(values: Array, rounds: Array, of: int, level: float = 0.05) -> Flags:
    """Welch's t-test of the newest night's rounds against those of the night before, and slower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds that are all the same have no t
        found = stats.ttest_ind(rounds[-1], rounds[-2], axis=1, equal_var=False, alternative="greater")
    return np.asarray(found.pvalue < level, np.bool_)


def welch_bonferroni(values: Array, rounds: Array, of: int) -> Flags:
    """The same, at the gate's rate divided by the number of series."""
    return welch(values, rounds, of, RATE / of)


def e_divisive(values: Array, rounds: Array, of: int, level: float = 0.05) -> Flags:
    """E-divisive on nightly values: a change to slower that begins in one of the newest three nights.

    Matteson and James, "A nonparametric approach for multiple change point analysis of multivariate data" (2014):
    segments are split at the largest energy statistic as long as a permutation test says that it is no chance.  Drawn
    with a seed, so that it says the same of the same nights.
    """
    generator = np.random.default_rng(len(values))
    window = np.exp(values[-_REFERENCE:] - values[-_REFERENCE:].mean(0))
    return np.array([_splits_late(one, level, generator) for one in window.T])


def _splits_late(one: Array, level: float, generator: np.random.Generator) -> bool:
    start, late = 0, len(one) - CONFIRM
    while len(one) - start >= 4:  # what lies before the last change point no longer matters
        part = one[start:]
        split, best = _best_split(np.abs(part[:, None] - part[None, :])[None])
        at, largest = int(split[0]), float(best[0])
        order = np.argsort(generator.random((_PERMUTATIONS, len(part))), axis=1)
        shuffled = part[order].astype(np.float32)
        _, chance = _best_split(np.abs(shuffled[:, :, None] - shuffled[:, None, :]))
        if (1 + (chance >= largest).sum()) / (1 + _PERMUTATIONS) > level:
            return False
        if start + at >= late:
            return bool(np.mean(part[at:]) > np.mean(part[:at]))
        start += at
    return False


def _best_split(distances: Array) -> tuple[npt.NDArray[np.intp], Array]:
    """``[case]``: where the energy statistic of two parts is largest, and how large.

    ``distances[case, night, night]``.  The first part has at least two nights, the last at least one.
    """
    count = distances.shape[1]
    sums = distances.cumsum(1).cumsum(2)
    total = sums[:, -1, -1]
    n = np.arange(2, count)
    m = count - n
    inside = sums[:, n - 1, n - 1]
    across = sums[:, n - 1, -1] - inside
    after = total[:, None] - inside - 2 * across
    within = inside / (n * (n - 1)) + after / np.maximum(m * (m - 1), 1)
    energy = (n * m / (n + m)) * (2 * across / (n * m) - within)
    best = energy.argmax(1)
    return n[best], energy[np.arange(len(energy)), best]


E_DIVISIVE = "E-divisive, p < 0.05"

RIVALS: dict[str, Rival] = {
    "fixed 5 % on means": fixed,
    "pytest-benchmark mean:5%": compare_fail,
    "t-test, p < 0.05": welch,
    "t-test, Bonferroni": welch_bonferroni,
    E_DIVISIVE: e_divisive,
}
