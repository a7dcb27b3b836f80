"""``concord perf duet``: two environments measured in turns, and which series are slower."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import harness
from harness.bench.counting.deciding import SETS
from harness.bench.duet.deciding import LEAST, MARGIN, PLANNED, RATE
from harness.bench.duet.journal import NAME, Journal, JournalError
from harness.bench.duet.messages import Begin, Described
from harness.bench.duet.records import SIDES, A, About, B, Begun, Session, identity
from harness.bench.duet.run import Duet, shared
from harness.bench.duet.shown import markdown as markdown_of
from harness.bench.duet.shown import tables
from harness.bench.duet.sides import Setting, Side, SideFailed, variables_of
from harness.bench.duet.state import State, replayed
from harness.bench.duet.view import code, view
from harness.bench.figures import usual
from harness.bench.measuring.asked import asked_of, ranks_asked
from harness.bench.records import Series
from harness.commands.outputs import appended, writable
from harness.commands.refusing import bad, refusing
from harness.redaction import NOT_SHOWN, recorded, remember
from harness.safe_io.shown import one_line
from harness.safe_io.writing import own_folder, write_whole
from harness.versions import commits
from harness.versions.environments import environment, variables

OUT = Path("reports/out/duet")
FAILED = 1
_THIS = sys.prefix if sys.prefix != sys.base_prefix else sys.executable
"""The environment of this process."""
INTERRUPTED = 130

Given = Annotated[
    str,
    typer.Argument(
        help="An environment: a virtual environment's folder or a Python, and variables after it, as in "
        "'venv GLOO_X=1'. Default: this Python.",
        show_default=False,
    ),
]


def duet(
    a: Given = "",
    b: Given = "",
    base: Annotated[
        str, typer.Option(help="A is this commit of the repository here, and B is its working tree.", metavar="COMMIT")
    ] = "",
    a_env: Annotated[list[str] | None, typer.Option(help="Variable of A. Repeatable.", metavar="NAME=VALUE")] = None,
    b_env: Annotated[list[str] | None, typer.Option(help="Variable of B. Repeatable.", metavar="NAME=VALUE")] = None,
    profile: Annotated[str, typer.Option(help="Profile of both sides: a name, or a file.")] = "",
    a_profile: Annotated[str, typer.Option(help="Profile of A.")] = "",
    b_profile: Annotated[str, typer.Option(help="Profile of B.")] = "",
    b_fault: Annotated[
        list[str] | None, typer.Option(help="Fault to put into B's ranks, to see it found. Repeatable.", metavar="NAME")
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(
            "--series",
            "-k",
            help="A series: its name, or words of it, as in 'bfloat16 2 ranks'. Repeatable. Default: all_reduce of "
            "float32 on 2 ranks, six sizes.",
        ),
    ] = None,
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks to offer, such as 2,8. Default: the profile's, or 2 and 4.")
    ] = "",
    more: Annotated[
        str, typer.Option(help="Offer more: dtypes, models, groups, levels, with commas, or all.", metavar="WHAT")
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the series that both sides offer, and end.")] = False,
    margin: Annotated[float, typer.Option(help="Percent within which sides count as equal.", min=0.1, max=100)] = (
        100 * MARGIN
    ),
    minutes: Annotated[float, typer.Option(help="Time for all calls of this duet together.", min=0.1)] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the order of turns.", min=0, max=1_000_000)] = 0,
    counts: Annotated[
        bool, typer.Option(help="First count what each series needs, such as calls, copies and bytes that are sent.")
    ] = True,
    anew: Annotated[bool, typer.Option("--anew", help="Begin again instead of continuing.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for journals, from which the same command continues.")] = OUT,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file as JSON.", callback=writable)] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Append the result to this file in Markdown, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to this file. It opens offline.", callback=writable)
    ] = None,
) -> None:
    """Measure two environments in turns, and say which series are slower in B.

    Ends when every series is decided (slower, faster, or equal within the margin), or when the time is used up. The
    same command continues an interrupted duet. Exits with 1 if a series is slower in B or fails, 0 otherwise (series
    that are still undecided are listed), 2 for bad input, 130 if interrupted.
    """
    with contextlib.ExitStack() as stack:
        with refusing(ValueError, OSError):
            folder = own_folder(out).absolute()
            settings = stack.enter_context(_settings(folder, (a, b), base, (a_env or [], b_env or [])))
            profiles = {A: a_profile or profile, B: b_profile or profile}
            offered = Begin(ranks=ranks_asked(ranks) if ranks else (), more=asked_of(more) if more else ())
            given = {side: msgspec.structs.replace(offered, profile=_profile(profiles[side])) for side in SIDES}
            given[B] = msgspec.structs.replace(given[B], faults=tuple(b_fault or ()))
            sides = {side: _started(stack, one, folder) for side, one in settings.items()}
            described = _described(sides, given)
            offers = {side: one.offers for side, one in described.items()}
            if listed:
                for one in shared(offers):
                    typer.echo(one_line(one.name))
                return
            begun = Begun(
                time=time.time(),
                a=_about(settings[A], described[A], given[A]),
                b=_about(settings[B], described[B], given[B]),
                series=tuple(chosen(shared(offers), series or [])),
                rate=RATE,
                margin=margin / 100,
                seed=seed,
            )
            place = folder / f"{identity(begun)}{_hidden(settings)}"
            journal, state = _continued(stack, place, begun, anew=anew)
        measured = Duet(sides, journal, state, offers)
        if counts:
            _count(measured)
        ended, exit_code = _measured(measured, 60 * minutes)
    found = view(state, ended=ended)
    with refusing(OSError):
        Console().print(tables(found))
        typer.echo(f"journal: {os.path.relpath(journal.path)}")
        if json is not None:
            write_whole(json, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        if markdown is not None:
            appended(markdown, markdown_of(found).encode())
        if html is not None:
            from reports.duet import page

            write_whole(html, page(found))
    raise typer.Exit(exit_code)


@dataclass(frozen=True)
class _Chosen:
    """What the user asked a side to be."""

    setting: Setting
    label: str
    source: str
    variables: tuple[tuple[str, str], ...]


@contextlib.contextmanager
def _settings(
    out: Path, given: Sequence[str], base: str, more: Sequence[Sequence[str]]
) -> Iterator[dict[str, _Chosen]]:
    """Yield what makes each side.  Errors: ValueError, OSError."""
    own = Path(harness.__file__).parents[1]
    with contextlib.ExitStack() as stack:
        roots: dict[str, tuple[tuple[Path, ...], str]] = dict.fromkeys(SIDES, ((own,), ""))
        if base:
            top = commits.repository(Path.cwd())
            commit = commits.commit_of(top, base)
            tree = stack.enter_context(commits.checked_out(top, commit, out / "worktrees" / commit[:12]))
            label = commit[:12] if commit.startswith(base) else f"{base} ({commit[:12]})"
            roots = {
                A: (_paths(tree, own, base), label),
                B: (_paths(top, own, "the working tree"), commits.working_tree(top, out)),
            }
        found = {}
        for side, text, named in zip(SIDES, given, more, strict=True):
            place, own_variables = parsed(side, text, named)
            paths, source = roots[side]
            remember(dict(own_variables))
            found[side] = _side(side, place, paths, source, own_variables)
        yield found


def _paths(top: Path, own: Path, name: str) -> tuple[Path, ...]:
    """Return the folders from which a side imports: its sources, and this Concord unless they are Concord's."""
    sources = tuple(path for path in (top / "src", top) if path.is_dir())
    if not (top / "harness" / "bench").is_dir():
        return (*sources, own)
    if not (top / "harness" / "bench" / "duet").is_dir():
        raise ValueError(f"--base {name}: its Concord has no duets yet; choose a later commit")
    return (top,)


def parsed(side: str, text: str, named: Sequence[str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the environment that a user wrote, and the variables after it.  Errors: ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise ValueError(f"{side}: {text!r}: {e}") from None
    place = words.pop(0) if words and ("=" not in words[0] or Path(words[0]).exists()) else ""
    found = {}
    for word in (*words, *named):
        name, equals, value = word.partition("=")
        if not equals or not name or "\0" in word:
            raise ValueError(f"{side}: {word!r} is no variable: write NAME=VALUE")
        found[name] = value
    return place, tuple(sorted(found.items()))


def _side(side: str, place: str, paths: Sequence[Path], source: str, own: tuple[tuple[str, str], ...]) -> _Chosen:
    """Return what makes a side.  ``paths``: folders that precede its installed packages.  Errors: ValueError."""
    home = paths[-1] if (paths[-1] / "pyproject.toml").is_file() else Path.cwd()
    there = environment(Path(place or _THIS), home)
    inherited = variables(there.python, home)
    first = [str(path) for path in paths[:-1]]
    inherited["PYTHONPATH"] = os.pathsep.join([*first, *inherited["PYTHONPATH"].split(os.pathsep)])
    setting = Setting(side, there.python, paths[0] if first else home, variables_of(inherited, dict(own)))
    return _Chosen(setting, str(there.folder), source, own)


def _hidden(settings: Mapping[str, _Chosen]) -> str:
    """Return what tells duets apart that differ only in values that are not shown; empty if all are shown.

    It is slow to compute, so that nobody finds a value by trying.
    """
    every = [(side, *pair) for side, one in settings.items() for pair in one.variables if recorded(*pair) is None]
    if not every:
        return ""
    return f"-{hashlib.scrypt(msgspec.json.encode(every), salt=b'concord duet', n=1 << 14, r=8, p=1).hex()[:8]}"


def _profile(name: str) -> str:
    """Return a profile's name, or its file from the root, because sides run elsewhere."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


def _started(stack: contextlib.ExitStack, one: _Chosen, folder: Path) -> Side:
    log = folder / f"{one.setting.name}.txt"
    write_whole(log, "", follow=False)
    side = Side(one.setting, log)
    stack.callback(side.close)
    return side


def _described(sides: dict[str, Side], given: dict[str, Begin]) -> dict[str, Described]:
    """Ask both sides at once what they are.  Errors: ValueError."""
    try:
        for name, side in sides.items():
            side.send(given[name])
        return {name: side.described() for name, side in sides.items()}
    except SideFailed as e:
        raise ValueError(f"{e.side} ({sides[e.side].setting.python}): {e.why}") from e


def _about(one: _Chosen, found: Described, given: Begin) -> About:
    return About(
        label=one.label,
        python=str(one.setting.python),
        harness=found.harness,
        commit=found.commit,
        source=one.source,
        profile=given.profile,
        faults=given.faults,
        variables=tuple((name, recorded(name, value) or NOT_SHOWN) for name, value in one.variables),
        fingerprint=found.fingerprint,
    )


def chosen(offered: Sequence[Series], asked: Sequence[str]) -> list[Series]:
    """Return the series that were asked for, or a moderate set.  Errors: ValueError if there is none."""
    every = list(dict.fromkeys(offered))
    if not asked:
        found = [s for s in every if usual(s)]
    else:
        names = {one.name for one in every}  # a whole name asks for this one, and not for its other forms
        found = [
            one
            for one in every
            if any(text.strip() == one.name if text.strip() in names else asks_for(text, one) for text in asked)
        ]
    if not found:
        what = (
            f"no series that both sides offer has {' or '.join(map(repr, asked))} in its name"
            if asked
            else "the sides share no usual series"
        )
        raise ValueError(f"{what}; --list shows all {len(every)}")
    return found


def asks_for(text: str, series: Series) -> bool:
    """Return whether a text asks for a series: it is its whole name, or each of its words is a word of the name.

    A number and its unit are one word: ``8 KiB`` does not ask for 128 KiB.
    """
    name = series.name
    return text.strip() == name or (bool(text.strip()) and set(_words(text)) <= set(_words(name)))


def _words(text: str) -> list[str]:
    return re.sub(r"(\d) (?=(B|KiB|MiB|GiB|TiB|ranks)\b)", r"\1", text.replace(",", " ")).split()


def _continued(stack: contextlib.ExitStack, folder: Path, begun: Begun, *, anew: bool) -> tuple[Journal, State]:
    """Begin a journal, or continue the one that is there.  Errors: ValueError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder}: this duet is being measured by another process") from None
    journal = Journal(folder / NAME)
    if anew or not journal.path.exists():
        journal.begin(begun)
    else:
        journal.mend()
    records = journal.read()
    first = records[0]
    if not isinstance(first, Begun) or identity(first) != identity(begun):
        raise JournalError(f"{journal.path}: the journal of another duet; give another --out, or --anew")
    state = replayed(records)
    if state.generations:
        typer.echo(f"continues after {state.seconds / 60:.1f} min: {journal.path}")
    session = Session(time.time())
    journal.write(session)
    state.add(session)
    return journal, state


def _count(duet: Duet) -> None:
    """Count, and say at once what differs.  A side that can't go on is left to the measurement, which reports it."""

    def told(series: int) -> None:
        for change in duet.state.changes(series):
            how = "more" if change.more else "less"
            typer.echo(one_line(f"B needs {how}: {change} in {duet.state.begun.series[series].name}"))

    if left := len(duet.state.to_count):
        typer.echo(f"counts what {left} series need, on {SETS} sets of fresh ranks of each side")
    try:
        duet.count(told)
    except SideFailed as e:
        bad(f"counts: {e}")
        return
    if duet.state.uncounted:
        typer.echo(one_line(f"no counts: {duet.state.uncounted}"), err=True)


def _measured(duet: Duet, seconds: float) -> tuple[str, int]:
    """Measure, and return why it ended before all was decided, and the exit code."""
    state = duet.state
    typer.echo(_plan(state, seconds))
    try:
        with _told(state, seconds) as told:
            duet.run(seconds, told)
    except KeyboardInterrupt:
        return "Interrupted: the same command continues", INTERRUPTED
    except SideFailed as e:
        bad(str(e))
        return f"Ended because side {e.side} failed: {e.why}", FAILED
    except OSError as e:
        raise bad(f"{e.filename or duet.journal.path}: {e.strerror}") from e
    if state.open and state.seconds >= seconds:
        return f"The {seconds / 60:g} minutes are used up: a larger --minutes continues", code(state)
    return "", code(state)


def _plan(state: State, seconds: float) -> str:
    count, left = len(state.begun.series), max(0.0, seconds - state.seconds) / 60
    if state.over:
        return f"{count} series, all decided"
    if left == 0:
        return f"{count} series; the time of {seconds / 60:g} min is used up"
    return (
        f"{count} series, at most {left:.1f} min; the first decisions after {LEAST} generations of fresh servers, "
        f"which the first one times"
    )


def progress_of(state: State, seconds: float) -> str:
    """Describe on a line how far a duet is, and how long it will take.  ``seconds``: its time."""
    count = len(state.begun.series)
    decided = f"{count - len(state.open)} of {count} decided"
    rest = max(0.0, seconds - state.seconds)
    each = state.seconds / state.generations if state.generations else math.inf
    following = next((n for n in PLANNED if n > state.generations), 0)
    parts = [f"generation {state.generations}", decided]
    if math.isfinite(each) and state.generations < LEAST and (LEAST - state.generations) * each > rest:
        parts.append(f"too little time for a decision, which takes {LEAST * each / 60:.1f} min")
    elif math.isfinite(each) and following:
        parts.append(f"next look in {(following - state.generations) * each / 60:.1f} min")
    left = state.left()
    if state.open and state.generations >= LEAST:
        parts.append(f"about {left / 60:.1f} min to decide all" if left <= rest else "not all will be decided in time")
    parts.append(f"at most {rest / 60:.1f} min")
    return ", ".join(parts)


@contextlib.contextmanager
def _told(state: State, seconds: float) -> Iterator[Callable[[State], Any]]:
    """Show progress on standard error: a bar in a terminal, otherwise a line for each look."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, seconds)
        return
    with Progress(
        BarColumn(20), TextColumn("{task.description}", markup=False), console=console, transient=True
    ) as bar:
        task = bar.add_task(progress_of(state, seconds), total=seconds)
        yield lambda now: bar.update(task, description=progress_of(now, seconds), completed=now.seconds)


def _lines(console: Console, seconds: float) -> Callable[[State], None]:
    seen: set[int] = set()

    def told(state: State) -> None:
        if state.generations not in seen and (state.generations == 1 or state.generations in PLANNED):
            seen.add(state.generations)
            console.print(progress_of(state, seconds), markup=False, highlight=False, soft_wrap=True)

    return told
