"""Detection of steps: learn the noise of earlier nights, and judge the newest nights against it.

Values are logarithms, ``[night, series]``, NaN where there is none.  ``docs/performance.md`` derives the method:

1. *Level*: a series is compared with the median of earlier nights.  The three newest nights are left out, so that a
   step is not part of its own reference.  The number of earlier nights is the one that forecasts the history best.
2. *Common factor*: the factor that moves all series in one night is estimated robustly across them, with a loading for
   each.  It is a series of its own: a slow night is its noise, and a change of all series is its step.
3. *Noise*: the noise of each series comes from its residuals.  It is the wider of an inner and an outer scale, so that
   a second mode counts as noise.  With few nights, it is drawn up towards the noise of the other series.
4. *Threshold*: the residuals of one to three nights are clipped and summed.  The probability of a sum is the
   convolution of the history's distribution, with a Pareto tail for a single night.  A sum is a step if its probability
   is below the target rate of false alarms, divided by the number of looks: series times windows of nights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.bench.detection.tails import RATE, Tail, tail_of

Array = npt.NDArray[np.float64]

CONFIRM = 3
"""Maximum number of nights in which a step can be found: windows from one night to this many are judged."""

MEMORIES = (5, 8, 13, 21, 34)
"""Candidate numbers of nights for the median that is the level."""

WINDOW = 90
"""Maximum number of nights from which noise is learned."""


@lru_cache
def isf(chance: float) -> float:
    """Return the value that a standard normal deviate exceeds with this probability."""
    return -float(special.ndtri(chance))


_MAD = 1 / isf(0.25)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of past nights, for the judgment of one night."""

    night: int
    """Index of the night to judge."""
    scale: Array
    """``[series]``: noise of one night, as a standard deviation; NaN: unknown."""
    unsure: Array
    """``[series]``: the factor by which the uncertainty of the newest level widens the scale."""
    nights: npt.NDArray[np.intp]
    """``[series]``: number of nights from which the noise was learned."""
    loading: Array
    """``[series]``: loading on the common factor."""
    loading_error: Array
    spread: Array
    """``[series]``: the weight of a series in the common factor follows the inverse square of this."""
    residual: Array
    """``[window, series]``: residuals of the newest nights, oldest first, including the common factor."""
    centre: Array
    """``[series]``: median of the residuals; not zero if there is a trend."""
    shared_centre: float
    shared_scale: float
    slower: Tail
    faster: Tail
    needed: int
    """Number of nights that a series needs before it is judged."""
    looks: int
    """Number of series, plus one for the common factor."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of level."""

    series: int
    """Index; -1: all series together."""
    found: int
    """Index of the night in which the step was found."""
    since: int
    """Index of the first night with the step."""
    size: float
    """Logarithm of the ratio of the new level to the old; above 0: slower."""
    low: float
    high: float
    """The 95 % confidence interval of the size is from ``low`` to ``high``."""
    chance: float
    """Probability that noise alone raises this or any other alarm in such a night."""


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """The judgment of one night."""

    noise: Noise
    steps: tuple[Step, ...]


def residuals(values: Array, memory: int) -> Array:
    """Return ``[night, series]``: each night minus the median of ``memory`` earlier nights.

    The newest of those is ``CONFIRM`` nights earlier.  The residual is NaN if fewer than three of them are known: a
    median of fewer does not survive an outlier.
    """
    out = np.full_like(values, np.nan)
    for night in range(CONFIRM + 2, len(values)):
        before = values[max(0, night - CONFIRM - memory + 1) : night - CONFIRM + 1]
        known = np.isfinite(before).sum(0) >= 3
        if known.any():
            out[night, known] = values[night, known] - middle(before[:, known], 0)
    return out


def memory_of(values: Array) -> tuple[int, Array]:
    """Return the number of nights whose median forecasts the history best, and the residuals that it gives."""
    tried = {memory: residuals(values, memory) for memory in MEMORIES if memory <= max(MEMORIES[0], len(values))}
    if len(values) <= CONFIRM + MEMORIES[0]:
        return MEMORIES[0], tried[MEMORIES[0]]
    errors = {memory: _own_error(residual) for memory, residual in tried.items()}
    best = min(errors, key=errors.__getitem__)
    return best, tried[best]


def _own_error(residual: Array) -> float:
    """Return the median absolute residual after the part that all series share is removed."""
    kept = residual[np.isfinite(residual).any(1)][:, np.isfinite(residual).any(0)]
    if not kept.size:
        return np.inf
    off = np.abs(kept - middle(kept, 1)[:, None]) if kept.shape[1] > 2 else np.abs(kept)
    return float(np.nanmedian(off))


def learn(
    residual: Array,
    night: int,
    *,
    rate: float = RATE,
    within: Array | None = None,
    extra: Array | None = None,
) -> Noise:
    """Learn the noise from residuals for the judgment of a night.

    The newest ``CONFIRM`` nights up to this night are judged, and nothing is learned from them.
    ``within[series]``: standard error of a night's value from the spread of its rounds; noise is at least this.
    ``extra[series]``: variance of the level as a share of a night's variance; above 0 after a step, for example.
    """
    newest = slice(night - CONFIRM + 1, night + 1)
    past = residual[max(0, night - CONFIRM + 1 - WINDOW) : max(0, night - CONFIRM + 1)]
    recent = np.full((CONFIRM, residual.shape[1]), np.nan)
    newest_known = residual[max(0, newest.start) : newest.stop]
    recent[CONFIRM - len(newest_known) :] = newest_known
    looks = residual.shape[1] + 1
    chance = rate / looks / CONFIRM
    loading, loading_error, spread = _loadings(past)
    shared, others = across(past, loading, spread)
    own = past - loading * others
    counts = np.isfinite(own).sum(0)
    columns = np.column_stack([own, shared])
    known = np.isfinite(columns).sum(0) >= 2
    centre, scale = np.zeros(looks), np.full(looks, np.nan)
    centre[known] = middle(columns[:, known], 0)
    scale[known] = _scales(columns[:, known] - centre[known], chance)
    scale[:-1] = _drawn_together(scale[:-1], counts)
    if within is not None:
        scale[:-1] = np.fmax(scale[:-1], np.where(np.isfinite(scale[:-1]), within, np.nan))
    standard = _crossed(columns - centre, chance)
    slower = tail_of(standard, chance, CONFIRM)
    return Noise(
        night=night,
        scale=scale[:-1],
        unsure=np.ones(looks - 1) if extra is None else np.sqrt(1 + extra),
        nights=counts,
        loading=loading,
        loading_error=loading_error,
        spread=spread,
        residual=recent,
        centre=centre[:-1],
        shared_centre=float(centre[-1]),
        shared_scale=float(scale[-1]),
        slower=slower,
        faster=tail_of(-standard, chance, CONFIRM, slower.clip),
        needed=nights_needed(chance),
        looks=looks,
    )


@lru_cache
def nights_needed(chance: float) -> int:
    """Return how many nights make the threshold from Student's t at most twice that of an infinite history."""
    limit = 2 * isf(chance)
    return next(n for n in range(3, 1000) if -special.stdtrit(n - 1, chance) <= limit)


def nights_to_judge(needed: int) -> int:
    """Return the length of a history in which ``needed`` nights teach noise.

    The first nights have no level yet, and nothing is learned from the newest.
    """
    return needed + (CONFIRM + 2) + CONFIRM


def _loadings(past: Array) -> tuple[Array, Array, Array]:
    """Return loadings, their errors, and the spread of series about the common factor; ``[series]`` each.

    A loading is the regression of a series on the common factor of the others.  The less precisely it is known, the
    more it is drawn towards the mean of all loadings.  Fewer than three series have no common factor.
    """
    count = past.shape[1]
    loading, error = np.ones(count), np.zeros(count)
    spread = np.ones(count)
    if count < 3 or not np.isfinite(past).any():
        return np.zeros(count), error, spread
    spread = _positive(_MAD * middle(np.abs(past), 0))
    for _ in range(2):
        _, others = across(past, loading, spread)
        off = past - loading * others
        unit = _positive(_MAD * middle(np.abs(off), 0))
        weight = np.where(np.isfinite(off), np.minimum(1, 2 * unit / np.maximum(np.abs(off), 1e-12)), 0.0)
        power = np.maximum((weight * others**2).sum(0), 1e-18)
        slope = (weight * others * np.nan_to_num(past)).sum(0) / power
        error = unit / np.sqrt(power)
        sure = 1 / error**2
        mean = float((sure * slope).sum() / sure.sum())
        between = max(0.0, float(np.mean((slope - mean) ** 2 - error**2)))
        share = between / (between + error**2)
        loading = np.maximum(0.0, mean + share * (slope - mean))
        error = np.sqrt(share) * error
        spread = unit
    return loading, error, spread


def _positive(spread: Array) -> Array:
    """Return spreads; those that are unknown or zero are replaced by the largest."""
    known = np.isfinite(spread) & (spread > 0)
    return np.where(known, spread, spread[known].max() if known.any() else 1.0)


def across(residual: Array, loading: Array, spread: Array) -> tuple[Array, Array]:
    """Estimate the common factor with Tukey's biweight across series.

    Returns ``[night]``, from all series, and ``[night, series]``, without each series in turn.
    """
    usable = loading > 0.05
    ratio = np.where(usable, residual / np.where(usable, loading, 1), np.nan)
    unit = np.where(usable, spread / np.where(usable, loading, 1), np.nan)
    known = np.isfinite(ratio)
    start = middle(ratio, 1)
    for _ in range(3):
        off = (ratio - start[:, None]) / (6 * unit)
        weight = np.where(known & (np.abs(off) < 1), (1 - off**2) ** 2, 0.0) / np.where(usable, unit, 1.0) ** 2
        total = weight.sum(1)
        summed = (weight * np.nan_to_num(ratio)).sum(1)
        start = np.where(total > 0, summed / np.maximum(total, 1e-300), start)
    rest = total[:, None] - weight
    left = summed[:, None] - weight * np.nan_to_num(ratio)
    return start, np.where(rest > 1e-9 * total[:, None], left / np.maximum(rest, 1e-300), 0.0)


def _scales(off: Array, chance: float) -> Array:
    """Return ``[series]``: the wider of two scales of residuals.

    The inner scale is from their median absolute value.  The outer scale is from the quantile beyond which three nights
    in a row are as rare as an alarm may be.
    """
    inner = _MAD * middle(np.abs(off), 0)
    share = chance ** (1 / CONFIRM)
    outer = _quantile(np.abs(off), 1 - 2 * share) / isf(share)
    return np.asarray(np.maximum(np.maximum(inner, outer), 1e-9), np.float64)


def _drawn_together(scale: Array, counts: npt.NDArray[np.intp]) -> Array:
    """Draw scales up towards their median, by the share of their spread that a short history explains.

    Scales are never drawn down: a series that is noisier than the others may have a reason that they do not have.
    """
    known = np.isfinite(scale)
    if known.sum() < 3:
        return scale
    logs = np.log(scale[known])
    sampling = 1.36 / np.maximum(counts[known], 2)  # variance of the logarithm of a median absolute deviation
    between = max(0.0, float(np.var(logs) - sampling.mean()))
    mean = float(np.median(logs))
    out = scale.copy()
    out[known] = np.exp(np.maximum(logs, mean + between / (between + sampling) * (logs - mean)))
    return out


def _crossed(columns: Array, chance: float) -> Array:
    """Return residuals in units of a scale from other nights: that of even nights for odd ones, and the reverse."""
    out = np.full_like(columns, np.nan)
    for turn in (0, 1):
        other, mine = columns[1 - turn :: 2], columns[turn::2]
        known = np.isfinite(other).sum(0) >= 2
        if not known.any():
            continue
        scale = np.full(columns.shape[1], np.nan)
        scale[known] = _scales(other[:, known], chance)
        scale = _drawn_together(scale, np.isfinite(other).sum(0))
        out[turn::2] = mine / scale
    return out


def middle(values: Array, axis: int) -> Array:
    """Return the median of the known values along an axis; NaN where none is known."""
    ordered = np.sort(values, axis)  # NaN is last; several times as fast as nanmedian
    counts = np.isfinite(values).sum(axis, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(counts - 1, 0) // 2, axis)
    high = np.take_along_axis(ordered, np.minimum(counts // 2, values.shape[axis] - 1), axis)
    return np.asarray(np.where(counts > 0, (low + high) / 2, np.nan).squeeze(axis), np.float64)


def _quantile(values: Array, share: float) -> Array:
    """Return a quantile of the known values of each column, interpolated.  Every column must have a known value."""
    ordered = np.sort(values, 0)
    place = (np.isfinite(values).sum(0) - 1) * share
    low = np.floor(place).astype(int)
    columns = np.arange(values.shape[1])
    under, over = ordered[low, columns], ordered[np.minimum(np.ceil(place).astype(int), len(values) - 1), columns]
    return np.asarray(under + (over - under) * (place - low), np.float64)


@dataclass(frozen=True, kw_only=True)
class Off:
    """How far the newest nights are off.  ``[window, series]``, oldest night first; the last column is the factor."""

    sized: Array
    """Logarithms of ratios to the level, without the common factor."""
    wide: Array
    """The scales of these."""
    standard: Array
    """In units of the scales; NaN for a series that is not judged yet."""


def off_level(noise: Noise, added: Array | None = None) -> Off:
    """Return how far the newest nights are off their level.  ``added[window, series]``: a step to add to them."""
    residual = noise.residual if added is None else noise.residual + added
    shared, others = across(residual, noise.loading, noise.spread)
    shared = shared - noise.shared_centre
    own = residual - noise.loading * others - noise.centre
    # A common event that is larger than any in the history may have other loadings than those.
    beyond = np.maximum(0.0, np.abs(others) - isf(noise.slower.chance ** (1 / CONFIRM)) * noise.shared_scale)
    beyond = np.nan_to_num(beyond) * float(np.std(noise.loading))
    scale = np.sqrt((noise.unsure * noise.scale) ** 2 + (others * noise.loading_error) ** 2 + beyond**2)
    standard = np.where(noise.nights >= noise.needed, own / scale, np.nan)
    armed = noise.nights.max(initial=0) >= noise.needed
    return Off(
        sized=np.column_stack([own, shared]),
        wide=np.column_stack([scale, np.full(CONFIRM, noise.shared_scale)]),
        standard=np.column_stack([standard, shared / noise.shared_scale if armed else np.full(CONFIRM, np.nan)]),
    )


def judge(noise: Noise, added: Array | None = None) -> Judgment:
    """Judge the newest nights.  ``added[window, series]``: a step to add to them, to see whether it is found."""
    off = off_level(noise, added)
    slower, faster = noise.slower.chances(off.standard), noise.faster.chances(-off.standard)
    steps: list[Step] = []
    for sign, chances, tail in ((1, slower, noise.slower), (-1, faster, noise.faster)):
        rare = np.flatnonzero(np.nan_to_num(chances.min(0), nan=1.0) <= tail.chance)
        steps += [_step(int(i), off.sized[:, i], off.wide[:, i], chances[:, i], noise, sign) for i in rare]
    return Judgment(noise=noise, steps=tuple(steps))


def _step(index: int, off: Array, scale: Array, chances: Array, noise: Noise, sign: int) -> Step:
    """Return a step that begins in the night that explains the newest nights best."""
    known = np.isfinite(off)
    fits = []
    for k in range(1, CONFIRM + 1):
        inside = known & (np.arange(CONFIRM) >= CONFIRM - k)
        if not known[CONFIRM - k] or not inside.any() or sign * np.median(off[inside]) <= 0:
            continue
        level = float(np.median(off[inside]))
        left = np.abs(np.where(inside, off - level, off)[known] / scale[known])
        fits.append((float(left.sum()), k, level))
    _, k, size = min(fits)
    unit = float(scale[CONFIRM - k :][known[CONFIRM - k :]].mean())
    error = isf(0.025) * unit * (noise.slower.inflation[k - 1] if k > 1 else 1.0) / np.sqrt(k)
    return Step(
        series=-1 if index == noise.looks - 1 else index,
        found=noise.night,
        since=noise.night - k + 1,
        size=size,
        low=size - error,
        high=size + error,
        chance=float(min(1.0, chances.min() * CONFIRM * noise.looks)),
    )


def within_nights(rounds: Sequence[Sequence[float]]) -> float:
    """Return the standard error of a night's value from the spread of its rounds, median of nights; 0: unknown."""
    errors = []
    for night in rounds:
        if len(night) >= 3 and min(night) > 0:
            logs = np.log(night)
            spread = _MAD * float(np.median(np.abs(logs - np.median(logs))))
            errors.append(spread * np.sqrt(np.pi / 2 / len(night)))
    return float(np.median(errors)) if errors else 0.0
