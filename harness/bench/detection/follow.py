"""Judge a history night after night: which steps it has, which still stand, and what the newest night adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.bench.detection.changes import (
    CONFIRM,
    Array,
    Judgment,
    Noise,
    Step,
    across,
    isf,
    judge,
    learn,
    memory_of,
    middle,
    residuals,
)
from harness.bench.detection.tails import RATE

EVERY = -1
"""Index of the common factor, in place of that of a series."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """The result of judging nights one after the other."""

    found: tuple[Step, ...]
    """Every step in the order of detection, including those that were undone, without those that were accepted."""
    standing: tuple[Step, ...]
    """For each series, the step that stands since the last accepted level; size and interval use all nights since."""
    newest: Judgment
    memory: int
    """Number of nights in the median that is the level."""
    values: Array
    """``[night, series]``: logarithms; nights before an accepted step are moved to the level after it."""


@dataclass
class _Regime:
    """A level that began in some night, and how far the nights before were moved to it."""

    series: int
    since: int
    moved: Array
    """``[series]``: how far each series has been moved."""
    accepted: bool
    chance: float
    found: int

    def columns(self, count: int) -> npt.NDArray[np.intp]:
        """Return the indices of the series that it is about.  ``count``: number of all series."""
        return np.arange(count) if self.series == EVERY else np.array([self.series])


def follow(
    values: Array,
    *,
    accepted: Iterable[tuple[int, int]] = (),
    rate: float = RATE,
    within: Array | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Followed:
    """Judge a history night after night.

    ``values[night, series]``: logarithms of the nights' values, NaN where there is none.  ``accepted``: series (or
    ``EVERY``) and first night of each accepted step.  ``within``: as in :func:`~harness.bench.detection.changes.learn`.
    ``progress`` is called with the number of judged nights and of all nights.  Errors: ValueError if there is no night.
    """
    nights, count = values.shape
    memory, _ = memory_of(values)
    aligned, clean = values.copy(), values.copy()
    known = [_Regime(series, since, np.zeros(count), True, 0.0, since) for series, since in accepted]
    regimes: list[_Regime] = []
    residual = np.full_like(values, np.nan)
    newest: Judgment | None = None
    for night in range(nights):
        regimes += [one for one in known if one.since == night]
        residual[night] = residuals(aligned[max(0, night - memory - CONFIRM) : night + 1], memory)[-1]
        for one in regimes:
            last = max(one.since, night - 1)
            if last - one.since < memory:
                which = _realign(one, aligned, clean, last, newest, memory)
                residual[: night + 1, which] = residuals(aligned[: night + 1][:, which], memory)
        newest = judge(learn(residual, night, rate=rate, within=within, extra=_extra(regimes, night, count)))
        for step in newest.steps:
            regimes.append(_Regime(step.series, step.since, np.zeros(count), False, step.chance, night))
            _move(regimes[-1], aligned, clean, step.size, newest.noise)
            which = regimes[-1].columns(count)
            residual[: night + 1, which] = residuals(aligned[: night + 1][:, which], memory)
        progress(night + 1, nights)
    if newest is None:
        raise ValueError("no nights")
    detected = [_as_step(one, clean, newest.noise, memory) for one in regimes if not one.accepted]
    return Followed(
        found=tuple(detected),
        standing=tuple(_standing(detected, newest.noise, clean, memory)),
        newest=newest,
        memory=memory,
        values=clean,
    )


def _extra(regimes: list[_Regime], night: int, count: int) -> Array:
    """Return the variance of each series' newest level, as a share of a night's variance."""
    extra = np.zeros(count)
    for one in regimes:
        which = slice(None) if one.series == EVERY else one.series
        known = night - one.since
        # too few nights to survive an outlier say nothing about a level yet, unless all series agree
        sure = known >= CONFIRM or one.series == EVERY
        extra[which] = np.maximum(extra[which], np.pi / 2 / max(1, known) if sure else np.inf)
    return extra


def _move(one: _Regime, aligned: Array, clean: Array, size: float, noise: Noise) -> None:
    """Move the nights before a step to the level after it."""
    by = size * noise.loading if one.series == EVERY else size * (np.arange(aligned.shape[1]) == one.series)
    aligned[: one.since] += by
    if one.accepted:
        clean[: one.since] += by
    one.moved += by


def _realign(
    one: _Regime, aligned: Array, clean: Array, last: int, newest: Judgment | None, memory: int
) -> npt.NDArray[np.intp]:
    """Repeat the move with the nights up to ``last``.  Returns the indices of the series that it is about.

    A step of all series is removed from each series by that series' own change.  A series that changed by more than the
    common step explains keeps the rest, so that this is found as a step of its own.
    """
    which = one.columns(aligned.shape[1])
    off = aligned[one.since : last + 1] - _level(aligned, one.since, memory)
    by = middle(off, 0)
    if newest is not None and one.series == EVERY:
        noise = newest.noise
        sizes, error = estimate(aligned[: last + 1], noise, np.append(which, EVERY), one.since, memory)
        alone = np.abs(sizes[:-1]) > np.maximum(isf(noise.slower.chance) * error[:-1], abs(_common(one, noise)))
        by = np.where(alone, noise.loading * sizes[-1], by)
    elif newest is not None:
        _, others = across(off, newest.noise.loading, newest.noise.spread)
        by = middle(off - newest.noise.loading * others, 0)
    by = np.nan_to_num(by[which])
    aligned[: one.since, which] += by
    if one.accepted:
        clean[: one.since, which] += by
    one.moved[which] += by
    return which


def _common(one: _Regime, noise: Noise) -> float:
    """Return how far a step of all series moved those that load on the common factor, as a median."""
    return float(np.median(one.moved[noise.loading > 0])) if (noise.loading > 0).any() else 0.0


def _level(values: Array, before: int, memory: int) -> Array:
    """Return ``[series]``: the median of the ``memory`` nights before a night; NaN if there are none."""
    past = values[max(0, before - memory) : before]
    return middle(past, 0) if len(past) else np.full(values.shape[1], np.nan)


def estimate(values: Array, noise: Noise, series: npt.NDArray[np.intp], since: int, memory: int) -> tuple[Array, Array]:
    """Estimate how far series are off, since a night, from the level before it, without the common factor.

    ``values``: as in ``Followed``.  ``series``: indices.  Returns logarithms of ratios and their standard errors.  For
    ``EVERY``, the change is that of the common factor itself.
    """
    off = values[since:] - _level(values, since, memory)
    shared, others = across(off, noise.loading, noise.spread)
    own = np.column_stack([off - noise.loading * others, shared])
    counts = np.maximum(np.isfinite(own).sum(0), 1)
    scale = np.append(noise.scale, noise.shared_scale)
    inflation = np.array(noise.slower.inflation)[np.minimum(counts, CONFIRM) - 1]
    error = scale * np.sqrt(inflation**2 / counts + np.pi / 2 / max(1, min(memory, since)))
    return middle(own, 0)[series], error[series]


def jump(values: Array, noise: Noise, series: int, since: int, memory: int) -> tuple[float, float]:
    """Estimate how far a series is off since a night, without drift.  Returns the jump and its standard error.

    The drift is the median of slopes between two nights on the same side of the jump (Theil and Sen).
    """
    part = values[max(0, since - memory) :]
    shared, others = across(part - middle(part, 0), noise.loading, noise.spread)
    own = shared if series == EVERY else part[:, series] - noise.loading[series] * others[:, series]
    scale = noise.shared_scale if series == EVERY else float(noise.scale[series])
    at = np.arange(len(own), dtype=float)
    sides = [np.isfinite(own) & (at < min(since, memory)), np.isfinite(own) & (at >= min(since, memory))]
    if min(side.sum() for side in sides) < 1:
        return 0.0, np.inf
    slopes, power = [], 0.0
    for side in sides:
        x, y = at[side], own[side]
        i, j = np.triu_indices(len(x), 1)
        slopes.append((y[j] - y[i]) / (x[j] - x[i]))
        power += float(((x - x.mean()) ** 2).sum())
    every = np.concatenate(slopes)
    slope = float(np.median(every)) if len(every) else 0.0
    level = [float(np.median((own - slope * at)[side])) for side in sides]
    apart = float(at[sides[1]].mean() - at[sides[0]].mean())
    counts = sum(1 / side.sum() for side in sides)
    return level[1] - level[0], scale * float(np.sqrt(np.pi / 2 * counts + apart**2 / max(power, 1e-9)))


def _as_step(one: _Regime, clean: Array, noise: Noise, memory: int) -> Step:
    """Return a regime's step, whose size is how far the regime was moved in total."""
    index = np.array([one.series])
    _, error = estimate(clean, noise, index, one.since, memory)
    size = _common(one, noise) if one.series == EVERY else float(one.moved[one.series])
    half = float(isf(0.025) * error[0])
    return Step(
        series=one.series,
        found=one.found,
        since=one.since,
        size=size,
        low=size - half,
        high=size + half,
        chance=one.chance,
    )


def _standing(found: list[Step], noise: Noise, values: Array, memory: int) -> list[Step]:
    """Return what is left of each series' steps when one undoes another, with the date of the largest.

    A step that was found in an earlier night stands only as long as all nights since show it with the certainty that an
    alarm needs.
    """
    left, wanted = [], isf(noise.slower.chance)

    def surely(step: Step) -> bool:
        size, error = jump(values, noise, step.series, step.since, memory)
        half = (step.high - step.size) / isf(0.025)
        return abs(step.size) > wanted * half and size * step.size > 0 and abs(size) > wanted * error

    for series in sorted({step.series for step in found}):
        total: Step | None = None
        for step in sorted((s for s in found if s.series == series), key=lambda s: s.since):
            if total is None:
                total = step
                continue
            size, error = total.size + step.size, max(step.high - step.size, total.high - total.size)
            largest = total if abs(total.size) >= abs(step.size) else step
            total = replace(largest, size=size, low=size - error, high=size + error) if abs(size) > error else None
        # With more nights, a step becomes more certain; a false alarm does not, and neither does a drift.
        if total and (total.found == noise.night or surely(total)):
            left.append(total)
    return left
