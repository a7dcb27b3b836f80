"""Scaling curves: bandwidths and training steps against the number of ranks, with the physical limit.  Pure.

*Efficiency* of a collective is its busbw over that of the fewest ranks that communicate: busbw is what every link must
carry, so on ideal hardware it stays the same.  Efficiency of a step is the time on the fewest ranks over the time on n:
every rank has rows of its own, so on ideal hardware it stays the same, too.

The limit of a collective is what memory allows: each of the bytes that busbw counts is copied at least once, by all
ranks at the same time, which is measured in the same run (:data:`COPY`).  A link's speed is another limit, where the
profile knows it.  The limit of a step is the efficiency of its compute alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.bench.figures import BUSBW_DEFINED, busbw
from harness.bench.records import LINK, STEP, Series, size_of

COPY = "memory.copy"
"""A copy in memory by all ranks at once; ``bytes`` is the size of one rank's copy."""
SHOWN = (1 << 16, 1 << 20)
"""Bytes near which there is a curve, besides the largest message."""


@dataclass(frozen=True)
class Point:
    """A figure on a number of ranks."""

    ranks: int
    value: float
    """busbw in GB/s (10^9), or the seconds of a step."""
    efficiency: float
    limit: float | None
    """What memory allows in GB/s, or the seconds of a step's compute alone; None if it was not measured."""


@dataclass(frozen=True)
class Curve:
    """A collective of a size, or a step, on ascending numbers of ranks."""

    operation: str
    """The collective with its reduction, or the step."""
    name: str
    """What tells it from others of the same operation."""
    step: bool
    points: tuple[Point, ...]
    link: float | None = None
    """GB/s of a rank's link, if the profile says it."""

    def best(self, point: Point) -> float | None:
        """Return the efficiency of a step's compute alone, which more ranks on the same cores lower, too."""
        first = self.points[0].limit
        return first / point.limit if self.step and first and point.limit else None


def curves(figures: Mapping[Series, float]) -> list[Curve]:
    """Return the curves of everything that was measured on at least two numbers of ranks that communicate.

    ``figures``: seconds of each series, or the value of a count.  Steps may begin with one rank.
    """
    copies = _copies(figures)
    link = next((value for series, value in figures.items() if series.metric == LINK), None)
    found = [*_collectives(figures, copies, link), *_steps(figures)]
    return sorted(found, key=lambda curve: (curve.step, curve.operation))


def _copies(figures: Mapping[Series, float]) -> dict[int, list[tuple[int, float]]]:
    """Return, by number of ranks, the bandwidth of a rank's copies in GB/s by size, ascending."""
    found: dict[int, list[tuple[int, float]]] = {}
    for series, seconds in figures.items():
        if series.operation == COPY and series.metric == "time" and seconds > 0:
            found.setdefault(series.world, []).append((series.bytes, series.bytes / seconds / 1e9))
    return {ranks: sorted(sizes) for ranks, sizes in found.items()}


def limit_at(copies: Sequence[tuple[int, float]], size: int) -> float | None:
    """Return the bandwidth of copies at a size, between those that were measured on a logarithmic scale."""
    if not copies:
        return None
    if size <= copies[0][0] or len(copies) == 1:
        return copies[0][1]
    for (below, slow), (above, fast) in itertools.pairwise(copies):
        if size <= above:
            part = math.log(size / below) / math.log(above / below)
            return math.exp(math.log(slow) * (1 - part) + math.log(fast) * part)
    return copies[-1][1]


def _collectives(
    figures: Mapping[Series, float], copies: Mapping[int, list[tuple[int, float]]], link: float | None
) -> list[Curve]:
    by_form: dict[tuple[str, str, str, str], dict[int, dict[int, float]]] = {}
    for series, seconds in figures.items():
        if series.operation in BUSBW_DEFINED and series.metric == "time" and series.world > 1 and seconds > 0:
            if any(name in ("group", "payload") for name, _ in series.variant):
                continue  # its size or its ranks say something else
            form = (series.operation, series.op, series.dtype, series.how)
            by_form.setdefault(form, {}).setdefault(_nominal(series.bytes), {})[series.world] = seconds
    found = []
    for (operation, op, dtype, how), sizes in by_form.items():
        several = {size: of for size, of in sizes.items() if len(of) > 1}
        for size in _shown(several):
            values = {ranks: busbw(operation, size, seconds, ranks) for ranks, seconds in several[size].items()}
            first = values[min(values)]
            points = tuple(
                Point(ranks, value, value / first, limit_at(copies.get(ranks, ()), size))
                for ranks, value in sorted(values.items())
            )
            name = ", ".join(filter(None, (size_of(size), dtype, how)))
            found.append(Curve(f"{operation} {op if op != 'sum' else ''}".strip(), name, False, points, link))
    return found


def _nominal(size: int) -> int:
    """Return the size that was asked for: messages are rounded down to whole elements for each rank."""
    quarter = 1 << max(0, size.bit_length() - 3)
    return -(-size // quarter) * quarter if size >= 1 << 10 else size


def _shown(sizes: Mapping[int, object]) -> list[int]:
    """Return the sizes nearest to :data:`SHOWN`, and the largest, ascending."""
    if not sizes:
        return []
    near = {min(sizes, key=lambda size, to=to: abs(math.log(size / to))) for to in SHOWN}  # type: ignore[misc]
    return sorted({*near, max(sizes)})


def _steps(figures: Mapping[Series, float]) -> list[Curve]:
    by_step: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for series, value in figures.items():
        if series.is_step and series.metric in ("time", "compute"):
            how = ", ".join(f"{name} {value}" for name, value in series.variant if name != "model")
            key = (series.operation.removeprefix(STEP), f"{how}, {_model(series)}".removeprefix(", "))
            by_step.setdefault(key, {}).setdefault(series.world, {})[series.metric] = value
    found = []
    for (operation, name), worlds in by_step.items():
        times = {ranks: metrics["time"] for ranks, metrics in worlds.items() if metrics.get("time")}
        if len(times) > 1:
            first = times[min(times)]
            points = tuple(
                Point(ranks, seconds, first / seconds, worlds[ranks].get("compute"))
                for ranks, seconds in sorted(times.items())
            )
            found.append(Curve(operation, name, True, points))
    return found


def _model(series: Series) -> str:
    return dict(series.variant).get("model", "")
