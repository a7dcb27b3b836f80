"""The commands of the history and its gate: ``concord perf store``, ``gate``, ``accept``, ``calibrate`` and so on."""

from __future__ import annotations

import contextlib
import getpass
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from harness.bench.detection.alarms import Alarm, Decision
from harness.bench.detection.tails import RATE, Array
from harness.bench.history.lines import Accepted, Line
from harness.bench.history.nccl_tests import SUBJECT
from harness.bench.history.nights import load
from harness.bench.records import Series, day_of
from harness.commands.refusing import BAD_INPUT, bad, refusing
from harness.safe_io.writing import write_whole

if TYPE_CHECKING:  # databases and statistics are slow to import, and other commands don't need them
    from harness.bench.detection.calibrate import Calibration
    from harness.bench.history.store import History

ALARM = 1

app = typer.Typer(no_args_is_help=True, help="Benchmarks: their history, and the nightly gate.")

Place = Annotated[
    str,
    typer.Option(
        "--history",
        help="A file, or an SQLAlchemy URL. Default: $CONCORD_HISTORY, or a file in ~/.local/state. Every user of the "
        "machine can read command lines: put a URL with a password into the variable, or the password into ~/.pgpass.",
    ),
]
NightId = Annotated[
    str, typer.Option("--night", help="Id of the night, or the beginning of its id. Default: the newest.")
]
Rate = Annotated[
    float, typer.Option(help="Target probability of a false alarm in a night, over all series.", min=1e-6, max=0.5)
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file as JSON.")]


@app.command()
def store(
    files: Annotated[
        list[Path],
        typer.Argument(help="perf.jsonl files, folders of them, JSON from pytest-benchmark, or output of nccl-tests."),
    ],
    history: Place = "",
    collective: Annotated[
        str, typer.Option(help="The test of nccl-tests, such as all_gather, if its output does not say it.")
    ] = "",
) -> None:
    """Add nights to the history, each only once. Exits with 2 if a file is not a night, after storing the others."""
    with refusing(ValueError, OSError):
        paths = [night for file in files for night in (_within(file) if file.is_dir() else [file])]
    with refusing(ValueError, OSError), opened_history(history) as opened:
        wrong = 0
        for file in paths:
            try:
                night = load(file, collective)
                added = opened.add(night)
            except ValueError as e:
                bad(str(e))
                wrong += 1
                continue
            outcome = f"{len(night.measurements)} series" if added else "there already"
            printed(f"{file}: night {night.id}: {outcome}")
        if wrong:
            raise typer.Exit(BAD_INPUT)


def _within(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("perf.jsonl"))
    if not paths:
        raise ValueError(f"{folder}: no perf.jsonl in this folder or below it; `concord perf run` makes one")
    return paths


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the results of the run.")] = Path("reports/out"),
    history: Place = "",
) -> None:
    """Measure a night and add it to the history: `pytest suites/perf --benchmark-only`, then `store`.

    Run it where the suites are. Further arguments go to pytest.
    """
    with refusing(ValueError, OSError):
        if not Path("suites/perf").is_dir():
            raise ValueError(f"{Path.cwd()} has no folder suites/perf; run this where it is")
    before = set(out.rglob("perf.jsonl"))
    options = ["suites/perf", "--benchmark-only", "--benchmark-quiet", "--concord-results", str(out), *context.args]
    code = subprocess.run([sys.executable, "-m", "pytest", *options], check=False).returncode
    new = sorted(set(out.rglob("perf.jsonl")) - before)
    if new:
        store(new, history)
    raise typer.Exit(code if new or code else BAD_INPUT)


@app.command()
def page(
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("perf.html"),
    history: Place = "",
    night: NightId = "",
    rate: Rate = RATE,
) -> None:
    """Write a page that shows the newest night and its history. It opens offline."""
    from harness.bench.view import view
    from reports.perf import page as written

    with refusing(ValueError, OSError):
        with opened_history(history) as opened:
            line, beside = opened.line(night), opened.newest(SUBJECT)
        write_whole(out, written(view(line, decided(line, rate), beside)))
        printed(f"page: {out}")


@app.command()
def scaling(history: Place = "", night: NightId = "") -> None:
    """Show how collectives and steps of the newest night scale with ranks, and what memory and links allow."""
    from harness.bench.terminal import scaling as tables
    from harness.bench.view import curves_of

    with refusing(ValueError, OSError):
        line = _line(history, night)
        found = curves_of(line.figures[line.nights[-1].id])
        if not found:
            raise ValueError("nothing was measured on several numbers of ranks; measure with --perf-ranks 1,2,4")
        for table in tables(found):
            if table.row_count:
                Console().print(table)


@app.command()
def gate(history: Place = "", night: NightId = "", rate: Rate = RATE, json: Json = None) -> None:
    """Judge the newest night by the nights before it on the same machine and software.

    Exits with 0 if nothing is wrong, 1 if there is an alarm, 2 if there is no such night.
    """
    with refusing(ValueError, OSError):
        judged = decided(_line(history, night), rate)
        _written(json, judged)
        printed(f"night {judged.night}: {len(judged.alarms) or 'no'} {'alarm' if len(judged.alarms) < 2 else 'alarms'}")
        for alarm in judged.alarms:
            printed(f"ALARM  {alarm.text}", "bold red")
        for alarm in judged.improvements:
            printed(f"faster {alarm.text}", "green")
        for note in judged.notes:
            printed(f"note   {note}", "yellow")
        if judged.suspicions:
            names = "; ".join(one.series.name for one in judged.suspicions[:_NAMED])
            more = f" and {len(judged.suspicions) - _NAMED} more" if len(judged.suspicions) > _NAMED else ""
            printed(f"suspected and not told, which concord perf confirm measures: {names}{more}", "dim")
    raise typer.Exit(judged.code)


_NAMED = 3
"""Suspected series that the gate names."""


@app.command()
def accept(
    words: Annotated[str, typer.Argument(help="Text in the lines of the alarms to accept.")],
    reason: Annotated[str, typer.Option(help="Why the change is as it should be.")],
    who: Annotated[str, typer.Option(help="Who accepts them. Default: the user's name.")] = "",
    history: Place = "",
    night: NightId = "",
    rate: Rate = RATE,
) -> None:
    """Accept alarms of the newest night: the level that they report is the expected one from now on.

    Who accepted them, when and why is kept. Exits with 2 if no alarm has this text.
    """
    with refusing(ValueError, OSError), opened_history(history) as opened:
        line = opened.line(night)
        if not reason.strip():
            raise ValueError("no reason: say why, for those who read it next year")
        decision = decided(line, rate)
        chosen = [alarm for alarm in (*decision.alarms, *decision.improvements) if words in alarm.text]
        if not chosen:
            lines = "".join(f"\n  {alarm.text}" for alarm in decision.alarms)
            raise ValueError(f"no alarm has {words!r} in its line{':' + lines if lines else ': there is none'}")
        refused = [alarm for alarm in chosen if alarm.kind in ("refused", "environment")]
        if refused:
            raise ValueError(f"this cannot be accepted, it ends when its cause does: {refused[0].text}")
        rows = [row for alarm in chosen for row in _rows(alarm, reason, who or getpass.getuser())]
        opened.accept(line.nights[-1], rows)
        for alarm in chosen:
            printed(f"accepted: {alarm.text}")


def _rows(one: Alarm, reason: str, who: str) -> list[Accepted]:
    keys = [""] if one.everything or not one.series else [series.key for series in one.series]
    ratio = one.ratio if math.isfinite(one.ratio) else 0.0
    given = {"kind": one.kind, "night": one.since, "reason": reason, "who": who, "at": time.time(), "ratio": ratio}
    return [Accepted(series=key, **given) for key in keys]  # type: ignore[arg-type]


@app.command("history")
def listed(
    history: Place = "",
    series: Annotated[
        bool, typer.Option("--series", help="List the series of the newest night instead of nights.")
    ] = False,
) -> None:
    """List the nights, newest last, or the series of the newest night."""
    with refusing(ValueError, OSError), opened_history(history) as opened:
        if series:
            line = opened.line()
            for one in sorted(line.figures[line.nights[-1].id], key=lambda one: (one.operation, one.dtype, one.bytes)):
                printed(one.name)
            return
        columns = ("night", "started", "commit", "fingerprint", "profile", "subject", "series")
        table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.columns[0].no_wrap = table.columns[1].no_wrap = True  # so that they can be copied
        nights = opened.nights()
        short = _shortened([night.id for night in nights])
        for night in nights:
            name, day = short[night.id], day_of(night.started)
            row = (name, day, night.commit[:8], night.fingerprint[:8], night.profile, night.subject)
            table.add_row(*map(Text, row), f"{night.measured}{'' if night.complete else ', incomplete'}")
        Console().print(table)


def _shortened(ids: Sequence[str]) -> dict[str, str]:
    """Return beginnings of ids by which ``--night`` knows them: no other id begins so."""
    lengths = {one: range(_SHORTEST_ID, len(one)) for one in ids}
    common = Counter(one[:n] for one, possible in lengths.items() for n in possible)
    return {one: next((one[:n] for n in possible if common[one[:n]] == 1), one) for one, possible in lengths.items()}


@app.command()
def show(
    history: Place = "",
    night: NightId = "",
    words: Annotated[str, typer.Option("--only", help="Show only series whose name contains this.")] = "",
    rate: Rate = RATE,
) -> None:
    """Show every series of a night: its value, its change from the level before, its last nights, the verdict."""
    with refusing(ValueError, OSError):
        line = _line(history, night)
        decision = decided(line, rate)
        Console().print(_table(line, decision, words))
        for note in decision.notes:
            printed(note, "yellow")


def _table(line: Line, found: Decision, words: str) -> Table:
    from harness.bench.detection.changes import middle
    from harness.bench.detection.gate import timed

    series, values, _ = timed(line)
    table = Table("series", "value", "change", f"last {_SHOWN} nights", "verdict")
    for column in table.columns[1:3]:
        column.justify = "right"
    reference = middle(values[:-1], 0) if len(values) > 1 else np.full(len(series), np.nan)
    for j in sorted(range(len(series)), key=lambda j: (series[j].operation, series[j].dtype, series[j].bytes)):
        if words not in series[j].name:
            continue
        change = float(np.expm1(values[-1, j] - reference[j]))
        table.add_row(
            Text(series[j].name),
            time_of(float(np.exp(values[-1, j]))) if np.isfinite(values[-1, j]) else "-",
            f"{100 * change:+.1f} %" if np.isfinite(change) else "-",
            sparkline(values[-_SHOWN:, j]),
            Text(_verdict(series[j], found)),
        )
    return table


_SHOWN = 30
_SHORTEST_ID = 12


def _verdict(one: Series, found: Decision) -> str:
    for alarm in found.alarms:
        if one in alarm.series:
            change = f" {100 * (alarm.ratio - 1):+.0f} %" if alarm.kind in ("step", "duet") else ""
            return f"{alarm.kind}{change}"
    if any(one in better.series for better in found.improvements):
        return "faster"
    return "learning" if found.notes else "ok"


def sparkline(values: Array) -> str:
    """Draw one character for each night, from the lowest value to the highest; a missing value is a gap."""
    known = values[np.isfinite(values)]
    if not known.size:
        return " " * len(values)
    low, span = float(known.min()), float(np.ptp(known))
    blocks = "▁▂▃▄▅▆▇█"
    places = [blocks[round(7 * (x - low) / span) if span else 3] if np.isfinite(x) else " " for x in values]
    return "".join(places)


def time_of(seconds: float) -> str:
    """Format seconds for people, as in ``12.3 µs``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


@app.command()
def calibrate(
    history: Place = "",
    night: NightId = "",
    nights: Annotated[int, typer.Option(help="Number of resampled A/A nights.", min=20)] = 200,
    trials: Annotated[int, typer.Option(help="Number of steps to try of each size and reach.", min=5)] = 60,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    rate: Rate = RATE,
    json: Json = None,
) -> None:
    """Measure the gate's false alarms and the steps that it finds on this machine's nights, next to other methods.

    Exits with 1 if the false-alarm rate is above the target by more than chance, 2 if there are too few nights.
    """
    from harness.bench.detection.calibrate import GATE, bands_of, calibrate, quiet, relative_rounds
    from harness.bench.detection.gate import followed_of, timed

    with refusing(ValueError, OSError):
        line = _line(history, night)
        series, values, _ = timed(line)
        whole = [bool(np.isfinite(column).all()) for column in values.T]
        if len(values) < _LEAST or not any(whole):
            raise ValueError(
                f"{len(values)} nights of this machine and software, {sum(whole)} series in all of them: "
                f"a calibration needs {_LEAST} nights: run the benchmarks again, without any change"
            )
        with _progress("nights judged") as step:
            followed = followed_of(line, rate, step)
        series = [one for one, every in zip(series, whole, strict=True) if every]
        rounds = relative_rounds(line, series)
        with _progress("nights resampled") as step:
            calibration = calibrate(
                quiet(values, followed)[:, whole],
                rounds,
                bands_of(series),
                nights=nights,
                trials=trials,
                seed=seed,
                rate=rate,
                progress=step,
            )
        _written(json, calibration)
        _tables(calibration)
    raise typer.Exit(ALARM if calibration.alarms[GATE].interval[0] > rate else 0)


_LEAST = 8


def _tables(found: Calibration) -> None:
    from harness.bench.detection.calibrate import GATE

    console = Console()
    printed(
        f"{found.nights} nights, {found.series} series; noise of a night {100 * found.noise:.2f} % (each series), "
        f"{100 * found.common:.2f} % (common factor)"
    )
    low, high = found.real.interval
    printed(
        f"nights as they were: {found.real.hits} of {found.real.of} judged raised an alarm ({low:.1%} to {high:.1%})"
    )
    table = Table("method", "A/A nights with an alarm", "", title="False alarms")
    for name, share in found.alarms.items():
        low, high = share.interval
        table.add_row(name, f"{share.hits} of {share.of}", f"{share.value:.1%} ({low:.1%} to {high:.1%})")
    console.print(table)
    steps = sorted({one.step for one in found.power})
    table = Table("method", "reach", *(f"{step:+.0%}" for step in steps), title="Steps found within three nights")
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for one in found.power:
        rows.setdefault((one.method, one.reach), {})[one.step] = f"{one.found[-1].value:.0%}"
    for (method, reach), cells in rows.items():
        table.add_row(method, reach, *(cells.get(step, "") for step in steps))
    console.print(table)
    for reach, step in found.smallest.items():
        said = f"{step:.0%}" if math.isfinite(step) else f"above {steps[-1]:.0%}"
        printed(f"{GATE}: smallest step found within 3 nights, 95 times of 100, {reach}: {said}")
    printed(f"foretold for one series: {found.expected:.1%}")


def opened_history(history: str) -> History:
    """Open the history that the option names."""
    from harness.bench.history.store import History

    return History(history or None)


def _line(history: str, night: str) -> Line:
    with opened_history(history) as opened:
        return opened.line(night)


def decided(line: Line, rate: float) -> Decision:
    """Judge the newest night of a line, and show progress."""
    from harness.bench.detection.gate import decide

    with _progress("nights judged") as step:
        return decide(line, rate=rate, progress=step)


def _written(file: Path | None, found: msgspec.Struct) -> None:
    if file:
        with refusing(OSError):
            write_whole(file, msgspec.json.format(msgspec.json.encode(found), indent=1))


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], object]]:
    """Show progress on standard error if that is a terminal."""
    console = Console(stderr=True)
    bars = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*bars, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)


def printed(text: str, style: str = "") -> None:
    """Print a line as it is, whatever the width of the terminal."""
    Console().print(Text(text, style=style), soft_wrap=True)
