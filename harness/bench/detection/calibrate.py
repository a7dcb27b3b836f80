"""Calibration of the gate: its false alarms and the steps it detects, on real nights and on nights made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from scipy import special

from harness.bench.detection.changes import CONFIRM, Array, Noise, judge, learn, memory_of, middle, residuals
from harness.bench.detection.follow import EVERY, Followed
from harness.bench.detection.rivals import E_DIVISIVE, RIVALS
from harness.bench.detection.tails import RATE
from harness.bench.history.lines import Line
from harness.bench.records import Series

STEPS = (0.02, 0.05, 0.10, 0.20, 0.50, 1.00)
"""Sizes of the steps that are tried, relative to the level before."""
GATE = "concord perf gate"

_SPARSE = 4
"""E-divisive is slow because of its permutations.  It judges every fourth night only, and no steps of all series."""


class Share(msgspec.Struct, frozen=True):
    """A share, with its 95 % confidence interval (Clopper and Pearson, 1934)."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """The share as a number; NaN if ``of`` is 0."""
        return self.hits / self.of if self.of else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """The lower and the upper bound of the confidence interval."""
        low = special.betaincinv(self.hits, self.of - self.hits + 1, 0.025) if self.hits else 0.0
        high = special.betaincinv(self.hits + 1, self.of - self.hits, 0.975) if self.hits < self.of else 1.0
        return float(low), float(high)


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """How often steps of one size and reach are found."""

    method: str
    reach: str
    """``one`` series, a ``band``, or ``all`` series."""
    step: float
    found: list[Share]
    """Within one, two and three nights."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a calibration on a history."""

    nights: int
    """Number of real nights."""
    series: int
    noise: float
    """Noise of one night, median of the series: a standard deviation of logarithms, without the common factor."""
    common: float
    """The noise of the common factor."""
    alarms: dict[str, Share]
    """Resampled A/A nights with an alarm, by method."""
    real: Share
    """Unchanged real nights with an alarm of the gate."""
    power: list[Power]
    smallest: dict[str, float]
    """By reach, the smallest step found within three nights in 95 of 100 trials; infinity: none of those tried."""
    expected: float
    """The same for one series, as the thresholds predict it."""


def quiet(values: Array, followed: Followed) -> Array:
    """Return A/A nights: nights without their steps, because those before a step are moved to the level after it."""
    out = followed.values.copy()
    for step in sorted(followed.standing, key=lambda one: one.series == EVERY):
        if step.series == EVERY:  # each series by its own change, which may differ from its loading
            before = out[max(0, step.since - followed.memory) : step.since]
            out[: step.since] += np.nan_to_num(middle(out[step.since :], 0) - middle(before, 0))
        else:
            out[: step.since, step.series] += step.size
    return np.where(np.isfinite(values), out, np.nan)


def resample(values: Array, rounds: Array, count: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """Make A/A nights from real ones: ``[count, series]`` logarithms, and rounds ``[count, series, round]`` in seconds.

    Blocks of consecutive nights are drawn, all series together, which keeps what series share and what carries over
    from night to night.  In each drawn night, blocks of rounds are drawn, so that two draws of one night differ.  The
    variance that this adds is removed from the variance between nights, so that the total stays the same (smoothed
    bootstrap: Silverman and Young, 1987; blocks: Künsch, 1989).
    ``rounds[night, series, round]``: logarithms of the rounds' figures relative to the night's.
    """
    nights, _, per_night = rounds.shape
    length = max(1, round(nights ** (1 / 3)))
    starts = generator.integers(0, nights, -(-count // length))
    order = ((starts[:, None] + np.arange(length)) % nights).ravel()[:count]
    level = middle(values, 0)
    off = np.nan_to_num(values - level)
    block = max(1, round(per_night ** (1 / 3)))
    first = generator.integers(0, per_night, (count, -(-per_night // block)))
    drawn = ((first[:, :, None] + np.arange(block)) % per_night).reshape(count, -1)[:, :per_night]
    spread = rounds[order[:, None], :, drawn].transpose(0, 2, 1)
    jitter = np.median(spread, 2)
    share = np.var(jitter, 0) / np.maximum(np.var(off, 0), 1e-18)
    made = level + np.sqrt(np.maximum(0.0, 1 - share)) * off[order] + jitter
    return made, np.exp(made[:, :, None] + spread - jitter[:, :, None])


def calibrate(
    values: Array,
    rounds: Array,
    bands: Sequence[Sequence[int]],
    *,
    nights: int = 200,
    trials: int = 60,
    seed: int = 0,
    rate: float = RATE,
    rivals: Sequence[str] = tuple(RIVALS),
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Calibration:
    """Measure false alarms on resampled A/A nights, and detection of ``trials`` steps of each size and reach.

    ``values[night, series]``: logarithms, without steps; ``rounds[night, series, round]``: logarithms relative to the
    night's.  ``bands``: indices of series that one step may reach.  ``nights``: number of resampled nights.
    """
    generator = np.random.default_rng(seed)
    count = values.shape[1]
    lead = max(40, len(values) // 2)
    made, seconds = resample(values, rounds, lead + nights, generator)
    _, residual = memory_of(made)
    judged = range(lead, lead + nights)
    work, done = nights * (1 + len(rivals)) + trials * len(STEPS) * 3, 0
    alarms, looked = dict.fromkeys([GATE, *rivals], 0), dict.fromkeys([GATE, *rivals], 0)
    learned: dict[int, Noise] = {}
    for night in judged:
        learned[night] = learn(residual, night, rate=rate)
        looked[GATE] += 1
        alarms[GATE] += any(step.size > 0 for step in judge(learned[night]).steps)
        for name in rivals:
            if name != E_DIVISIVE or night % _SPARSE == 0:
                alarms[name] += bool(RIVALS[name](made[: night + 1], seconds[: night + 1], count).any())
                looked[name] += 1
        done += 1 + len(rivals)
        progress(done, work)
    starts = generator.choice(judged[: -CONFIRM + 1], trials)
    power = []
    for reach in ("one", "band", "all"):
        wheres = [_where(reach, count, bands, generator) for _ in starts]
        for step in STEPS:
            asked = [name for name in rivals if name != E_DIVISIVE or reach != "all"]
            found_within = {name: np.zeros(CONFIRM, int) for name in [GATE, *asked]}
            for start, where in zip(starts, wheres, strict=True):
                delays = _first_found(step, start, where, learned, made, seconds, asked)
                for name, k in delays.items():
                    found_within[name][k:] += 1
                done += 1
                progress(done, work)
            power += [
                Power(method=name, reach=reach, step=step, found=[Share(int(x), trials) for x in hits])
                for name, hits in found_within.items()
            ]
    last = learned[judged[-1]]
    return Calibration(
        nights=len(values),
        series=count,
        noise=float(np.nanmedian(last.scale)),
        common=last.shared_scale,
        alarms={name: Share(hits, looked[name]) for name, hits in alarms.items()},
        real=_as_they_were(values, rate),
        power=power,
        smallest={
            reach: min(
                (p.step for p in power if (p.method, p.reach) == (GATE, reach) and p.found[-1].value >= 0.95),
                default=float("inf"),
            )
            for reach in ("one", "band", "all")
        },
        expected=float(np.expm1(last.slower.detectable * np.nanmedian(last.scale))),
    )


def _as_they_were(values: Array, rate: float) -> Share:
    memory, _ = memory_of(values)
    residual = residuals(values, memory)
    hits = judged = 0
    for night in range(len(values)):
        noise = learn(residual, night, rate=rate)
        if (noise.nights >= noise.needed).any():
            judged += 1
            hits += any(step.size > 0 for step in judge(noise).steps)
    return Share(hits, judged)


def _where(reach: str, count: int, bands: Sequence[Sequence[int]], generator: np.random.Generator) -> list[int]:
    if reach == "all":
        return list(range(count))
    if reach == "one" or not bands:
        return [int(generator.integers(count))]
    return list(bands[int(generator.integers(len(bands)))])


def _first_found(
    step: float,
    start: int,
    where: list[int],
    learned: dict[int, Noise],
    made: Array,
    seconds: Array,
    rivals: Sequence[str],
) -> dict[str, int]:
    """Return by method how many nights after its first night a step was found; without methods that did not find it."""
    out: dict[str, int] = {}
    size = np.log1p(step)
    for k in range(CONFIRM):
        night = start + k
        if GATE not in out:
            added = np.zeros((CONFIRM, made.shape[1]))
            added[CONFIRM - 1 - k :, where] = size
            steps = judge(learned[night], added).steps
            if any(one.size > 0 and (one.series == EVERY or one.series in where) for one in steps):
                out[GATE] = k
        slow = made[: night + 1, where].copy()
        slow[start:] += size
        slow_seconds = seconds[: night + 1, where].copy()
        slow_seconds[start:] *= 1 + step
        for name in rivals:
            if name not in out and bool(RIVALS[name](slow, slow_seconds, made.shape[1]).any()):
                out[name] = k
    return out


def relative_rounds(line: Line, series: Sequence[Series]) -> Array:
    """Return ``[night, series, round]``: logarithms of rounds relative to their night.

    The number of rounds is the smallest of all nights, at least 2.  For a night with a single round, such as an
    imported one, all rounds are the same.
    """
    logs = [[np.log(line.figures[night.id][one].rounds) for one in series] for night in line.nights]
    least = max(2, min(len(rounds) for row in logs for rounds in row))
    filled = [[np.resize(rounds, least) - np.median(rounds) for rounds in row] for row in logs]
    return np.array(filled, np.float64)


def bands_of(series: Sequence[Series]) -> list[list[int]]:
    """Return bands as indices: three adjacent sizes, or as many as there are, of series that differ in nothing else."""
    alike: dict[Series, list[int]] = {}
    for j, one in enumerate(series):
        alike.setdefault(msgspec.structs.replace(one, bytes=0), []).append(j)
    out = []
    for indices in alike.values():
        ordered = sorted(indices, key=lambda j: series[j].bytes)
        out += [ordered[i : i + 3] for i in range(max(1, len(ordered) - 2))]
    return out
