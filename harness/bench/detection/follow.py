"""Night after night over a history: which steps there were, which of them still stand, what the newest night adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.bench.detection.changes import (
    CONFIRM,
    Array,
    Judgement,
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
"""Index of the common factor, in place of a series'."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What nights show, one after the other."""

    found: tuple[Step, ...]
    """Every step in the order in which it was found, those that were undone as well; none that was accepted."""
    standing: tuple[Step, ...]
    """Of each series what stands against the level that was last accepted: size and interval from all nights since."""
    newest: Judgement
    memory: int
    """Nights that a level is the median of."""
    values: Array
    """``[night, series]``: logarithms, the nights before an accepted step brought to the level after it."""


@dataclass
class _Regime:
    """A level that began in some night; by how much the nights before were moved to it."""

    series: int
    since: int
    moved: Array
    """``[series]``: how far each was moved so far."""
    accepted: bool
    chance: float
    found: int

    def columns(self, count: int) -> npt.NDArray[np.intp]:
        """Indices of the series that it is about, of so many."""
        return np.arange(count) if self.series == EVERY else np.array([self.series])


def follow(
    values: Array,
    *,
    accepted: Iterable[tuple[int, int]] = (),
    rate: float = RATE,
    within: Array | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Followed:
    """Judge night after night.

    ``values[night, series]``: logarithms of the nights' values, NaN where there is none.  ``accepted``: series (or
    ``EVERY``) and night of steps that are known.  ``progress`` is told how many nights of how many are done.
    """
    nights, count = values.shape
    memory, _ = memory_of(values)
    aligned, clean = values.copy(), values.copy()
    known = [_Regime(series, since, np.zeros(count), True, 0.0, since) for series, since in accepted]
    regimes: list[_Regime] = []
    residual = np.full_like(values, np.nan)
    newest: Judgement | None = None
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
    found = [_as_step(one, clean, newest.noise, memory) for one in regimes if not one.accepted]
    return Followed(
        found=tuple(found),
        standing=tuple(_standing(found, newest.noise, clean, memory)),
        newest=newest,
        memory=memory,
        values=clean,
    )


def _extra(regimes: list[_Regime], night: int, count: int) -> Array:
    """By series, the share of a night's variance by which its newest level is uncertain."""
    extra = np.zeros(count)
    for one in regimes:
        which = slice(None) if one.series == EVERY else one.series
        known = night - one.since
        # a level of fewer nights than survive an outlier says nothing yet, but where all series say it
        sure = known >= CONFIRM or one.series == EVERY
        extra[which] = np.maximum(extra[which], np.pi / 2 / max(1, known) if sure else np.inf)
    return extra


def _move(one: _Regime, aligned: Array, clean: Array, size: float, noise: Noise) -> None:
    """Bring the nights before a step to the level after it."""
    by = size * noise.loading if one.series == EVERY else size * (np.arange(aligned.shape[1]) == one.series)
    aligned[: one.since] += by
    if one.accepted:
        clean[: one.since] += by
    one.moved += by


def _realign(
    one: _Regime, aligned: Array, clean: Array, last: int, newest: Judgement | None, memory: int
) -> npt.NDArray[np.intp]:
    """Do so again with what nights up to ``last`` have said since; the series that it was about.

    A step of all is taken out of each series as that took it.  One that was changed by more than it would have been
    without any change of its own keeps the rest, so that this is found.
    """
    which = one.columns(aligned.shape[1])
    off = aligned[one.since : last + 1] - _level(aligned, one.since, memory)
    by = middle(off, 0)
    if newest is not None and one.series == EVERY:
        noise = newest.noise
        found, error = estimate(aligned[: last + 1], noise, np.append(which, EVERY), one.since, memory)
        alone = np.abs(found[:-1]) > np.maximum(isf(noise.slower.chance) * error[:-1], abs(_common(one, noise)))
        by = np.where(alone, noise.loading * found[-1], by)
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
    """By how much a step of all moved those that take part in what is common."""
    return float(np.median(one.moved[noise.loading > 0])) if (noise.loading > 0).any() else 0.0


def _level(values: Array, before: int, memory: int) -> Array:
    """``[series]``: the median of the nights before one; NaN where there are none."""
    past = values[max(0, before - memory) : before]
    return middle(past, 0) if len(past) else np.full(values.shape[1], np.nan)


def estimate(values: Array, noise: Noise, series: npt.NDArray[np.intp], since: int, memory: int) -> tuple[Array, Array]:
    """By how much series are off the level before a night since then, the common factor taken out; standard errors.

    ``values`` as ``Followed`` has them.  Logarithms of ratios; of ``EVERY`` it is the common factor's own.
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
    """By how much a series is off since a night when what drifts is taken out, and the standard error of that.

    The drift is the median of slopes between two nights on the same side (Theil and Sen).
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
    """A regime's step: its size is how far it was moved in all."""
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
    """What is left of each series' steps, where one undoes another; dated by the largest.

    What was found in an earlier night stands only as long as all nights since show it as surely as an alarm must be.
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
        # With more nights a step grows surer; a false alarm does not, nor does a drift.
        if total and (total.found == noise.night or surely(total)):
            left.append(total)
    return left
