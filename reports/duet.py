"""The page of a duet: what differs between the sides, series by size with intervals, rounds in time.

The page is one file that opens offline. It is made only from the plain data of :mod:`harness.bench.duet.view`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from reports.plots import chosen, empty, rendered, text_of

View = Mapping[str, Any]

_OF_VERDICT = {
    "failed": "#b03a48",
    "slower": "#c2571a",
    "undecided": "#a67c00",
    "faster": "#3f8f5b",
    "equal": "#3b6fb6",
}
_OF_SIDE = {"A": "#3b6fb6", "B": "#c2571a"}


def page(view: View) -> str:
    """Render the page as one HTML document."""
    plots = [
        (
            "series",
            "B against A, by series",
            "The change of each series; the intervals hold for all together. The grey band is what counts as equal.",
            _intervals(view["series"], view["margin"]),
        ),
        (
            "rounds",
            "Rounds in time",
            "The median iteration of each round. Sides take turns, so what the machine does meets both.",
            _rounds(view["rounds"]),
        ),
    ]
    return rendered("duet.html", view, plots)


def _label(row: Mapping[str, Any]) -> str:
    words = (row["operation"], row["dtype"], row["size"], f"{row['world']} ranks", row["how"])
    return text_of(" ".join(filter(None, words)))


def _intervals(rows: Sequence[Mapping[str, Any]], margin: float) -> go.Figure | None:
    known = [row for row in rows if row["ratio"] is not None]
    if not known:
        return None
    figure = empty("change of B against A, %", "", height=150 + 30 * len(known))
    figure.add_vrect(
        x0=100 * (1 / (1 + margin) - 1), x1=100 * margin, fillcolor="#6b7280", opacity=0.15, line_width=0, layer="below"
    )
    figure.add_vline(x=0, line={"color": "#6b7280", "width": 1})
    for verdict, color in _OF_VERDICT.items():
        mine = [row for row in known if row["verdict"] == verdict]
        if not mine:
            continue
        figure.add_trace(
            go.Scatter(
                x=[_percent(row["ratio"]) for row in mine],
                y=[_label(row) for row in mine],
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [_percent(row["high"] or row["ratio"]) - _percent(row["ratio"]) for row in mine],
                    "arrayminus": [_percent(row["ratio"]) - _percent(row["low"] or row["ratio"]) for row in mine],
                    "color": color,
                    "thickness": 2,
                },
                name=verdict,
                mode="markers",
                marker={"color": color, "size": 9},
                hovertemplate="%{y}: %{x:+.2f} %",
            )
        )
    figure.update_yaxes(
        autorange="reversed", automargin=True, categoryorder="array", categoryarray=[_label(row) for row in known]
    )
    return figure


def _rounds(rounds: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    if not rounds:
        return None
    figure = empty(
        "minutes since the start", "median iteration", legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
    )
    of = []
    for one in rounds:
        scale, unit = one["scale"]
        for side, color in _OF_SIDE.items():
            points = one["sides"][side]
            figure.add_trace(
                go.Scatter(
                    x=points["minutes"],
                    y=[seconds * scale for seconds in points["seconds"]],
                    name=text_of(f"{side}, {unit}"),
                    mode="markers",
                    marker={"color": color, "size": 4, "opacity": 0.6},
                    hovertemplate=f"%{{y:.4g}} {text_of(unit)}",
                )
            )
            of.append(one["name"])
    figure.update_yaxes(type="log", dtick="D2")
    return chosen(figure, [one["name"] for one in rounds], of)


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)
