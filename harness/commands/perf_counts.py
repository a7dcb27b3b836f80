"""``concord perf counts``: what collectives and training steps need, and which of these counts are steady."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import harness
from harness.bench.counting.deciding import STEADY, Steadiness, steadiness
from harness.bench.duet.messages import Begin, Count, Ranks, Servers
from harness.bench.duet.records import A
from harness.bench.duet.run import ranks_of
from harness.bench.duet.sides import Setting, Side, SideFailed, variables_of
from harness.bench.measuring.asked import asked_of, ranks_asked
from harness.bench.measuring.steps import usual_steps
from harness.bench.records import Series
from harness.commands.duet import chosen
from harness.commands.outputs import writable
from harness.commands.refusing import refusing
from harness.safe_io.shown import one_line
from harness.safe_io.writing import own_folder, write_whole
from harness.versions.environments import variables


class Row(msgspec.Struct):
    """A series with its counts over sets of fresh ranks, for one rank and one call."""

    name: str
    counts: dict[str, Steadiness]


def counts(
    series: Annotated[
        list[str] | None,
        typer.Option("--series", "-k", help="A series, as in concord perf duet. Repeatable. Default: a few sizes."),
    ] = None,
    profile: Annotated[str, typer.Option(help="A profile: a name, or a file. Default: gloo on the host.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 2,8. Default: the profile's, or 2 and 4.")] = "",
    more: Annotated[str, typer.Option(help="More series, as in concord perf duet.", metavar="WHAT")] = "",
    steps: Annotated[bool, typer.Option(help="Count the usual training steps on 2 ranks, too.")] = True,
    sets: Annotated[int, typer.Option(help="Sets of fresh ranks.", min=2, max=100)] = 5,
    times: Annotated[int, typer.Option(help="Calls over which to count.", min=1, max=10_000)] = 20,
    out: Annotated[Path, typer.Option(help="Folder for what the ranks print.")] = Path("reports/out/counts"),
    json: Annotated[Path | None, typer.Option(help="Write the result to this file as JSON.", callback=writable)] = None,
) -> None:
    """Count what collectives and training steps need, and show which counts are steady.

    System calls, instructions, allocations, copies and bytes that are sent, for one rank and one call. A count is
    steady if it is the same on all sets of fresh ranks. concord perf duet compares those that are.
    """
    with refusing(ValueError, OSError), contextlib.ExitStack() as stack:
        begin = Begin(
            profile=str(Path(profile).absolute()) if Path(profile).is_file() else profile,
            ranks=ranks_asked(ranks) if ranks else (),
            more=asked_of(more) if more else (),
        )
        log = own_folder(out) / "ranks.txt"
        write_whole(log, "", follow=False)
        try:
            python, own = Path(sys.executable), Path(harness.__file__).parents[1]
            side = Side(Setting(A, python, Path.cwd(), variables_of(variables(python, own), {})), log)
            stack.callback(side.close)
            side.send(begin)
            offers = side.described().offers
            asked = list(dict.fromkeys([*chosen(offers, series or []), *(usual_steps(offers) if steps else ())]))
            rows, missing = _counted(side, offers, asked, sets, times)
        except SideFailed as e:
            raise ValueError(e.why) from e
        _show(rows, missing, sets)
        if json is not None:
            write_whole(json, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def _counted(
    side: Side, offers: Sequence[Series], asked: Sequence[Series], sets: int, times: int
) -> tuple[list[Row], dict[str, str]]:
    """Count on sets of fresh ranks.  Returns rows, and what can't be counted with the reason."""
    missing: dict[str, str] = {}
    found: dict[str, list[dict[str, float]]] = {}
    wanted = [(one.name, ranks_of(one), Count(offers.index(one), times=times)) for one in asked]
    side.do(Servers(steps=any(one.is_step for one in asked)))
    for _ in range(sets):
        for size in sorted({size for _, size, _ in wanted}):
            side.do(Ranks(size))
            for name, _, request in (one for one in wanted if one[1] == size):
                side.send(request)
                counted = side.counted()
                missing |= counted.missing
                each = {count: value / counted.ranks for count, value in counted.counts.items()}
                found.setdefault(name, []).append(each)
    return [Row(name, steadiness(found[name])) for name, _, _ in wanted], missing


def _show(rows: Sequence[Row], missing: dict[str, str], sets: int) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row.counts))
    table = Table(box=None, pad_edge=False)
    table.add_column("of one rank and one call", no_wrap=True)
    table.add_column("spread", justify="right", no_wrap=True)
    table.add_column("steady", no_wrap=True)
    for row in rows:
        table.add_column(Text(one_line(row.name), overflow="fold"), justify="right", min_width=9)
    for name in names:
        known = [row.counts[name] for row in rows if name in row.counts]
        spread, steady = max(one.spread for one in known), all(one.steady for one in known)
        cells = [f"{row.counts[name].value:.7g}" if name in row.counts else "" for row in rows]
        table.add_row(Text(name), _spread(spread), "yes" if steady else "no", *cells)
    table.caption = f"the median of {sets} sets of fresh ranks, and the largest spread; steady: at most {STEADY:.1%}"
    console = Console()
    console.print(table)
    for line in _absent(missing):
        console.print(Text(line, style="dim"))


def _spread(share: float) -> str:
    return "exact" if share == 0 else f"{100 * share:.2g} %"


def _absent(missing: dict[str, str]) -> Iterator[str]:
    yield from (one_line(f"no {name}: {why}") for name, why in sorted(missing.items()))
