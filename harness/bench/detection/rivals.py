"""Other methods of telling steps from noise, to compare the gate and duets with them on the same measurements.

Those of nights are in ``RIVALS``.  Each takes the nights up to the newest and returns whether each series raises an
alarm.  ``values[night, series]`` are logarithms, ``rounds[night, series, round]`` are seconds, and ``of`` is the number
of all series.

Those of two separate runs of one series are in ``OF_TWO_RUNS``.  Each takes the times of both runs, a sample for each
round, and returns whether the second run is slower.
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
"""Number of nights in a mean."""

_PERMUTATIONS = 99
"""Enough for a test at the level 0.05."""


def fixed(values: Array, rounds: Array, of: int) -> Flags:
    """Flag series whose newest mean is more than 5 % above the mean of the nights before."""
    means = rounds.mean(2)
    return np.asarray(means[-1] > 1.05 * means[-1 - _REFERENCE : -1].mean(0), np.bool_)


def compare_fail(values: Array, rounds: Array, of: int) -> Flags:
    """Compare with the night before, as pytest-benchmark's ``--benchmark-compare-fail=mean:5%`` does."""
    means = rounds.mean(2)
    return np.asarray(100 * (means[-1] - means[-2]) / means[-2] > 5, np.bool_)


def welch(values: Array, rounds: Array, of: int, level: float = 0.05) -> Flags:
    """Flag series that are slower by Welch's t-test of the newest night's rounds against those of the night before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rounds that are all the same have no t statistic
        found = stats.ttest_ind(rounds[-1], rounds[-2], axis=1, equal_var=False, alternative="greater")
    return np.asarray(found.pvalue < level, np.bool_)


def welch_bonferroni(values: Array, rounds: Array, of: int) -> Flags:
    """Apply :func:`welch` at the gate's rate divided by the number of series."""
    return welch(values, rounds, of, RATE / of)


def e_divisive(values: Array, rounds: Array, of: int, level: float = 0.05) -> Flags:
    """Apply E-divisive to nightly values: flag a change to slower that begins in one of the newest three nights.

    Matteson and James, "A nonparametric approach for multiple change point analysis of multivariate data" (2014):
    segments are split at the largest energy statistic as long as a permutation test finds it significant.  The
    permutations are seeded, so that the same nights give the same result.
    """
    generator = np.random.default_rng(len(values))
    window = np.exp(values[-_REFERENCE:] - values[-_REFERENCE:].mean(0))
    return np.array([_splits_late(one, level, generator) for one in window.T])


def _splits_late(one: Array, level: float, generator: np.random.Generator) -> bool:
    start, late = 0, len(one) - CONFIRM
    while len(one) - start >= 4:  # nights before the last change point no longer matter
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
    """Return ``[case]``: where the energy statistic of two parts is largest, and its value.

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


_FACTOR = 1.05
"""The ratio above which a change counts, where a method has one."""


def t_test(before: Array, after: Array) -> bool:
    """Apply Welch's t-test at the level 0.05."""
    found = stats.ttest_ind(after, before, equal_var=False, alternative="greater")
    return bool(found.pvalue < 0.05)


def mean_compared(before: Array, after: Array) -> bool:
    """Compare means, as pytest-benchmark's ``--benchmark-compare-fail=mean:5%`` does."""
    return bool(after.mean() / before.mean() > _FACTOR)


def least_compared(before: Array, after: Array) -> bool:
    """Compare minima, as pytest-benchmark's ``--benchmark-compare-fail=min:5%`` does."""
    return bool(after.min() / before.min() > _FACTOR)


def asv(before: Array, after: Array) -> bool:
    """Decide as ``asv continuous --factor 1.05``: by the ratio of medians, if Mann and Whitney's test gives p < 0.002.

    Source: ``is_different`` in asv's ``_stats.py``, for samples that are large enough for the test.
    """
    significant = stats.mannwhitneyu(before, after).pvalue < 0.002
    return bool(significant and np.median(after) / np.median(before) > _FACTOR)


def pyperf(before: Array, after: Array) -> bool:
    """Decide as ``pyperf compare_to``: Student's two-sided t-test at 95 %, with the pooled variance.

    Source: ``is_significant`` in pyperf's ``_utils.py``.
    """
    return bool(stats.ttest_ind(before, after).pvalue < 0.05 and after.mean() > before.mean())


OF_TWO_RUNS: dict[str, Callable[[Array, Array], bool]] = {
    "t-test, p < 0.05": t_test,
    "pytest-benchmark mean:5%": mean_compared,
    "pytest-benchmark min:5%": least_compared,
    "asv, factor 1.05": asv,
    "pyperf": pyperf,
}
