"""The plain data of a duet's table and page, and its result in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.bench.duet.deciding import EQUAL, FASTER, FASTEST, MEDIAN, SLOWER, UNDECIDED, Interval, interval
from harness.bench.duet.records import SIDES, A, About
from harness.bench.duet.state import FAILED, State
from harness.bench.records import day_of, percentile, size_of

ORDER = (FAILED, SLOWER, UNDECIDED, FASTER, EQUAL)
"""Verdicts, what a person must see first in front."""
_MOST_POINTS = 4000
"""Rounds of a series that the page draws; beyond, every so-manieth."""


def view(state: State, *, ended: str = "") -> dict[str, Any]:
    """Return the data of a duet.  ``ended``: why it ended before everything was decided, in words."""
    begun = state.begun
    rows = [_row(state, number) for number in range(len(begun.series))]
    rows.sort(key=lambda row: (row["operation"], row["world"], row["dtype"], row["how"], row["bytes"]))
    different, alike = _compared(begun.a, begun.b)
    needs = _needs(state)
    return {
        "headline": headline(rows, 100 * begun.margin, needs),
        "ended": ended,
        "begun": day_of(begun.time),
        "sides": [_side(side, begun.of(side)) for side in SIDES],
        "differences": different,
        "alike": alike,
        "series": rows,
        "counts": {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ORDER},
        "needs": needs,
        "uncounted": state.uncounted,
        "undecided": [row["name"] for row in rows if row["verdict"] == UNDECIDED],
        "margin": begun.margin,
        "rate": begun.rate,
        "generations": state.generations,
        "pairs": state.pairs,
        "seconds": state.seconds,
        "left": _finite(state.left()),
        "rounds": _rounds(state),
    }


def code(state: State) -> int:
    """Return the exit code: 1 if a series is slower, needs more of a steady count or failed, 0 otherwise."""
    every = range(len(state.begun.series))
    more = any(change.more for number in every for change in state.changes(number))
    return int(more or any(state.verdict(number) in (SLOWER, FAILED) for number in every))


def _needs(state: State) -> list[dict[str, Any]]:
    """Return the steady counts that differ, those of which B needs more in front."""
    found = [
        {"series": state.begun.series[number].name, "said": str(change), "more": change.more}
        for number in range(len(state.begun.series))
        for change in state.changes(number)
    ]
    return sorted(found, key=lambda one: not one["more"])


def _side(name: str, about: About) -> dict[str, Any]:
    return {"name": name, "label": about.label, "torch": dict(about.fingerprint.software).get("torch", "")}


def _row(state: State, number: int) -> dict[str, Any]:
    series = state.begun.series[number]
    seen, figures = state.shown(number), state.figures[number]
    failed = state.failed.get(number)
    differences = state.differences[number][FASTEST]
    found = seen.interval if seen is not None else interval(differences, 0.0)  # before the first look: the estimate
    return {
        "name": series.name,
        "operation": f"{series.operation} {series.op}".strip(),
        "dtype": series.dtype,
        "world": series.world,
        "how": series.how,
        "bytes": series.bytes,
        "size": size_of(series.bytes) if series.bytes else "",
        "verdict": state.verdict(number),
        "figure": seen.figure if seen is not None else FASTEST,
        **_interval(found),
        "median": _interval(seen.intervals[MEDIAN] if seen is not None else None),
        "generations": len(differences),
        "a": percentile([a for a, _ in figures], 50) if figures else None,
        "b": percentile([b for _, b in figures], 50) if figures else None,
        "why": f"{failed.side}: {failed.why}" if failed is not None else "",
    }


def _interval(found: Interval | None) -> dict[str, float | None]:
    """Return an interval as plain data; None where there is too little for one."""
    if found is None:
        return {"ratio": None, "low": None, "high": None}
    known = found.low > 0 and math.isfinite(found.high)
    return {
        "ratio": _finite(found.ratio),
        "low": found.low if known else None,
        "high": found.high if known else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _compared(a: About, b: About) -> tuple[list[list[str]], list[list[str]]]:
    """Return the facts in which two sides differ, ``[name, A, B]``, and those that both have, ``[name, value]``."""
    first, second = _facts(a), _facts(b)
    names = dict.fromkeys([*first, *second])
    rows = [[name, first.get(name, ""), second.get(name, "")] for name in names]
    return [row for row in rows if row[1] != row[2]], [row[:2] for row in rows if row[1] == row[2] and row[1]]


def _facts(about: About) -> dict[str, str]:
    return {
        "environment": about.label,
        "sources": about.source,
        "profile": about.profile,
        "faults": ", ".join(about.faults),
        **dict(about.variables),
        **dict(about.fingerprint.software),
        "torch's commit": about.commit[:12],
        "Python": about.python,
        "Concord": about.harness,
        **dict(about.fingerprint.machine),
    }


def headline(rows: list[dict[str, Any]], margin: float, needs: Sequence[Mapping[str, Any]] = ()) -> str:
    """Say the result in a sentence or two.  ``margin``: percent; ``needs``: steady counts that differ."""
    by = {verdict: [row for row in rows if row["verdict"] == verdict] for verdict in ORDER}
    parts = []
    if by[FAILED]:
        parts.append(f"{_series(len(by[FAILED]))} failed: {_named(by[FAILED], with_change=False)}")
    more = dict.fromkeys(one["series"] for one in needs if one["more"])
    if more:
        others = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
        parts.append(f"B needs more in {_series(len(more))}: {needs[0]['said']} in {needs[0]['series']}{others}")
    if by[SLOWER]:
        parts.append(f"B is slower in {len(by[SLOWER])} of {len(rows)} series: {_named(by[SLOWER])}")
    else:
        parts.append(f"No series of {len(rows)} was found slower in B")
    if by[FASTER]:
        parts.append(f"faster in {len(by[FASTER])}: {_named(by[FASTER])}")
    if by[EQUAL]:
        parts.append(f"equal within {margin:g} % in {len(by[EQUAL])}")
    if by[UNDECIDED]:
        parts.append(f"undecided in {len(by[UNDECIDED])}")
    return "; ".join(parts)


def _series(count: int) -> str:
    return f"{count} series"


def _named(rows: list[dict[str, Any]], *, with_change: bool = True, most: int = 5) -> str:
    named = [" ".join(filter(None, (_short(row), change(row) if with_change else ""))) for row in rows[:most]]
    return ", ".join(named) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def _short(row: dict[str, Any]) -> str:
    words = (row["operation"], row["dtype"], row["size"], f"on {row['world']} ranks", row["how"])
    return " ".join(filter(None, words))


def change(row: dict[str, Any]) -> str:
    """Describe a change with its interval: ``+12.1 % (+8.4 to +16.0 %)``; empty if nothing is known."""
    if row["ratio"] is None:
        return ""
    size = f"{_percent(row['ratio']):+.1f} %"
    if row["figure"] == MEDIAN:
        size += " in the median"
    if row["low"] is None:  # too few generations for an interval
        return f"{size} (?)"
    return f"{size} ({_percent(row['low']):+.1f} to {_percent(row['high']):+.1f} %)"


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def _rounds(state: State) -> list[dict[str, Any]]:
    """Return the rounds of each series over time: minutes since the start, and the figures of both sides."""
    by_series: dict[int, list[Any]] = {}
    for number, one in state.rounds:
        by_series.setdefault(number, []).append(one)
    found = []
    for number, rounds in sorted(by_series.items()):
        step = -(-len(rounds) // _MOST_POINTS)
        kept = rounds[::step]
        sides = {
            side: {
                "minutes": [round((one.time - state.begun.time) / 60, 3) for one in kept if one.side == side],
                "seconds": [one.figure for one in kept if one.side == side],
            }
            for side in SIDES
        }
        found.append({"name": state.begun.series[number].name, "sides": sides, "scale": _scale(sides[A]["seconds"])})
    return found


def _scale(seconds: list[float]) -> list[Any]:
    return [1e6, "us"] if not seconds or max(seconds) < 1e-2 else [1e3, "ms"]
