"""A duet in the terminal and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.bench.duet.deciding import EQUAL, FASTER, SLOWER, UNDECIDED
from harness.bench.duet.state import FAILED
from harness.bench.duet.view import ORDER, change
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
    table = Table(box=None, pad_edge=False)
    for name in ("collective", "how", "dtype"):
        table.add_column(name)
    for name in ("ranks", "size", "A", "B", "B against A", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    above = None
    for row in view["series"]:
        head = (row["operation"], row["how"], row["dtype"], str(row["world"]))
        times = [seconds(row[side]) if row[side] is not None else "" for side in ("a", "b")]
        verdict = f"{row['verdict']} ({one_line(row['why'])})" if row["why"] else row["verdict"]
        cells = [*(("", "", "", "") if head == above else head), row["size"], *times, change(row)]
        above = head
        text = [Text(cell) for cell in (*cells, str(row["generations"]))]
        table.add_row(*text, Text(verdict, style=STYLES[row["verdict"]], overflow="fold"))
    parts += [table, Text()]
    parts.append(Text(one_line(view["headline"]), style=_style(view)))
    parts.append(Text(_how(view), style="dim"))
    return Group(*parts)


def _style(view: dict[str, Any]) -> str:
    return STYLES[next(verdict for verdict in ORDER if verdict in view["counts"])] if view["counts"] else ""


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
