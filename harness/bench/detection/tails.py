"""Probabilities of sums of clipped residuals, from their distribution in the history."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RATE = 0.01
"""Target probability of a false alarm in one nightly run, over all series together."""

POWER = 0.95
"""Target probability that a step is found in the longest window."""

_WIDTH = 0.05
_FAR = 15.0
_CLIPS = np.arange(1.5, 6.01, 0.5)
_POWER_OF_TAIL = 0.05


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The upper tail of sums of ``k`` standardized residuals, for ``k`` from one night to the longest window."""

    chance: float
    """The probability of a sum that counts is at most this."""
    clip: float
    """In windows of several nights, a night counts for at most this: the clip that makes the smallest step visible."""
    detectable: float
    """The smallest step, in scales of one night, that the longest window detects in 95 of 100 cases."""
    inflation: tuple[float, ...]
    """By window, how much wider sums are than sums of independent nights."""
    _tails: tuple[Array, ...] = field(repr=False)
    _sorted: Array = field(repr=False)
    _pareto: tuple[float, float, float, float] = field(repr=False)
    """Threshold, probability above it, scale and shape."""

    def chances(self, standard: Array) -> Array:
        """Return ``[window, series]``: the probabilities of the sums of the last one, two, ... nights.

        ``standard[window, series]``: residuals in units of their scales.  The probability is 1 if a night is missing.
        All are NaN if no series has the newest night.
        """
        out = np.full(standard.shape, np.nan)
        out[0] = self.single(standard[-1])
        clipped = np.clip(standard, -self.clip, self.clip)
        for k in range(2, len(standard) + 1):
            total = clipped[-k:].sum(0) / self.inflation[k - 1]
            known = np.isfinite(total)
            tail = self._tails[k - 1]
            # the lower edge of the cell, so that a probability is never underestimated
            place = np.floor((total[known] + k * self.clip) / _WIDTH).astype(int) - 1
            out[k - 1, known] = tail[np.clip(place, 0, len(tail) - 1)]
        return np.where(np.isnan(out), 1.0, out) if np.isfinite(standard[-1]).any() else out

    def single(self, standard: Array) -> Array:
        """Return the probability of a single night's residual, from the history and, beyond it, a Pareto tail."""
        edge, above, scale, shape = self._pareto
        far = np.maximum(0.0, standard - edge)
        tail = above * (np.exp(-far / scale) if shape < 1e-6 else (1 + shape * far / scale) ** (-1 / shape))
        seen = 1 - np.searchsorted(self._sorted, standard, side="left") / max(1, len(self._sorted))
        return np.where(np.isnan(standard), np.nan, np.where(standard > edge, tail, np.maximum(seen, above)))


def tail_of(standard: Array, chance: float, longest: int, clip: float | None = None) -> Tail:
    """Return the tail of residuals ``[night, series]`` in units of their scales.

    ``chance``: probability of an alarm.  ``longest``: nights in the longest window.  ``clip``: the clip of another
    tail; None: find the best clip.
    """
    pooled = np.sort(standard[np.isfinite(standard)])
    if len(pooled) < 2:
        pooled = np.array([-1.0, 1.0])
    inflation = tuple(_inflation(standard, k) for k in range(1, longest + 1))
    chosen, histogram = None, _histogram(pooled)
    for tried in _CLIPS if clip is None else (clip,):
        seen = _tail(_clipped(histogram, float(tried)), longest)
        threshold = int(np.argmax(seen <= chance)) if (seen <= chance).any() else None
        if threshold is None:
            continue
        step = _detectable(histogram, float(tried), longest, threshold, inflation[-1])
        if chosen is None or step < chosen[0]:
            chosen = (step, float(tried))
    step, best = chosen or (np.inf, float(_CLIPS[-1]))
    return Tail(
        chance=chance,
        clip=best,
        detectable=float(step),
        inflation=inflation,
        _tails=tuple(_tail(_clipped(histogram, best), k) for k in range(1, longest + 1)),
        _sorted=pooled,
        _pareto=_pareto(pooled),
    )


def _histogram(values: Array) -> Array:
    """Return the shares of values in cells of ``_WIDTH`` from ``-_FAR`` to ``_FAR``; the outermost cells are open."""
    places = np.rint((np.clip(values, -_FAR, _FAR) + _FAR) / _WIDTH).astype(int)
    counts = np.bincount(places, minlength=round(2 * _FAR / _WIDTH) + 1)
    counts[-1] += 1  # the next of n values is beyond all of them with probability 1 / (n + 1)
    return np.asarray(counts / counts.sum(), np.float64)


def _clipped(histogram: Array, clip: float, shift: int = 0) -> Array:
    """Return the histogram of values moved up by ``shift`` cells and then clipped: cells from ``-clip`` to ``clip``."""
    size, middle = round(clip / _WIDTH), len(histogram) // 2
    low, high = max(0, middle - size - shift), max(0, middle + size - shift)
    cells = np.zeros(2 * size + 1)
    inside = histogram[low : high + 1]
    cells[len(cells) - len(inside) :] = inside
    cells[len(cells) - len(inside)] += histogram[:low].sum()
    cells[-1] += histogram[high + 1 :].sum()
    return cells


def _tail(cells: Array, times: int) -> Array:
    """Return, for each cell, the probability that a sum of ``times`` values is in it or above it."""
    size = times * (len(cells) - 1) + 1
    length = 1 << (size - 1).bit_length()
    density = np.fft.irfft(np.fft.rfft(cells, length) ** times, length)[:size]
    # rounding errors of the transforms are far below the probability of any alarm
    return np.asarray(np.maximum(np.cumsum(np.maximum(density, 0)[::-1])[::-1], 1e-15), np.float64)


def _detectable(histogram: Array, clip: float, times: int, threshold: int, inflation: float) -> float:
    """Return the smallest step whose sum reaches the threshold with probability ``POWER``; infinity if none does."""
    reach = int(np.ceil((threshold * _WIDTH - times * clip) * inflation / _WIDTH + times * clip / _WIDTH))
    low, high = 0, len(histogram) // 2

    def power(shift: int) -> float:
        tail = _tail(_clipped(histogram, clip, shift), times)
        return float(tail[reach]) if reach < len(tail) else 0.0

    if power(high) < POWER:
        return np.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high * _WIDTH


def _inflation(standard: Array, times: int) -> float:
    """Return how much wider sums of consecutive nights are than sums of independent nights; at least 1."""
    if times == 1 or len(standard) < 2 * times:
        return 1.0
    clipped = np.clip(standard, -3, 3)
    sums = sum(clipped[i : len(clipped) - times + 1 + i] for i in range(times))
    sums = np.asarray(sums)[np.isfinite(sums)]
    singles = clipped[np.isfinite(clipped)]
    if len(sums) < 10 or not singles.std() > 0:
        return 1.0
    return max(1.0, float(np.sqrt(np.mean(sums**2) / times / np.mean(singles**2))))


def _pareto(pooled: Array) -> tuple[float, float, float, float]:
    """Fit a generalized Pareto tail by probability-weighted moments (Hosking and Wallis, 1987).

    The estimated shape is at least 0 (exponential); the returned shape is one standard error heavier.
    """
    edge = float(np.quantile(pooled, 1 - _POWER_OF_TAIL))
    beyond = np.sort(pooled[pooled > edge]) - edge
    if len(beyond) < 5:
        spread = float(pooled.std()) or 1.0
        return edge, _POWER_OF_TAIL, spread, 0.5
    places = (np.arange(1, len(beyond) + 1) - 0.35) / len(beyond)
    mean, weighted = float(beyond.mean()), float(np.mean((1 - places) * beyond))
    shape = min(0.9, max(0.0, 2 - mean / max(mean - 2 * weighted, 1e-12)))
    scale = mean * (1 - shape)
    shape = min(0.9, shape + (1 + shape) / np.sqrt(len(beyond)))
    return edge, len(beyond) / len(pooled), scale, shape
