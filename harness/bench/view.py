"""The plain data of a performance page: the newest night, the gate's decision, and the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from harness.bench.detection.alarms import Decision
from harness.bench.figures import algbw, busbw
from harness.bench.history.lines import Figure, Line
from harness.bench.records import COUNTS, Series, day_of, size_of
from harness.bench.scaling import Curve, curves


def view(line: Line, decision: Decision, beside: Line | None = None) -> dict[str, Any]:
    """Return the data of the page.

    ``beside``: nights of another program, such as nccl-tests, the newest of which has its figures in the same plots.
    Errors: ValueError if there is no night.
    """
    if not line.nights:
        raise ValueError("no nights: nothing to show")
    night = line.nights[-1]
    figures = line.figures[night.id]
    others: dict[Series, Figure] = {}
    notes = list(decision.notes)
    if beside is not None and beside.nights[-1].id != night.id:
        newest = beside.nights[-1]
        others = beside.figures[newest.id]
        where = dict(beside.fingerprint.machine).get("accelerators", "an unknown device")
        notes.append(f"beside: {len(others)} figures of {newest.subject}, {day_of(newest.started)}, on {where}")
    return {
        "night": {"day": day_of(night.started), "commit": night.commit[:12], "id": night.id},
        "nights": len(line.nights) - 1,
        "series": len(figures),
        "alarms": [alarm.text for alarm in decision.alarms],
        "improvements": [alarm.text for alarm in decision.improvements],
        "notes": notes,
        "environment": [*line.fingerprint.machine, *line.fingerprint.software],
        "collectives": [_collective(s, f) for s, f in (figures | others).items() if s.bytes and f.value],
        "steps": _steps(figures),
        "scaling": _scaling(figures),
        "histories": _histories(line, decision),
    }


def curves_of(figures: Mapping[Series, Figure]) -> list[Curve]:
    """Return the scaling curves of a night."""
    return curves({s: f.value for s, f in figures.items() if f.value is not None and not f.refused})


def _scaling(figures: Mapping[Series, Figure]) -> list[dict[str, Any]]:
    return [
        {**msgspec.to_builtins(curve), "best": [curve.best(point) for point in curve.points]}
        for curve in curves_of(figures)
    ]


def _collective(series: Series, figure: Figure) -> dict[str, Any]:
    value = figure.value or 0.0
    typical = figure.p50 if figure.p50 is not None else value
    return {
        "operation": series.operation,
        "op": series.op,
        "dtype": series.dtype,
        "how": series.how,
        "world": series.world,
        "bytes": series.bytes,
        "size": size_of(series.bytes),
        "p50": typical,
        "p95": figure.p95 if figure.p95 is not None else value,
        "p99": figure.p99 if figure.p99 is not None else value,
        "algbw": algbw(series.bytes, typical),
        "busbw": busbw(series.operation, series.bytes, typical, series.world),
    }


def _steps(figures: dict[Series, Figure]) -> list[dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = {}
    for series, figure in figures.items():
        if not series.bytes and series.operation.startswith("step."):
            variant = ", ".join(f"{name} {value}" for name, value in series.variant if name != "model")
            name = f"{series.operation.removeprefix('step.')}, {series.world} ranks" + (
                f", {variant}" if variant else ""
            )
            by_name.setdefault(name, {"name": name, "communication": None})[series.metric] = figure.value
    return [step for step in by_name.values() if step.get("compute") is not None and step.get("exposed") is not None]


def _histories(line: Line, decision: Decision) -> list[dict[str, Any]]:
    """Return the history of every series of the newest night; those that the gate names come first."""
    named = {s for alarm in [*decision.alarms, *decision.improvements] for s in alarm.series}
    order = sorted(line.figures[line.nights[-1].id], key=lambda s: s not in named)
    return [history for series in order if (history := _history(line, decision, series)) is not None]


def _history(line: Line, decision: Decision, series: Series) -> dict[str, Any] | None:
    figures = [line.figures[night.id].get(series) for night in line.nights]
    values = [figure.value if figure is not None and not figure.refused else None for figure in figures]
    if sum(value is not None for value in values) < 2:
        return None
    scale, unit = _unit(series, max(value for value in values if value is not None))
    nights = [day_of(night.started) for night in line.nights]
    steps = []
    for alarm in [*decision.alarms, *decision.improvements]:
        if series in alarm.series and alarm.since:
            index = next((i for i, night in enumerate(line.nights) if night.id == alarm.since), None)
            after = [v for v in values[index:] if v is not None] if index is not None else []
            if index is not None and after:
                middle = sorted(after)[len(after) // 2]
                worse = alarm.ratio > 1
                steps.append({"night": nights[index], "value": middle, "text": alarm.text, "worse": worse})
    return {
        "name": series.name,
        "unit": unit,
        "scale": scale,
        "nights": nights,
        "nights_known": sum(value is not None for value in values),
        "commits": [night.commit[:12] for night in line.nights],
        "values": values,
        "low": [min(f.rounds) if f is not None and f.rounds else v for f, v in zip(figures, values, strict=True)],
        "high": [max(f.rounds) if f is not None and f.rounds else v for f, v in zip(figures, values, strict=True)],
        "steps": steps,
    }


def _unit(series: Series, most: float) -> tuple[float, str]:
    if series.metric in COUNTS:
        return 1.0, series.metric
    return (1e6, "us") if most < 1e-3 else (1e3, "ms")
