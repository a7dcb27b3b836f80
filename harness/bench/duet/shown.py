"""A duet in the terminal and in Markdown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.bench.duet.deciding import EQUAL, FASTER, SLOWER, UNDECIDED
from harness.bench.duet.state import FAILED
from harness.bench.duet.view import ORDER, change
from harness.bench.records import STEP
from harness.bench.terminal import seconds
from harness.safe_io.shown import one_line

STYLES = {FAILED: "bold red", SLOWER: "red", UNDECIDED: "yellow", FASTER: "green", EQUAL: "dim"}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&@$])")


def tables(view: dict[str, Any]) -> RenderableType:
    """Return the differences of the sides, the series by size, and the result."""
    parts: list[RenderableType] = []
    if view["differences"]:
        sides = Table("", "A", "B", title="What differs", title_justify="left", box=None, pad_edge=False)
        for row in view["differences"]:
            sides.add_row(*(Text(one_line(cell), overflow="fold") for cell in row))
        parts += [sides, Text()]
    else:
        parts += [Text("Nothing that Concord knows of differs between A and B: this is an A/A duet."), Text()]
    for head, rows in itertools.groupby(view["series"], key=_head):
        parts += [_of_sizes(one_line(head), list(rows)), Text()]
    if view["needs"]:
        counts = Table(
            "series", "count, A -> B", title="Counts that differ", title_justify="left", box=None, pad_edge=False
        )
        for row in view["needs"]:
            style = STYLES[SLOWER if row["more"] else FASTER]
            counts.add_row(Text(one_line(row["series"]), overflow="fold"), Text(one_line(row["said"]), style=style))
        parts += [counts, Text()]
    parts.append(Text(one_line(view["headline"]), style=_style(view)))
    parts.append(Text(_how(view), style="dim"))
    return Group(*parts)


def _head(row: dict[str, Any]) -> str:
    if not row["size"]:
        return f"training steps on {row['world']} ranks"
    return " ".join(filter(None, (row["operation"], row["dtype"], f"on {row['world']} ranks", row["how"])))


def _of_sizes(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    if rows[0]["size"]:
        table.add_column("size", justify="right", no_wrap=True)
    else:
        table.add_column("step", overflow="fold")
    for name in ("A", "B", "B against A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for row in rows:
        times = [seconds(row[side]) if row[side] is not None else "" for side in ("a", "b")]
        verdict = f"{row['verdict']} ({one_line(row['why'])})" if row["why"] else row["verdict"]
        what = row["size"] or f"{row['operation'].removeprefix(STEP)}, {row['how']}"
        cells = [Text(cell) for cell in (one_line(what), *times, change(row))]
        table.add_row(*cells, Text(verdict, style=STYLES[row["verdict"]]))
    return table


def _style(view: dict[str, Any]) -> str:
    return STYLES[next(verdict for verdict in ORDER if view["counts"][verdict])]


def _how(view: dict[str, Any]) -> str:
    ended = f"{view['ended']}. " if view["ended"] else ""
    return (
        f"{ended}{view['pairs']} pairs of fresh sets of ranks in {view['generations']} generations, "
        f"{view['seconds'] / 60:.1f} min. The intervals hold for all series together at {1 - view['rate']:.0%}. "
        "A and B: the fastest iteration, the median over sets."
    )


def markdown(view: dict[str, Any]) -> str:
    """Return the result for a comment on a change."""
    return "\n".join(_lines(view)) + "\n"


def _lines(view: dict[str, Any]) -> Iterator[str]:
    yield f"**{_escaped(view['headline'])}**"
    yield ""
    yield "| series | A | B | B against A | verdict |"
    yield "|---|--:|--:|--:|---|"
    for row in sorted(view["series"], key=lambda row: ORDER.index(row["verdict"])):
        times = [seconds(row[side]) if row[side] is not None else "" for side in ("a", "b")]
        verdict = f"{row['verdict']}: {row['why']}" if row["why"] else row["verdict"]
        yield f"| {' | '.join(map(_escaped, (row['name'], *times, change(row), verdict)))} |"
    yield ""
    if view["needs"]:
        yield "| series | counts that differ, A -> B |"
        yield "|---|---|"
        for row in view["needs"]:
            yield f"| {_escaped(row['series'])} | {_escaped(row['said'])} |"
        yield ""
    if view["differences"]:
        yield "| what differs | A | B |"
        yield "|---|---|---|"
        for row in view["differences"]:
            yield f"| {' | '.join(map(_escaped, row))} |"
        yield ""
    yield _escaped(_how(view))


def _escaped(text: str) -> str:
    """Return text on one line that means nothing in Markdown or HTML."""
    line = one_line(" ".join(text.split()))
    line = line if len(line) <= 300 else f"{line[:299]}…"
    return _SPECIAL.sub(r"\\\1", line).replace("://", ":\u200b//")
