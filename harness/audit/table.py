"""The output of an audit: progress, tables in the terminal, Markdown, and a comparison with an earlier audit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import rich.box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from harness.audit.records import FAILED, KILLED, NOT_REACHED, SURVIVED, TIMED_OUT, Result, Summary
from harness.audit.run import FAULT, MUTANT, PAIR, Progress
from harness.requirements import stack_of

COLUMNS = ("component", "defects", "number", "killed", "survived", "unreached", "equivalent", "score")
_STYLES = {KILLED: "green", SURVIVED: "red", TIMED_OUT: "red", NOT_REACHED: "yellow", FAILED: "yellow"}


def score(results: Iterable[Result]) -> float | None:
    """Return the share of killed defects among those that are not equivalent and could be injected.

    A defect on lines that no test reaches counts as not detected.  The score is None if there are no such defects.
    """
    counted = [r for r in results if r.state != FAILED and (r.state == KILLED or not r.equivalent)]
    return sum(r.state == KILLED for r in counted) / len(counted) if counted else None


def row(component: str, sort: str, results: Sequence[Result]) -> list[str]:
    """Return a row of the table, with the columns of COLUMNS."""
    counts = {state: sum(r.state == state and not r.equivalent for r in results) for state in _STYLES}
    killed = sum(r.state == KILLED for r in results)
    share = score(results)
    return [
        component,
        f"{sort}s",
        str(len(results) - counts[FAILED]),
        str(killed),
        str(counts[SURVIVED] + counts[TIMED_OUT]),
        str(counts[NOT_REACHED]),
        str(sum(bool(r.equivalent) and r.state != KILLED for r in results)),
        "-" if share is None else f"{100 * share:.0f} %",
    ]


def rows(summary: Summary) -> list[list[str]]:
    """Return a row for each component and sort of defect, and one for all components."""
    components = list(dict.fromkeys(r.defect.component for r in summary.results))
    table = []
    for sort in (FAULT, MUTANT, PAIR):
        chosen = [r for r in summary.results if r.defect.sort == sort]
        by = {c: [r for r in chosen if r.defect.component == c] for c in components}
        table += [row(c, sort, results) for c, results in by.items() if results]
        if sum(bool(results) for results in by.values()) > 1:
            table.append(row("all", sort, chosen))
    return table


def unnoticed(summary: Summary) -> list[Result]:
    """Return defects that no test detected and that are not listed as equivalent."""
    return [r for r in summary.results if r.state != KILLED and not r.equivalent]


def mistaken(summary: Summary) -> list[Result]:
    """Return mutants that are listed as equivalent although a test detected them."""
    return [r for r in summary.results if r.state == KILLED and r.equivalent]


def misnamed(summary: Summary) -> list[Result]:
    """Return defects that a test of another component detected."""
    return [r for r in summary.results if r.state == KILLED and stack_of(r.test) != r.defect.component]


def lost(before: Summary, now: Summary) -> list[tuple[Result, Result]]:
    """Return defects that an earlier audit detected and this one did not, with both results."""
    old = {r.defect.name: r for r in before.results if r.state == KILLED}
    return [(old[r.defect.name], r) for r in now.results if r.defect.name in old and r.state != KILLED]


def speed(summary: Summary) -> str:
    """Describe in words how many seconds a defect takes."""
    seconds = sorted(r.seconds for r in summary.results if r.state == KILLED)
    if not seconds:
        return ""
    rest = sorted(r.seconds for r in summary.results if r.state in (SURVIVED, TIMED_OUT))
    text = f"a defect that is noticed takes {statistics.median(seconds):.1f} s (median), {seconds[-1]:.0f} s at most"
    return f"{text}; one that is not, {statistics.median(rest):.0f} s" if rest else text


def show(summary: Summary, console: Console) -> None:
    """Print the audit to the terminal."""
    table = Table(*COLUMNS, box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))  # fits into 80 columns
    for number, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "left" if number < 2 else "right"
    for cells in rows(summary):
        table.add_row(*cells, style="bold" if cells[0] == "all" else "")
    console.print(table)
    for title, results in (
        ("Not noticed", unnoticed(summary)),
        ("Said to be equivalent, and noticed", mistaken(summary)),
        ("Noticed by a test of another component", misnamed(summary)),
    ):
        if results:
            console.print(Text(title, style="bold"))
            for result in results:
                line = Text(f"  {result.state:<13}", style=_STYLES[result.state])
                about = f"  ({result.defect.about})" if result.defect.about else ""
                line.append(f"{result.defect.name}{about}", style="default")
                console.print(line, soft_wrap=True)
    if summary.red:
        console.print(Text("Failed without any defect; say nothing here until they pass", style="bold red"))
        for test in summary.red:
            console.print(Text(f"  {test}"), soft_wrap=True)
    console.print(Text(speed(summary)), soft_wrap=True)


def show_lost(before: Summary, now: Summary, console: Console) -> bool:
    """Print what an earlier audit detected and this one did not.  Returns whether there is any."""
    pairs = lost(before, now)
    for old, new in pairs:
        line = Text("lost: ", style="bold red")
        line.append(f"{new.defect.name} {new.state}; before, {old.test} noticed it", style="default")
        console.print(line, soft_wrap=True)
    if not pairs:
        console.print(Text("Everything that was noticed before and is in both was noticed again."))
    return bool(pairs)


def markdown(summary: Summary) -> str:
    """Return the table in Markdown."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(cells) for cells in rows(summary))]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


class Shown(Progress):
    """Progress as text: a bar with an estimate in a terminal, and a line for each defect.

    Without a terminal, a phase that prints no results says ten times how far it is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("collecting", total=None)

    def __enter__(self) -> Shown:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def phase(self, name: str, done: int, of: int) -> None:
        """Start a bar for a phase."""
        self._name = name
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=of, completed=done)
        if not self._console.is_terminal:
            self._console.print(Text(f"{name}: {of - done} to do"))

    def step(self, line: str) -> None:
        """Advance the bar, and print the line if it is the result of a defect."""
        self._bar.advance(self._task)
        if self._name != "defects":
            self._tell_tenth()
        elif not line.startswith("passed"):
            state = next((s for s in _STYLES if line.startswith(s)), "")
            self._console.print(Text(line, style=_STYLES.get(state, "")), soft_wrap=True)

    def _tell_tenth(self) -> None:
        """Without a terminal, print how far the phase is if another tenth of it is done."""
        (task,) = self._bar.tasks
        done, of = int(task.completed), int(task.total or 1)
        if not self._console.is_terminal and done * 10 // of > (done - 1) * 10 // of:
            self._console.print(Text(f"{self._name}: {done} of {of}"))
