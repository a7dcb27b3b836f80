"""Tables of benchmark figures for the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.bench.figures import algbw, busbw
from harness.bench.records import COUNTS, Measurement, percentile, size_of
from harness.bench.scaling import Curve, Point, curves


def seconds(value: float) -> str:
    """Format a duration in seconds for people: ``12.3 us``, ``1.23 ms``."""
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e3, "ms"), (1e6, "us")) if abs(value) * s >= 1 or u == "us")
    return f"{value * scale:.3g} {unit}"


def shown(measurements: Sequence[Measurement], width: int, *, color: bool) -> list[str]:
    """Format measurements as tables: collectives with their bandwidths, steps with their parts, and how both scale.

    ``width``: columns of the terminal; tables are at least 60 columns wide.  ``color``: whether to write ANSI colors.
    Returns lines.
    """
    collectives = sorted((m for m in measurements if m.series.bytes), key=_place)
    steps = [m for m in measurements if not m.series.bytes]
    found = curves({m.series: m.value for m in measurements if not m.refused and m.iterations()})
    tables = [t for t in (_collectives(collectives), _steps(steps), *scaling(found)) if t.row_count]
    out = io.StringIO()
    console = Console(file=out, width=max(width, 60), force_terminal=color, color_system="standard" if color else None)
    for table in tables:
        console.print(table)
    return out.getvalue().rstrip("\n").split("\n")


def _place(measurement: Measurement) -> tuple[object, ...]:
    """Return a sort key that keeps each sweep together, in ascending order."""
    s = measurement.series
    return (s.operation, s.op, s.dtype, s.variant, s.world, s.bytes)


def _collectives(measurements: Sequence[Measurement]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("collective", no_wrap=True)
    table.add_column("how", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    for name in ("ranks", "size", "p50", "p95", "p99", "first", "algbw", "busbw"):
        table.add_column(name, justify="right", no_wrap=True)
    above = None
    for m in measurements:
        s, iterations = m.series, m.iterations()
        head = (f"{s.operation} {s.op}".strip(), s.how, s.dtype, str(s.world))
        again = above == head
        above = head
        percentiles = [seconds(percentile(iterations, p)) for p in (50, 95, 99)]
        typical = percentile(iterations, 50)
        figures = [f"{f:.3g}" for f in (algbw(s.bytes, typical), busbw(s.operation, s.bytes, typical, s.world))]
        row = [*(("", "", "", "") if again else head), size_of(s.bytes), *percentiles, seconds(m.first), *figures]
        table.add_row(*(Text(cell) for cell in row), style="red" if m.refused else None)
    table.caption = "algbw and busbw in GB/s, by nccl-tests' definitions" if measurements else None
    return table


def _steps(measurements: Sequence[Measurement]) -> Table:
    by_step: dict[tuple[str, int, str], dict[str, Measurement]] = {}
    for m in measurements:
        by_step.setdefault((m.series.operation, m.series.world, m.series.how), {})[m.series.metric] = m
    metrics = list(dict.fromkeys(m.series.metric for m in measurements))
    table = Table(box=None, pad_edge=False)
    table.add_column("step", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
    table.add_column("how", no_wrap=True)
    for (operation, ranks, how), by_metric in by_step.items():
        cells = [_figure(by_metric[metric]) if metric in by_metric else "" for metric in metrics]
        table.add_row(Text(operation), str(ranks), *cells, Text(how))
    return table


def _figure(measurement: Measurement) -> str:
    if measurement.series.metric in COUNTS:
        value = measurement.value
        return size_of(int(value)) if measurement.series.metric == "bytes" else f"{value:g}"
    return seconds(measurement.value)


def scaling(found: Sequence[Curve]) -> list[Table]:
    """Return the tables of scaling curves: of collectives, and of steps.  A column for each number of ranks."""
    return [_scaling([curve for curve in found if curve.step == step], step=step) for step in (False, True)]


def _scaling(found: Sequence[Curve], *, step: bool) -> Table:
    every = sorted({point.ranks for curve in found for point in curve.points})
    table = Table(box=None, pad_edge=False)
    table.add_column("step" if step else "scaling of", no_wrap=True)
    table.add_column("how", overflow="fold")
    for ranks in every:
        table.add_column(f"{ranks} rank{'s' if ranks > 1 else ''}", justify="right")
    for curve in found:
        by_ranks = {point.ranks: point for point in curve.points}
        cells = [_scaled(by_ranks[ranks], curve) if ranks in by_ranks else "" for ranks in every]
        table.add_row(Text(curve.operation), Text(curve.name), *map(Text, cells))
    if found and step:
        table.caption = "efficiency: time on the fewest ranks over time; in brackets, that of the compute alone"
    elif found:
        link = next((curve.link for curve in found if curve.link is not None), None)
        more = f"; a link carries {link:g} GB/s" if link is not None else ""
        table.caption = (
            f"busbw in GB/s, efficiency against the fewest ranks, and in brackets the share of what memory allows{more}"
        )
    return table


def _scaled(point: Point, curve: Curve) -> str:
    """Describe a point: the figure, its efficiency, and how it stands to its limit."""
    if curve.step:
        best = f" ({_percent(curve.best(point) or 0.0)})" if curve.best(point) is not None else ""
        return f"{seconds(point.value)} {_percent(point.efficiency)}{best}"
    share = f" ({_percent(point.value / point.limit)})" if point.limit else ""
    return f"{point.value:.3g} {_percent(point.efficiency)}{share}"


def _percent(share: float) -> str:
    """Format a share with two digits: ``0.31%``, ``87%``, ``120%``."""
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"
