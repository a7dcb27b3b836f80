"""The page of benchmarks: bandwidth and latency by size, percentiles, dtypes, overlap, and the history with its steps.

The page is one file that opens offline. It is made only from the plain data of :mod:`harness.bench.view`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import plotly.graph_objects as go

from reports.plots import COLORS, chosen, empty, rendered, text_of

View = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

_EXPOSED, _COMPUTE, _HIDDEN = "#c2571a", "#3b6fb6", "#9db7d8"
_TICKS = ["8 B", "1 KiB", "32 KiB", "1 MiB", "32 MiB", "1 GiB"]
_TICKS_AT = [8, 1 << 10, 1 << 15, 1 << 20, 1 << 25, 1 << 30]


def page(view: View) -> str:
    """Render the page as one HTML document."""
    swept = _swept(view["collectives"])
    plots = [
        ("sizes", "Bandwidth over size", "Busbw by nccl-tests' definition; higher is better.", _bandwidth(swept)),
        ("latency", "Latency over size", "Median and 99th percentile of the slowest rank.", _latency(swept)),
        ("dtypes", "Dtypes", "Busbw of each dtype at each size.", _dtypes(view["collectives"])),
        ("steps", "Training steps", "What a step takes: compute, and what no compute hides.", _steps(view["steps"])),
        (
            "scaling",
            "Scaling of collectives",
            (
                "Busbw over ranks. Dashed: what memory allows if all ranks copy at once, measured in the same run. "
                "Dotted: the link, as the profile says it. In a cache, a collective can be faster than large copies."
            ),
            _scaling(view["scaling"]),
        ),
        (
            "efficiency",
            "Scaling of steps",
            "Time on the fewest ranks over the time on more. Dashed: the same of the compute alone.",
            _efficiency(view["scaling"]),
        ),
        (
            "history",
            "History",
            "Each night's figure (the 25th percentile), and the rounds within it.",
            _history(view["histories"]),
        ),
    ]
    return rendered("perf.html", view, plots)


def _swept(collectives: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Group figures into sweeps by name: one collective, op, dtype and form over at least three sizes, ascending."""
    sweeps: dict[str, list[Mapping[str, Any]]] = {}
    for row in collectives:
        name = " ".join(filter(None, (row["operation"], row["op"], row["dtype"], row["how"])))
        sweeps.setdefault(f"{name}, {row['world']} ranks", []).append(row)
    return {name: sorted(rows, key=lambda r: r["bytes"]) for name, rows in sweeps.items() if len(rows) > 2}


def _short(rows: Rows) -> str:
    """Name what distinguishes a sweep from others of its collective."""
    first = rows[0]
    op = first["op"] if first["op"] != "sum" else ""
    return text_of(", ".join(filter(None, (op, first["dtype"], first["how"], f"{first['world']} ranks"))))


def _over_sizes(y: str) -> go.Figure:
    figure = empty("size of the message", y, legend={"x": 1.02, "y": 1})
    figure.update_xaxes(type="log", tickvals=_TICKS_AT, ticktext=_TICKS)
    figure.update_yaxes(type="log", exponentformat="power")
    return figure


def _by_collective(
    swept: Mapping[str, Rows], figure: go.Figure, traces: Callable[[str, Rows, str], Iterable[go.Scatter]]
) -> go.Figure | None:
    if not swept:
        return None
    of: list[str] = []
    counts: dict[str, int] = {}
    for name, rows in swept.items():
        collective = rows[0]["operation"]
        color = COLORS[counts.get(collective, 0) % len(COLORS)]
        counts[collective] = counts.get(collective, 0) + 1
        for trace in traces(name, rows, color):
            figure.add_trace(trace)
            of.append(collective)
    return chosen(figure, list(counts), of)


def _bandwidth(swept: Mapping[str, Rows]) -> go.Figure | None:
    def traces(name: str, rows: Rows, color: str) -> Iterable[go.Scatter]:
        yield go.Scatter(
            x=[r["bytes"] for r in rows],
            y=[r["busbw"] for r in rows],
            name=_short(rows),
            mode="lines+markers",
            line={"color": color},
            customdata=[[r["size"]] for r in rows],
            hovertemplate="%{customdata[0]}: %{y:.3g} GB/s",
        )

    return _by_collective(swept, _over_sizes("busbw, GB/s"), traces)


def _latency(swept: Mapping[str, Rows]) -> go.Figure | None:
    def traces(name: str, rows: Rows, color: str) -> Iterable[go.Scatter]:
        sizes = [r["bytes"] for r in rows]
        for percentile, dash in (("p50", "solid"), ("p99", "dot")):
            yield go.Scatter(
                x=sizes,
                y=[r[percentile] * 1e6 for r in rows],
                name=f"{_short(rows)}, {percentile}",
                mode="lines+markers",
                line={"color": color, "dash": dash},
                customdata=[[r["size"]] for r in rows],
                hovertemplate="%{customdata[0]}: %{y:.4g} us",
            )

    return _by_collective(swept, _over_sizes("microseconds"), traces)


def _dtypes(collectives: Rows) -> go.Figure | None:
    """Draw the collective that was measured in the most dtypes, at the sizes that several of them share."""
    by_collective: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for figures in collectives:
        if not figures["how"] and figures["op"] in ("", "sum"):
            by_collective.setdefault((figures["operation"], figures["world"]), []).append(figures)
    if not by_collective:
        return None
    (collective, ranks), rows = max(by_collective.items(), key=lambda item: len({r["dtype"] for r in item[1]}))
    dtypes = sorted({r["dtype"] for r in rows})
    if len(dtypes) < 2:
        return None
    shared = sorted({(r["bytes"], r["size"]) for r in rows if sum(o["bytes"] == r["bytes"] for o in rows) > 1})
    cells = {(r["dtype"], r["bytes"]): r["busbw"] for r in rows}
    z = [[cells.get((dtype, count)) for count, _ in shared] for dtype in dtypes]
    figure = empty("size", "", title={"text": text_of(f"{collective}, {ranks} ranks"), "font": {"size": 14}})
    figure.add_trace(
        go.Heatmap(
            x=[size for _, size in shared],
            y=[text_of(dtype) for dtype in dtypes],
            z=z,
            text=[["" if cell is None else f"{cell:.3g}" for cell in row] for row in z],
            texttemplate="%{text}",
            colorscale="Blues",
            colorbar={"title": "GB/s"},
            hovertemplate="%{y}, %{x}: %{z:.3g} GB/s<extra></extra>",
        )
    )
    return figure


def _steps(steps: Rows) -> go.Figure | None:
    if not steps:
        return None
    figure = empty("milliseconds", "", barmode="stack", height=120 + 36 * len(steps))
    names = [text_of(step["name"]) for step in steps]
    shown = {
        "compute": ([step["compute"] for step in steps], _COMPUTE),
        "exposed communication": ([max(0.0, step["exposed"]) for step in steps], _EXPOSED),
    }
    for name, (values, color) in shown.items():
        figure.add_trace(
            go.Bar(
                y=names,
                x=[value * 1e3 for value in values],
                name=name,
                orientation="h",
                marker={"color": color},
                hovertemplate="%{x:.3g} ms",
            )
        )
    alone = [step["communication"] for step in steps]
    figure.add_trace(
        go.Scatter(
            y=names,
            x=[None if value is None else value * 1e3 for value in alone],
            name="its communication alone",
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 16, "color": "#6b7280", "line": {"width": 2}},
            hovertemplate="%{x:.3g} ms",
        )
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


_Line: TypeAlias = tuple[str, list[Any], str, list[Any]]
"""What follows the name of its curve, a value for each number of ranks, the dash, and what is said of each value."""


def _over_ranks(curves: Rows, y: str, axis: dict[str, Any], lines_of: Callable[[Any], list[_Line]], hover: str) -> Any:
    """Draw the lines of each curve in a color of its operation's; a menu chooses the operation."""
    if not curves:
        return None
    figure, of = empty("ranks", y, legend={"x": 1.02, "y": 1}), []
    ranks = sorted({point["ranks"] for curve in curves for point in curve["points"]})
    figure.update_xaxes(type="log", tickvals=ranks, ticktext=[str(count) for count in ranks])
    figure.update_yaxes(**axis)
    counts: dict[str, int] = {}
    for curve in curves:
        operation = curve["operation"]
        color = COLORS[counts.get(operation, 0) % len(COLORS)]
        counts[operation] = counts.get(operation, 0) + 1
        for label, values, dash, said in lines_of(curve):
            if any(value is not None for value in values):
                figure.add_trace(
                    go.Scatter(
                        x=[point["ranks"] for point in curve["points"]],
                        y=values,
                        name=f"{text_of(curve['name'])}{label}",
                        mode="lines+markers" if dash == "solid" else "lines",
                        line={"color": color, "dash": dash},
                        customdata=[[each] for each in said],
                        hovertemplate=f"%{{x}} ranks: {hover}",
                    )
                )
                of.append(operation)
    return chosen(figure, list(counts), of)


def _scaling(curves: Rows) -> go.Figure | None:
    """Draw the busbw of each collective at a few sizes, with the limits of memory and of the link."""

    def lines(curve: Any) -> list[_Line]:
        points = curve["points"]
        nothing = [""] * len(points)
        return [
            ("", [point["value"] for point in points], "solid", [f"{point['efficiency']:.0%}" for point in points]),
            (": memory", [point["limit"] for point in points], "dash", nothing),
            (": link", [curve["link"]] * len(points), "dot", nothing),
        ]

    shown = [curve for curve in curves if not curve["step"]]
    axis = {"type": "log", "exponentformat": "power"}
    return _over_ranks(shown, "busbw, GB/s", axis, lines, "%{y:.3g} GB/s %{customdata[0]}")


def _efficiency(curves: Rows) -> go.Figure | None:
    """Draw the efficiency of each step, and that of its compute alone."""

    def lines(curve: Any) -> list[_Line]:
        times = [point["value"] * 1e3 for point in curve["points"]]
        best = [None if share is None else 100 * share for share in curve["best"]]
        return [
            ("", [100 * point["efficiency"] for point in curve["points"]], "solid", times),
            (": compute alone", best, "dash", times),
        ]

    shown = [curve for curve in curves if curve["step"]]
    return _over_ranks(shown, "efficiency, %", {"rangemode": "tozero"}, lines, "%{y:.3g} %, %{customdata[0]:.3g} ms")


def _history(histories: Rows) -> go.Figure | None:
    if not histories:
        return None
    figure = empty("night", "", legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"})
    of: list[str] = []
    for row in histories:
        name, scale = row["name"], row["scale"]
        figure.add_trace(
            go.Scatter(
                x=row["nights"],
                y=[None if v is None else v * scale for v in row["values"]],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [
                        0 if v is None else (h - v) * scale for v, h in zip(row["values"], row["high"], strict=True)
                    ],
                    "arrayminus": [
                        0 if v is None else (v - low) * scale for v, low in zip(row["values"], row["low"], strict=True)
                    ],
                    "color": "rgba(107,114,128,0.5)",
                    "thickness": 1,
                },
                name=text_of(f"{row['unit']}, {row['nights_known']} nights"),
                mode="lines+markers",
                line={"color": COLORS[0]},
                text=[text_of(commit) for commit in row["commits"]],
                hovertemplate=f"%{{y:.4g}} {text_of(row['unit'])}<br>%{{text}}",
            )
        )
        of.append(name)
        for step in row["steps"]:
            figure.add_trace(
                go.Scatter(
                    x=[step["night"], row["nights"][-1]],
                    y=[step["value"] * scale] * 2,
                    name=text_of(step["text"]),
                    mode="lines",
                    line={"color": _EXPOSED if step["worse"] else COLORS[2], "width": 3, "dash": "dash"},
                    hovertemplate=text_of(step["text"]),
                )
            )
            of.append(name)
    return chosen(figure, [row["name"] for row in histories], of)
