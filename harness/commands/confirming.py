"""``concord perf baseline`` and ``confirm``: measure what the gate suspects against the accepted environment."""

from __future__ import annotations

import getpass
import hashlib
import sys
import time
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

import harness
from harness.bench.detection.alarms import Decision
from harness.bench.detection.dueted import SLOWER, UNMEASURED, change
from harness.bench.detection.suspicions import ALL, DUETED, LEARNING, Suspicion
from harness.bench.duet.deciding import MEDIAN
from harness.bench.history.lines import Baseline, Dueted, Line
from harness.bench.records import Series, day_of
from harness.commands import asked_duets
from harness.commands.asked_duets import Asked, NoDuet, Result
from harness.commands.duet import parsed
from harness.commands.perf import ALARM, NightId, Place, Rate, decided, opened_history, printed
from harness.commands.refusing import bad, refusing
from harness.redaction import recorded
from harness.safe_io.shown import one_line
from harness.safe_io.writing import own_folder
from harness.versions.candidates import Made, NotMade
from harness.versions.environments import EnvironmentProblem, environment

OUT = Path("reports/out/confirm")
_FOLDER = "{folder}"


def baseline(
    env: Annotated[
        str,
        typer.Argument(
            help="The accepted environment: a virtual environment's folder or a Python, and variables after it. With "
            "--make, a name for it, such as a version. Default: show the recorded one.",
            show_default=False,
        ),
    ] = "",
    make: Annotated[str, typer.Option(help="Shell command that makes the environment {folder} for {candidate}.")] = "",
    reason: Annotated[str, typer.Option(help="Why its performance is as it should be.")] = "",
    who: Annotated[str, typer.Option(help="Who accepts it. Default: the user's name.")] = "",
    history: Place = "",
    night: NightId = "",
) -> None:
    """Record the environment whose performance is accepted, or show it. `concord perf confirm` measures against it.

    It holds for the machine, subject and profile of the newest night.
    """
    with refusing(ValueError, OSError), opened_history(history) as opened:
        line = opened.line(night)
        if not env:
            said = _of(line.baseline) if line.baseline else "no environment is recorded: concord perf baseline ENV"
            printed(said)
            return
        if not reason.strip():
            raise ValueError("no reason: say why, for those who read it next year")
        if make and _FOLDER not in make:
            raise ValueError(f"--make {make!r}: it must make the environment in {_FOLDER}")
        if not make:
            env = _checked(env)
        given = Baseline(environment=env, make=make, reason=reason, who=who or getpass.getuser(), at=time.time())
        opened.set_baseline(line.nights[-1], line.fingerprint, given)
        printed(_of(given))


def _checked(env: str) -> str:
    """Return an environment with its full path.  Errors: ValueError if it can't be used or may not be kept."""
    place, own = parsed("ENV", env, ())
    if not place:
        raise ValueError(f"{env!r}: it names no environment: give a virtual environment's folder, or a Python")
    hidden = [name for name, value in own if recorded(name, value) != value]
    if hidden:
        raise ValueError(
            f"{hidden[0]}: its value would be kept in the history, where others can read it: set it where the nightly "
            "job runs instead"
        )
    found = environment(Path(place), Path(harness.__file__).parents[1])
    return " ".join([quote(str(found.folder)), *(quote(f"{name}={value}") for name, value in own)])


def _of(given: Baseline) -> str:
    made = f", made by: {given.make}" if given.make else ""
    return f"accepted: {given.environment}{made} ({day_of(given.at)}, {given.who}: {given.reason})"


def confirm(
    against: Annotated[
        str, typer.Option(help="Environment to measure against. Default: the one of `concord perf baseline`.")
    ] = "",
    make: Annotated[str, typer.Option(help="Shell command that makes the environment {folder} for {candidate}.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Measure every collective and training step of the night, suspected or not.")
    ] = False,
    most: Annotated[int, typer.Option(help="Number of suspected series to measure at most.", min=1)] = 6,
    minutes: Annotated[float, typer.Option(help="Time for the duet.", min=0.1)] = 10.0,
    margin: Annotated[float, typer.Option(help="Percent within which sides count as equal.", min=0.1, max=100)] = 5.0,
    profile: Annotated[str, typer.Option(help="Profile of both sides. Default: the night's.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for journals and environments that are made.")] = OUT,
    history: Place = "",
    night: NightId = "",
    rate: Rate = 0.01,
) -> None:
    """Measure the series that the gate suspects, now, in turns with the accepted environment.

    What the duet says is kept in the history, and `concord perf gate`, `show` and `page` report it. Exits with 1 if a
    series is slower than in the accepted environment, 0 otherwise, 2 if the environment can't be used or the duet
    broke. Nothing that the gate found is lost then.
    """
    with refusing(ValueError, OSError), opened_history(history) as opened:
        line = opened.line(night)
        found = decided(line, rate)
        chosen, left = chosen_of(found, most)
        if every:
            chosen, left = [*chosen_of(found, sys.maxsize)[0], *_others(line, found)], 0
        if not chosen:
            printed("the gate suspects no series: nothing to measure")
            return
        for one in chosen:
            printed(f"to measure: {said_of(one)}")
        if left:
            printed(f"left out: {left} more (--most)")
        given = _given(against, make, line.baseline)
        if given is None:
            printed("no duet: no accepted environment is recorded: concord perf baseline ENV --reason TEXT", "yellow")
            return
        try:
            folder = own_folder(out / line.nights[-1].id[:60].replace("/", "-"))
            series = [one.series for one in chosen]
            measured = _measured(given, series, minutes, margin, folder, out, profile or line.nights[-1].profile)
        except (NoDuet, EnvironmentProblem, NotMade, OSError) as e:
            why = one_line(str(e))[:1000]
            unmeasured = Dueted(
                night=line.nights[-1].id, series=None, verdict=UNMEASURED, against=given.environment, why=why, at=_now()
            )
            opened.add_dueted([unmeasured])
            raise bad(f"no duet with {given.environment}: {why}; the gate's own result stands") from e
        rows = kept(line, series, measured, given, margin / 100)
        opened.add_dueted(rows)
    for row in rows:
        assert row.series is not None
        words = (f"{row.verdict}:", row.series.name, change(row), f"({row.why})" if row.why else "")
        printed(" ".join(filter(None, words)), "bold red" if row.verdict == SLOWER else "")
    raise typer.Exit(ALARM if any(row.verdict == SLOWER for row in rows) else 0)


def _now() -> float:
    return time.time()


def chosen_of(found: Decision, most: int) -> tuple[list[Suspicion], int]:
    """Return the suspicions that a duet measures, and the number of those that it could measure besides.

    Duets measure neither compiled steps nor the parts of steps nor what other programs measured.
    """
    fit = [one for one in found.suspicions if _dueted(one.series)]
    return fit[:most], len(fit[most:])


def _dueted(series: Series) -> bool:
    """Return whether a duet can measure a series."""
    return series.metric == "time" and (
        bool(series.bytes) or (series.is_step and "compiled" not in dict(series.variant))
    )


def _others(line: Line, found: Decision) -> list[Suspicion]:
    """Return what a duet can measure of the night and is not suspected."""
    known = {one.series for one in found.suspicions}
    here = [one for one in line.figures[line.nights[-1].id] if _dueted(one) and one not in known]
    return [Suspicion(series=one, kind=ALL) for one in here]


def said_of(one: Suspicion) -> str:
    """Describe a suspicion on a line."""
    if one.kind == LEARNING:
        return f"{one.series.name}: history is too short to judge it"
    if one.kind == ALL:
        return f"{one.series.name}: not suspected (--all)"
    if one.kind == DUETED:
        return f"{one.series.name}: the last duet found it slower"
    nights = f"{one.nights} nights" if one.nights > 1 else "one night"
    size = f"{100 * (one.ratio - 1):+.0f} %"
    return f"{one.series.name}: {size} in {nights}, which chance alone shows with {100 * one.chance:.2g} %"


def _given(against: str, make: str, recorded_one: Baseline | None) -> Baseline | None:
    if not against:
        return recorded_one
    return Baseline(environment=against, make=make, reason="", who="", at=_now())


def _measured(
    given: Baseline, series: list[Series], minutes: float, margin: float, folder: Path, out: Path, profile: str
) -> Result:
    """Run the duet.  Errors: NoDuet, EnvironmentProblem, NotMade, OSError."""
    root = Path(harness.__file__).parents[1]
    place = given.environment
    if given.make:
        digest = hashlib.sha256(f"{given.make}\0{given.environment}".encode()).hexdigest()[:12]
        made = Made(given.environment, given.make, own_folder(out).absolute() / "environments" / digest, root)
        place = str(made.make(lambda text: typer.echo(text, nl=False)).folder)
    else:
        try:
            environment(Path(parsed("ENV", place, ())[0]), root)
        except EnvironmentProblem as e:
            raise EnvironmentProblem(f"{e}: record another with `concord perf baseline`") from e
    asked = Asked(
        a=_absolute(place),
        b="",
        series=[one.name for one in series],
        minutes=minutes,
        margin=margin,
        folder=folder,
        options=("--profile", profile) if profile else (),
    )
    return asked_duets.run(asked, lambda text: typer.echo(text, nl=False))


def _absolute(place: str) -> str:
    first, *rest = place.split(" ")
    return " ".join([str(Path(first).absolute()) if Path(first).exists() else first, *rest])


def kept(line: Line, series: list[Series], measured: Result, given: Baseline, margin: float) -> list[Dueted]:
    """Return what the history keeps of a duet: a row for each series that was asked for."""
    rows = {row.name: row for row in measured.series}
    found, at = [], _now()
    for one in series:
        fields = {"night": line.nights[-1].id, "series": one, "margin": margin, "against": given.environment, "at": at}
        row = rows.get(one.name)
        if row is None:
            found.append(Dueted(verdict=UNMEASURED, why="a duet does not measure it", **fields))  # type: ignore[arg-type]
            continue
        found.append(
            Dueted(
                verdict=row.verdict,
                ratio=row.ratio,
                low=row.low,
                high=row.high,
                median=row.figure == MEDIAN,
                why=one_line(row.why)[:1000],
                **fields,  # type: ignore[arg-type]
            )
        )
    return found
