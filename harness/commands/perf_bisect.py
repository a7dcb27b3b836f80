"""``concord bisect --perf``: the first environment or commit in which a series is slower, by duets."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Meta

import harness
from harness.bench.duet.deciding import EQUAL, FASTER, SLOWER, UNDECIDED
from harness.commands import asked_duets
from harness.commands.asked_duets import Asked, NoDuet, Row
from harness.commands.duet import parsed
from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import one_line
from harness.safe_io.writing import append_or_nothing
from harness.versions import commits
from harness.versions.candidates import Made, NotMade
from harness.versions.environments import EnvironmentProblem, environment
from harness.versions.weighing import ERROR, SURE, UNSURE, Belief, foretold, search

FILE = "answers.jsonl"
MARGIN = 5.0
"""Percent within which the two ends count as equal."""
_LEAST_MARGIN = 1.0
_LARGEST = 8 << 20
Name = Annotated[str, Meta(max_length=4000)]
Ratio = Annotated[float, Meta(gt=0, le=1e9)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a duet of a candidate with the good end said: a line of the file of answers."""

    candidate: Name
    number: Annotated[int, Meta(ge=1, le=100_000)]
    bad: bool | None
    """None: the candidate can't be measured."""
    error: Annotated[float, Meta(ge=0, lt=0.5)] = ERROR
    """The assumed probability that this is wrong."""
    verdict: Name = ""
    ratio: Ratio | None = None
    low: Annotated[float, Meta(ge=0)] | None = None
    high: Annotated[float, Meta(ge=0)] | None = None
    why: Name = ""
    seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class PerfBisection(msgspec.Struct, kw_only=True):
    """The result of a bisection by performance."""

    series: str
    candidates: list[str]
    first_slower: str
    """Empty if it is not known."""
    probability: float
    suspects: list[str]
    """The fewest candidates that are probable together."""
    none: float
    """The probability that no candidate is slower."""
    answers: list[Answer]
    seconds: float


@dataclass(frozen=True)
class Point:
    """A candidate: an environment as the user wrote it, one that a command makes, or a commit."""

    name: str
    made: Made | None = None
    commit: str = ""

    @property
    def identity(self) -> str:
        """A string that changes if the candidate is another one."""
        return "\0".join((self.name, self.made.command if self.made else "", self.commit))


@dataclass
class Measuring:
    """Duets of candidates with the first one, and their answers, which are kept in a folder."""

    points: Sequence[Point]
    series: str
    folder: Path
    each: float
    """Minutes of a duet at most."""
    minutes: float
    """Minutes of all duets together."""
    options: Sequence[str] = ()
    discard: bool = False
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.answers = read(self.folder / FILE, len(self.points))

    @property
    def seconds(self) -> float:
        """The time of all duets so far."""
        return sum(each.seconds for each in self.answers)

    @property
    def step(self) -> float:
        """The ratio of the two ends, as far as it is known; 1: unknown."""
        last = [one.ratio for one in self.answers if one.number == len(self.points) - 1 and one.bad and one.ratio]
        return math.exp(sum(map(math.log, last)) / len(last)) if last else 1.0

    def belief(self) -> Belief:
        """Return what the answers so far make probable.  Candidates that could not be measured are tried again."""
        found = Belief(len(self.points))
        for one in self.answers:
            if one.bad is not None:
                found.tell(one.number, one.bad, one.error)
        return found

    def ask(self, number: int) -> Answer:
        """Measure a candidate against the first one, and keep what the duet says.  Errors: OSError."""
        point, count = self.points[number], sum(one.number == number for one in self.answers)
        folder = self.folder / f"{number}-{count + 1}"
        began = time.monotonic()
        fields = {"candidate": point.name, "number": number}
        try:
            with self._asked(point, folder) as asked:
                duet = asked_duets.run(asked, _say)
            (row,) = duet.series
            answer = Answer(**fields, **told(row, self.step, duet.ended), seconds=time.monotonic() - began)  # type: ignore[arg-type]
        except (NoDuet, NotMade, EnvironmentProblem, commits.NoCommit, ValueError) as e:
            why = one_line(str(e))[:1000]
            answer = Answer(**fields, bad=None, why=why, seconds=time.monotonic() - began)  # type: ignore[arg-type]
        self.answers.append(answer)
        with open(self.folder / FILE, "ab", buffering=0) as file:
            append_or_nothing(file.fileno(), msgspec.json.encode(answer) + b"\n")
        return answer

    @contextlib.contextmanager
    def _asked(self, point: Point, folder: Path) -> Iterator[Asked]:
        # Half of the step of the two ends counts as equal: a candidate has all of it, or nothing.
        margin = max(_LEAST_MARGIN, 100 * (math.sqrt(self.step) - 1)) if self.step > 1 else MARGIN
        left = max(0.1, min(self.each, self.minutes - self.seconds / 60))
        common = {"series": [self.series], "minutes": left, "margin": margin, "folder": folder}
        if point.commit:
            top = commits.repository(Path.cwd())
            with commits.checked_out(top, point.commit, self.folder.absolute() / "trees" / point.commit[:12]) as tree:
                options = ("--base", self.points[0].commit, *self.options)
                yield Asked(a="", b="", options=options, cwd=tree, **common)  # type: ignore[arg-type]
            return
        try:
            a, b = self._place(self.points[0]), self._place(point)
            yield Asked(a=a, b=b, options=self.options, **common)  # type: ignore[arg-type]
        finally:
            if self.discard and point.made is not None:
                point.made.discard()

    def _place(self, point: Point) -> str:
        """Return where a candidate's environment is.  Errors: NotMade, EnvironmentProblem, ValueError."""
        if point.made is not None:
            return str(point.made.make(_say).folder)
        place, _ = parsed("candidate", point.name, ())
        if place:
            environment(Path(place), Path(harness.__file__).parents[1])
        return point.name


def _say(text: str) -> None:
    typer.echo(text, nl=False)


def told(row: Row, step: float, ended: str = "") -> dict[str, object]:
    """Return what a duet says about a candidate.

    ``step``: the ratio of the two ends; 1: unknown.  ``ended``: why the duet ended, if it has nothing to say.

    A duet that could not decide counts by its estimate, with a larger probability of being wrong.
    """
    known = row.ratio is not None and row.ratio > 0
    found = {"verdict": row.verdict, "ratio": row.ratio if known else None, "low": row.low, "high": row.high}
    if row.verdict in (SLOWER, EQUAL, FASTER):
        return {**found, "bad": row.verdict == SLOWER, "error": ERROR}
    if row.verdict == UNDECIDED and known:
        assert row.ratio is not None
        middle = math.sqrt(step) if step > 1 else 1 + MARGIN / 100
        return {**found, "bad": row.ratio > middle, "error": UNSURE}
    return {**found, "bad": None, "why": one_line(row.why or ended)[:1000] or "the duet measured nothing"}


def read(file: Path, count: int) -> list[Answer]:
    """Return the answers that are kept; a last line that was cut off does not count.  Errors: ValueError."""
    if not file.exists():
        return []
    try:
        lines = contents(file, _LARGEST).split(b"\n")[:-1]
    except FileError as e:
        raise ValueError(str(e)) from e
    found = []
    for place, line in enumerate(lines, 1):
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            why = one_line(str(e))[:300]
            raise ValueError(f"{file}, line {place}: no answer of a bisection ({why}); remove the file") from e
        if answer.number >= count:
            raise ValueError(f"{file}, line {place}: candidate {answer.number} of {count}; remove the file")
        found.append(answer)
    return found


def digest(points: Sequence[Point], series: str, options: Sequence[str]) -> str:
    """Return what tells a bisection from others."""
    words = [series, *options, *(point.identity for point in points)]
    return hashlib.sha256(msgspec.json.encode(words)).hexdigest()[:12]


def of_commits(good: str, bad: str) -> list[Point]:
    """Return the commits from ``good`` to ``bad`` along first parents.  Errors: NoCommit, ValueError."""
    top = commits.repository(Path.cwd())
    return [Point(f"{commit[:12]} {subject}", commit=commit) for commit, subject in commits.between(top, good, bad)]


def bisected(measuring: Measuring) -> tuple[PerfBisection, bool]:
    """Ask until the first slower candidate is known, or the time is used up.  Errors: OSError, KeyboardInterrupt.

    Returns the result, and whether the time was used up.
    """
    belief, late = measuring.belief(), False
    last = len(measuring.points) - 1
    typer.echo(_plan(measuring, belief))

    def answer(number: int) -> tuple[bool, float] | None:
        nonlocal late
        if measuring.seconds >= 60 * measuring.minutes:
            late = True
            return None
        typer.echo(f"--- {one_line(measuring.points[number].name)}")
        said = measuring.ask(number)
        if said.bad is None:
            typer.echo(f"--- {one_line(line_of(said))}: tried once more")
            said = measuring.ask(number)
        if said.bad is None:
            belief.skipped.add(number)
        typer.echo(f"--- {one_line(line_of(said))}")
        if said.bad is None:
            return None
        after = belief.copy()
        after.tell(number, said.bad, said.error)
        typer.echo(f"--- {_known(measuring, after)}")
        return said.bad, said.error

    search(belief, answer, first=last if last not in belief.asked else None)
    return _result(measuring, belief), late


def line_of(answer: Answer) -> str:
    """Describe an answer on a line."""
    if answer.bad is None:
        return f"{answer.candidate}: skipped: {answer.why}"
    sides = (
        f" ({100 * (answer.low - 1):+.1f} to {100 * (answer.high - 1):+.1f} %)" if answer.low and answer.high else ""
    )
    size = f", {100 * (answer.ratio - 1):+.1f} %{sides}" if answer.ratio else ""
    by = "" if answer.verdict != UNDECIDED else ", by its estimate"
    return f"{answer.candidate}: {'slower' if answer.bad else 'not slower'}{by}{size}"


def _plan(measuring: Measuring, belief: Belief) -> str:
    usual, most = foretold(belief)
    before = f"{len(measuring.answers)} duets are kept; " if measuring.answers else ""
    left = max(0.0, measuring.minutes - measuring.seconds / 60)
    return (
        f"{len(measuring.points)} candidates; {before}about {usual} duets to do (in nine of ten cases at most {most}), "
        f"of at most {measuring.each:g} min each, {left:.1f} min in all: {measuring.folder}"
    )


def _known(measuring: Measuring, belief: Belief) -> str:
    places, chance = belief.best()
    usual, most = foretold(belief)
    asked = [one for one in measuring.answers if one.bad is not None]
    each = sum(one.seconds for one in asked) / len(asked) / 60 if asked else measuring.each
    named = _named(measuring.points, places)
    if chance >= SURE:
        return f"{named}: {chance:.1%}"
    return f"likeliest: {named}, {chance:.0%}; about {usual} more duets (at most {most}), {usual * each:.1f} min"


def _named(points: Sequence[Point], places: range) -> str:
    names = [one_line(points[place].name) for place in places if place < len(points)]
    if not names:
        return "none is slower"
    return names[0] if len(names) == 1 else f"one of {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"


def _result(measuring: Measuring, belief: Belief) -> PerfBisection:
    places, chance = belief.best()
    points, count = measuring.points, len(measuring.points)
    sure = chance >= SURE and list(places) != [count]
    names = [points[place].name for place in places if place < count]
    suspects = names if sure else [points[place].name for place in belief.suspects() if place < count]
    return PerfBisection(
        series=measuring.series,
        candidates=[point.name for point in points],
        first_slower=names[0] if sure and len(names) == 1 and count not in places else "",
        probability=chance,
        suspects=suspects,
        none=belief.chances[count],
        answers=list(measuring.answers),
        seconds=measuring.seconds,
    )
