"""``concord bisect``: the first PyTorch with which a test fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from harness.commands.outputs import writable
from harness.commands.perf_bisect import Measuring, Point, bisected, line_of, of_commits
from harness.commands.perf_bisect import digest as digest_of
from harness.commands.refusing import bad as refused
from harness.commands.refusing import refusing
from harness.safe_io.shown import one_line
from harness.safe_io.writing import own_folder, write_whole
from harness.versions.candidates import Candidate, Given, Made, names, ordered
from harness.versions.environments import checkout, environment
from harness.versions.searching import BAD, GOOD, SKIPPED, Found, most_steps, search
from harness.versions.sessions import digest
from harness.versions.trials import Trial, Trials
from harness.versions.weighing import SURE

OUT = Path("reports/out/bisect")
_STYLES = {GOOD: "green", BAD: "red", SKIPPED: "dim"}


class Bisection(msgspec.Struct):
    """The result of a bisection."""

    test: str
    candidates: list[str]
    trials: list[Trial]
    good: str
    """The last candidate that is known to be good."""
    first_bad: str
    """The first bad candidate; empty if others before it could not be tested."""
    suspects: list[str]
    """The candidates of which one is the first bad one."""


def bisect(
    test: Annotated[str, typer.Argument(help="Node id of pytest, or a script of docs/findings.")] = "",
    good: Annotated[Path | None, typer.Option(help="Environment in which the test passes.")] = None,
    bad: Annotated[Path | None, typer.Option(help="Environment in which it fails.")] = None,
    env: Annotated[list[Path] | None, typer.Option(help="Environment between the two. Repeatable.")] = None,
    candidates: Annotated[
        str, typer.Option(help="Candidates in their order, for --make: words, or a file with one on each line.")
    ] = "",
    make: Annotated[str, typer.Option(help="Shell command that makes the environment {folder} for {candidate}.")] = "",
    tries: Annotated[int, typer.Option(help="How often each candidate is tried.", min=1)] = 1,
    discard: Annotated[bool, typer.Option("--discard", help="Remove each made environment after its trial.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results, from which an interrupted call continues.")] = OUT,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file as JSON.", callback=writable)] = None,
    perf: Annotated[
        str,
        typer.Option(
            help="Instead of a test: a series of `concord perf duet --list` that became slower.", metavar="SERIES"
        ),
    ] = "",
    commits: Annotated[bool, typer.Option("--commits", help="With --perf: --good and --bad are commits.")] = False,
    each: Annotated[float, typer.Option(help="With --perf: minutes of a duet at most.", min=0.1)] = 10.0,
    minutes: Annotated[float, typer.Option(help="With --perf: minutes in all.", min=0.1)] = 120.0,
    profile: Annotated[str, typer.Option(help="With --perf: profile of both sides.")] = "",
) -> None:
    """Find the first PyTorch with which a test fails, by binary search.

    With --perf: the first in which a series is slower. Each step is a duet with the good end, and the search survives
    a duet that is wrong.

    Run it where the suites are. Environments are ordered by their torch versions, from --good to --bad; --bad may be
    the older one. Candidates that can't be made or tested are skipped. A candidate that fails in any of its tries is
    bad. Exits with 0 if the first bad candidate is found, and with 1 otherwise.
    """
    if perf:
        if test or tries != 1:
            raise refused("--perf has no test and no --tries: it asks again where an answer could be wrong")
        ends = tuple(str(end) if end is not None else "" for end in (good, bad))
        between = [str(each_env) for each_env in env or []]
        options = ("--profile", profile) if profile else ()
        with refusing(ValueError, OSError):
            folder, points = _points(
                ends, between, candidates, make, own_folder(out).absolute(), commits, perf, options
            )
            measuring = Measuring(points, perf, folder, each, minutes, options, discard)
        _by_performance(measuring, json)
    if not test:
        raise refused("no test: name one, or give --perf SERIES")
    if commits:
        raise refused("--commits goes with --perf; for a test, give environments or --make")
    with refusing(ValueError, OSError):
        root = checkout(Path.cwd())
        own_folder(root / out)
        folder = root / out / digest(root, [test])[:12]
        row = _row(root, good, bad, env or [], candidates, make, folder)
        trials = Trials(root, folder, test, tries, lambda text: typer.echo(text, nl=False), discard=discard)
    typer.echo(
        f"{len(row)} candidates, at most {most_steps(len(row)) + 2} are tested unless some are skipped: {folder}"
    )
    seen: dict[int, Trial] = {}

    def state(number: int) -> str:
        typer.echo(f"--- {row[number].name}")
        seen[number] = trials.of(row[number])
        typer.echo(f"--- {one_line(_line(seen[number]))}")
        return seen[number].state

    console = Console()
    with refusing(OSError):
        try:
            for number, expected in ((0, GOOD), (len(row) - 1, BAD)):
                if state(number) != expected:
                    _show(seen, console)
                    typer.echo(f"--{expected} {row[number].name} is {one_line(_line(seen[number], named=False))}")
                    raise typer.Exit(1)
            found = search(len(row), state)
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; the same command continues", err=True)
            raise typer.Exit(130) from None
        result = _result(test, row, seen, found)
        if json is not None:
            write_whole(json, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    _show(seen, console)
    typer.echo(f"last good: {one_line(result.good)}")
    if not result.first_bad:
        typer.echo(f"first bad: one of {one_line(', '.join(result.suspects))}; the others could not be tested")
        raise typer.Exit(1)
    typer.echo(f"first bad: {one_line(_line(seen[found.bad]))}")


def _row(
    root: Path,
    good: Path | None,
    bad: Path | None,
    between: Sequence[Path],
    candidates: str,
    make: str,
    folder: Path,
) -> list[Candidate]:
    """Return the candidates in their order, of which the first should be good and the last bad.

    Errors: ValueError, OSError, :class:`typer.Exit` for options that do not go together.
    """
    if bool(candidates) != bool(make):
        raise refused("--candidates and --make go together")
    ends = [environment(path, root) if path else None for path in (good, bad)]
    if candidates:
        if between:
            raise refused(
                "--env is for environments that exist, and --candidates for those to be made: give one of them"
            )
        made: list[Candidate] = [
            Made(name, make, folder / "environments" / f"{number}", root)
            for number, name in enumerate(names(candidates))
        ]
        first, last = ([Given(end)] if end else [] for end in ends)
        row = [*first, *made, *last]
    else:
        if ends[0] is None or ends[1] is None:
            raise refused("--good and --bad are needed, unless there are --candidates")
        row = [Given(each) for each in ordered(ends[0], ends[1], [environment(path, root) for path in between])]
    if len(row) < 2:
        raise refused("there must be a good candidate and a bad one")
    return row


def _result(test: str, row: Sequence[Candidate], seen: dict[int, Trial], found: Found) -> Bisection:
    suspects = [row[number].name for number in found.suspects]
    return Bisection(
        test=test,
        candidates=[each.name for each in row],
        trials=[seen[number] for number in sorted(seen)],
        good=row[found.good].name,
        first_bad=suspects[0] if len(suspects) == 1 else "",
        suspects=suspects,
    )


def _line(trial: Trial, *, named: bool = True) -> str:
    """Describe a trial on one line."""
    failed = sum(each.state == BAD for each in trial.tries)
    state = f"flaky ({failed} of {len(trial.tries)} tries failed)" if trial.flaky else trial.state
    return ": ".join(filter(None, (trial.candidate if named else "", state, trial.headline)))


def _show(seen: dict[int, Trial], console: Console) -> None:
    console.print()
    for _, trial in sorted(seen.items()):
        console.print(Text(one_line(_line(trial)), style=_STYLES[trial.state]), soft_wrap=True)


def _points(
    ends: Sequence[str],
    between: Sequence[str],
    candidates: str,
    make: str,
    out: Path,
    commits: bool,
    series: str,
    options: Sequence[str],
) -> tuple[Path, list[Point]]:
    """Return the folder of a bisection by performance, and its candidates in order.  Errors: ValueError, OSError."""
    if bool(candidates) != bool(make) or (candidates and (between or commits)) or (commits and between):
        raise ValueError("give --candidates with --make, or --env, or --commits")
    if not candidates and not all(ends):
        raise ValueError("--good and --bad are needed, unless there are --candidates")
    if commits:
        points = of_commits(*ends)
        return out / digest_of(points, series, options), points
    named = [Point(end) for end in (ends[0], *between, ends[1]) if end]
    if candidates:
        made = names(candidates)
        folder = out / digest_of([*named, *(Point(f"{name}\0{make}") for name in made)], series, options)
        middle = [
            Point(name, Made(name, make, folder / "environments" / f"{number}", Path.cwd()))
            for number, name in enumerate(made)
        ]
        points = [*[Point(end) for end in ends[:1] if end], *middle, *[Point(end) for end in ends[1:] if end]]
    else:
        points = named
        folder = out / digest_of(points, series, options)
    if len({point.name for point in points}) < max(2, len(points)):
        raise ValueError("there must be a good candidate and a bad one, and none twice")
    return folder, points


def _by_performance(measuring: Measuring, json: Path | None) -> NoReturn:
    """Bisect, show the result, and exit: 0 if the first slower candidate is known, 1 otherwise."""
    with refusing(ValueError, OSError):
        try:
            found, late = bisected(measuring)
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; the same command continues", err=True)
            raise typer.Exit(130) from None
        if json is not None:
            write_whole(json, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    for answer in sorted(found.answers, key=lambda each: each.number):
        typer.echo(one_line(line_of(answer)))
    after = f"{len(found.answers)} duets, {found.seconds / 60:.1f} min"
    if found.first_slower:
        typer.echo(f"first slower: {one_line(found.first_slower)} ({found.probability:.1%}, {after})")
        raise typer.Exit(0)
    if late:
        typer.echo("the time is used up: a larger --minutes continues")
    if found.none >= SURE:
        typer.echo(f"none is slower, not even the last ({found.none:.1%}, {after})")
    else:
        typer.echo(f"first slower: one of {one_line(', '.join(found.suspects) or 'none')} ({after})")
    raise typer.Exit(1)
