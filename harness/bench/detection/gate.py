"""The nightly gate: judge the newest night against earlier nights on the same fingerprint."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from harness.bench.detection.alarms import (
    Alarm,
    Decision,
    counts,
    environment,
    incomplete,
    missing,
    refused,
    since_night,
)
from harness.bench.detection.bands import bands, describe
from harness.bench.detection.changes import CONFIRM, Array, Step, isf, middle, nights_to_judge, within_nights
from harness.bench.detection.dueted import alarms as of_duets
from harness.bench.detection.dueted import notes as duets_said
from harness.bench.detection.dueted import standing
from harness.bench.detection.follow import EVERY, Followed, estimate, follow
from harness.bench.detection.suspicions import DUETED, Suspicion, suspected, unknown
from harness.bench.detection.tails import RATE
from harness.bench.history.lines import Line
from harness.bench.records import COUNTS, Series

NIGHTS = 120
"""Maximum number of a line's newest nights that are used."""

_RESOLUTION = 1e-6
"""Seconds.  Less time, such as that of fully hidden communication, counts as this."""


def timed(line: Line) -> tuple[list[Series], Array, Array]:
    """Return the series of times, logarithms of their values ``[night, series]``, and standard errors within nights."""
    names = dict.fromkeys(s for n in line.nights for s in line.figures[n.id] if s.metric not in COUNTS)
    values = np.full((len(line.nights), len(names)), np.nan)
    within = np.zeros(len(names))
    for j, series in enumerate(names):
        figures = [line.figures[night.id].get(series) for night in line.nights]
        for i, figure in enumerate(figures):
            if figure and figure.value is not None and not figure.refused:
                values[i, j] = np.log(max(figure.value, _RESOLUTION if series.metric != "time" else 1e-12))
        within[j] = within_nights([figure.rounds for figure in figures if figure and not figure.refused])
    return list(names), values, within


def decide(
    line: Line, *, rate: float = RATE, progress: Callable[[int, int], object] = lambda done, of: None
) -> Decision:
    """Judge the newest night of a line.

    ``rate``: target rate of false alarms.  ``progress`` is called with the number of judged nights and of all nights.
    Errors: ValueError if there is no night.
    """
    if not line.nights:
        raise ValueError("no nights")
    line = msgspec.structs.replace(line, nights=line.nights[-NIGHTS:])
    alarms = [*environment(line), *incomplete(line), *missing(line), *refused(line), *counts(line)]
    series, values, _ = timed(line)
    improvements: list[Alarm] = []
    notes: list[str] = []
    suspicions = [Suspicion(series=one, kind=DUETED, ratio=said.ratio or 1.0) for one, said in standing(line).items()]
    if series:
        followed = followed_of(line, rate, progress)
        for one in _steps(line, series, followed, rate):
            (alarms if one.ratio > 1 else improvements).append(one)
        notes += _learning(series, values, followed)
        told = {one for alarm in alarms for one in alarm.series} | {one.series for one in suspicions}
        noise = followed.newest.noise
        suspicions += suspected(series, noise, told)
        if not (np.isfinite(values[-1]) & (noise.nights >= noise.needed)).any():
            suspicions += [one for one in unknown(line) if one.series not in told]
    alarms += of_duets(line, {one for alarm in alarms for one in alarm.series})
    return Decision(
        night=line.nights[-1].id,
        alarms=alarms,
        improvements=improvements,
        notes=[*notes, *duets_said(line)],
        suspicions=suspicions,
    )


def followed_of(line: Line, rate: float, progress: Callable[[int, int], object]) -> Followed:
    """Judge all nights of a line, with its accepted steps.  Indices of series are those of :func:`timed`."""
    series, values, within = timed(line)
    places = {one.key: j for j, one in enumerate(series)} | {"": EVERY}
    index = {night.id: i for i, night in enumerate(line.nights)}
    known = [
        (places[a.series], index[a.night])
        for a in line.accepted
        if a.kind == "step" and a.series in places and a.night in index
    ]
    return follow(values, accepted=known, rate=rate, within=within, progress=progress)


def _learning(series: Sequence[Series], values: Array, followed: Followed) -> list[str]:
    noise = followed.newest.noise
    here = np.isfinite(values[-1])
    few = here & (noise.nights < noise.needed)
    if not few.any():
        return []
    needed = nights_to_judge(noise.needed)
    have = int(np.isfinite(values[:, few]).sum(0).min())
    which = "all" if few.all() else str(int(few.sum()))
    return [f"learning: {which} of {len(series)} series: {have} of {needed} nights; no steps are told yet"]


def _steps(line: Line, series: list[Series], followed: Followed, rate: float) -> list[Alarm]:
    """Return alarms for the steps that stand; steps of the same night and direction are joined."""
    out: list[Alarm] = []
    standing = list(followed.standing)
    every = next((step for step in standing if step.series == EVERY), None)
    if every is not None:
        alarm, standing = _everything(line, series, followed, every, standing)
        out.append(alarm)
    for sign in (1, -1):
        for group in _of_a_night([s for s in standing if s.series != EVERY and s.size * sign > 0]):
            chosen = _joined(group, series, followed, rate) if every is None else {s.series: s for s in group}
            by_series = {series[j]: step for j, step in chosen.items()}
            out += [_alarm(line, series, band, [by_series[one] for one in band]) for band in bands(by_series, series)]
    return out


def _of_a_night(steps: list[Step]) -> list[list[Step]]:
    """Group steps by their first night, which may be off by as many nights as confirm a step."""
    groups: list[list[Step]] = []
    for step in sorted(steps, key=lambda s: s.since):
        if groups and step.since - groups[-1][0].since < CONFIRM:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def _joined(group: list[Step], series: list[Series], followed: Followed, rate: float) -> dict[int, Step]:
    """Return a group's steps by series, with steps of neighboring series that moved likewise, each by its own change.

    Once something is wrong, the question is only how far it reaches.  A series that differs from one of the group in a
    single field therefore joins if the probability of its change is below the whole rate and not a share of it.
    """
    chosen = {step.series: step for step in group}
    since = statistics.mode(step.since for step in group)
    strongest = min(group, key=lambda s: s.chance)
    rest = np.array([j for j in range(len(series)) if j not in chosen], np.intp)
    sizes, errors = estimate(followed.values, followed.newest.noise, rest, since, followed.memory)
    sign, z = np.sign(strongest.size), isf(rate)
    for j, size, error in zip(rest, sizes, errors, strict=True):
        alike = any(_differ_in_one(series[j], series[step.series]) for step in group)
        if alike and np.isfinite(size) and sign * size > z * error and abs(size) > abs(strongest.size) / 2:
            half = float(isf(0.025) * error)
            chosen[int(j)] = replace(
                strongest, series=int(j), size=float(size), low=float(size) - half, high=float(size) + half
            )
    return chosen


def _differ_in_one(one: Series, other: Series) -> bool:
    fields = [name for name in Series.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return len(fields) == 1


def _everything(
    line: Line, series: list[Series], followed: Followed, every: Step, standing: list[Step]
) -> tuple[Alarm, list[Step]]:
    """Return the alarm of all series together, and the steps that it does not cover.

    A series' own step of about the same night is part of its share in the common step, or an exception to it.  If it
    more than doubles the common step, it is reported too, with the common step included.
    """
    loading, values = followed.newest.noise.loading, followed.values
    own = {s.series: s for s in standing if s.series != EVERY and abs(s.since - every.since) < CONFIRM}
    level = middle(values[max(0, every.since - followed.memory) : every.since], 0)
    total = dict(enumerate(np.nan_to_num(middle(values[every.since :] - level, 0)).tolist()))
    half = (every.high - every.size) * float(np.median(loading))
    more = {j for j, step in own.items() if step.size * every.size > 0 and abs(step.size) > abs(every.size)}
    taken = [j for j in total if (total[j] - half) * (total[j] + half) > 0 and total[j] * every.size > 0]
    left = [series[j] for j in total if j not in taken]
    size = statistics.median(total[j] for j in taken) if taken else every.size
    share = f"{len(taken)} of {len(series)} series" if left else f"all {len(series)} series"
    but = f", not {_names(left, series)}" if left and len(left) <= len(taken) else ""
    ratio = _ratio(size, size - half, size + half)
    text = f"{share} together{but} {ratio}{since_night(line, every.since)}, {_confidence(every.chance)}"
    alarm = Alarm(
        kind="step",
        text=text,
        series=[series[j] for j in taken],
        everything=True,
        since=line.nights[every.since].id,
        ratio=float(np.exp(size)),
        low=float(np.exp(size - half)),
        high=float(np.exp(size + half)),
        confidence=1 - every.chance,
    )
    rest = [step for step in standing if step.series != EVERY and (step.series not in own or step.series in more)]
    return alarm, [_in_all(step, total[step.series], half) if step.series in more else step for step in rest]


def _in_all(step: Step, size: float, half: float) -> Step:
    """Return a step with its size including the common step, which is known within ``half``."""
    half = float(np.hypot(step.high - step.size, half))
    return replace(step, size=size, low=size - half, high=size + half)


def _names(some: list[Series], series: list[Series]) -> str:
    names = [describe(band, series) for band in bands(some, series)]
    return "; ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _alarm(line: Line, series: list[Series], band: list[Series], steps: list[Step]) -> Alarm:
    size = statistics.median(step.size for step in steps)
    # the intersection of the intervals; if it is empty, the range of all of them
    low, high = max(step.low for step in steps), min(step.high for step in steps)
    if low > high:
        low, high = min(step.low for step in steps), max(step.high for step in steps)
    elif len(steps) > 1:
        low, high = min(low, size), max(high, size)
    since = statistics.mode(step.since for step in steps)
    chance = min(step.chance for step in steps)
    text = f"{describe(band, series)} {_ratio(size, low, high)}{since_night(line, since)}, {_confidence(chance)}"
    return Alarm(
        kind="step",
        text=text,
        series=band,
        since=line.nights[since].id,
        ratio=float(np.exp(size)),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        confidence=1 - chance,
    )


def _ratio(size: float, low: float, high: float) -> str:
    percent = [100 * float(np.expm1(x)) for x in (size, low, high)]
    digits = 0 if max(map(abs, percent)) >= 10 else 1
    return f"{percent[0]:+.{digits}f} % ({percent[1]:.{digits}f} to {percent[2]:.{digits}f} %)"


def _confidence(chance: float) -> str:
    share = 100 * (1 - chance)
    return "confidence above 99.99 %" if share > 99.99 else f"confidence {share:.4g} %"
