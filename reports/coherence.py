"""The check of a run's raw results for consistency: records, counts, times, exit status, worlds, dtypes."""

from __future__ import annotations

import datetime
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.requirements import stack_of
from harness.results import (
    BAD,
    ENDED_BADLY,
    UNSUPPORTED,
    VERDICTS,
    MaybeLeftOut,
    NotCollected,
    Run,
    RunEnd,
    TestResult,
)
from reports.arguments import Asked
from reports.text import moment, plural

INTRODUCED = {
    2: "2026-11-21",
    3: "2026-11-22",
    4: "2026-11-22",
    5: "2026-11-23",
    6: "2026-11-23",
    7: "2026-11-24",
    8: "2026-11-25",
    9: "2026-11-25",
    10: "2026-11-25",
}
"""The day (UTC) on which Concord first wrote each version of results; no run with that version is older."""
SLACK = 5.0
"""Seconds by which clocks of processes may disagree, rounding included."""
_SHOWN = 3
_LONGEST = 200
"""Characters of a text that a message repeats."""
_INTERRUPTED, _BROKEN, _NOTHING_RUN = 2, 3, 5
_STATUSES = range(6)
"""The exit statuses of pytest."""
_SIZE = re.compile(r"\[(\d+)ranks?[\]-]")
_SEVERAL = re.compile(r"\[worlds[\]-]")


class _Line(msgspec.Struct):
    """The fields of a record that show its place among the others."""

    record: str = ""
    nodeid: str = ""
    finished: float = 0.0


def run_problems(run: Run, data: bytes, asked: Asked, now: float) -> Iterator[str]:
    """Find contradictions within a run.

    ``data``: the content of its file; ``asked``: what its command line asked for; ``now``: seconds since the epoch.
    """
    if run.header.version < 2:
        yield f"version {run.header.version} of results stores too little for a check"
        return
    if run.torn or not run.complete:
        yield "the run was cut off before its end"
    if run.damaged:
        yield run.damaged
    elif run.end is not None and not run.end.digest:
        yield "its last line has no digest"
    lines = _lines(data)
    yield from _tests(run, asked)
    yield from _counts(run)
    yield from _times(run, [line for line in lines if line.record == "test"], asked, now)


def ended_as_it_says(run: Run, stale: Iterable[str]) -> Iterator[str]:
    """Find contradictions between pytest's exit status and the verdicts.

    ``stale``: reasons why waivers make the run fail.
    """
    status, reasons = run.exit_status, list(stale)
    if run.end is None or status is None:
        return
    counts = run.counts()
    bad = [verdict for verdict in BAD if counts.get(verdict)]
    if status not in _STATUSES:
        yield f"its exit status is {status}, which pytest does not have"
    elif status == 0 and bad:
        yield "tests ended badly, but by its exit status none did"
    elif status == 0 and reasons:
        yield f"its exit status is 0, but a stale waiver makes a run fail: {reasons[0]}"
    elif status == 1 and not (bad or reasons or run.end.lost or _may_lack_files(run.end)):
        yield "its exit status says that tests ended badly, but none did"
    elif status == _NOTHING_RUN and run.tests:
        yield "its exit status says that there was no test, but there are tests"


def _may_lack_files(end: RunEnd) -> bool:
    """Whether a file could not be collected, which makes a run fail, or the run does not know."""
    return any(isinstance(each, (NotCollected, MaybeLeftOut)) for each in end.left_out)


def listed(what: str, names: Iterable[str]) -> str:
    """Describe a problem that some tests have, with the names of the first of them."""
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{what}: {', '.join(every[:_SHOWN])}{more}"


def _lines(data: bytes) -> list[_Line]:
    """Return every record of a file, even those that a reader does not keep."""
    decoder = msgspec.json.Decoder(_Line)
    records = []
    for line in data.split(b"\n"):
        if line.strip():
            try:
                records.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # torn: already reported
                continue
    return records


def _tests(run: Run, asked: Asked) -> Iterator[str]:
    stopped = asked.stops_early or run.exit_status in (_INTERRUPTED, _BROKEN)
    missing = [n for n in run.collected if never_begun(run.tests[n])]
    if missing and run.complete and not stopped:
        yield listed("tests were collected but have no result", missing)
    stray = [nodeid for nodeid in run.tests if nodeid not in run.collected]
    if stray:
        yield listed("tests have a result but were never collected", stray)
    for test in run.records():
        yield from (f"{test.nodeid}: {why}" for why in _contradictions(test))
    unknown = sorted({r for test in run.tests.values() for r in test.requirements} - set(run.requirements))
    if unknown:
        yield f"the run has no sentence for the requirements {', '.join(unknown[:_SHOWN])}"
    proven = {r for test in run.tests.values() for r in test.requirements}
    idle = sorted(set(run.requirements) - proven)
    if idle:
        yield f"no test of the run proves the requirements {', '.join(idle[:_SHOWN])}"


def never_begun(test: TestResult) -> bool:
    """Whether nothing is known about a test except that it was collected."""
    return test == TestResult(nodeid=test.nodeid, verdict="not-run", stack=test.stack)


def _contradictions(test: TestResult) -> Iterator[str]:
    if test.verdict not in VERDICTS or test.verdict == "flaky":  # several attempts can be flaky, but not a single one
        yield f"{test.verdict!r} is not a verdict of an attempt"
    if test.stack != stack_of(test.nodeid):
        yield f"its stack is {test.stack!r}, but by its name it is {stack_of(test.nodeid)!r}"
    evidence = test.headline or test.ranks or test.waiver or test.bare or test.text or test.reproducer
    if test.verdict in ("passed", "unsupported", "not-run") and evidence:
        yield f"is {test.verdict} but has the evidence of a failure"
    if test.verdict == "passed" and test.reason:
        yield "is passed but has a reason"
    if test.verdict == "unsupported" and not test.reason.startswith(UNSUPPORTED):
        yield "is unsupported without a reason"
    if test.verdict == "not-run" and test.reason.startswith(UNSUPPORTED):
        yield "is not-run but has the reason of an unsupported test"
    if test.cause is not None and test.verdict != "unsupported":
        yield f"is {test.verdict} but has the cause of an unsupported test: {str(test.cause)[:_LONGEST]}"
    if test.cause is not None and test.reason != f"{UNSUPPORTED}{test.cause}":
        given = test.reason.removeprefix(UNSUPPORTED)[:_LONGEST]
        yield f"its reason is {given!r}, but by its cause it is {str(test.cause)[:_LONGEST]!r}"
    if test.verdict == "waived" and not (test.waiver and test.bare in ENDED_BADLY):
        yield "is waived without its waiver and original verdict"
    if test.verdict != "waived" and (test.waiver or test.bare):
        yield f"is {test.verdict} but has a waiver or an original verdict"
    if test.cases is not None and not (test.property_based and test.verdict == "passed"):
        yield "has the cases of a property-based test that passed"
    yield from _world(test)


def _drawn_smaller(test: TestResult, ranks: int) -> bool:
    """Return whether the test draws its worlds, and had none of its largest size."""
    return _SEVERAL.search(test.nodeid) is not None and 0 < ranks < test.size


def _world(test: TestResult) -> Iterator[str]:
    parameters = test.nodeid.partition("[")[2]
    named = _SIZE.search(test.nodeid)
    world = test.world
    told = not (never_begun(test) or test.verdict == "crashed")  # a process that died did not report its world
    if named and len(named[1]) < 10 and int(named[1]) != test.size and (test.size or told):
        yield f"its size is {test.size}, but its name says {named[1]} ranks"
    if test.dtype and test.dtype not in parameters:
        yield f"its dtype is {test.dtype}, but its name does not say so"
    if world is not None and world.ranks != test.size and (test.size or told) and not _drawn_smaller(test, world.ranks):
        yield f"its size is {test.size}, but its world has {world.ranks} ranks"
    elif test.size and world is None and test.verdict == "passed":
        yield f"passed on {test.size} ranks, but has no world"
    elif not 0 <= test.size < 1 << 20:
        yield f"its size is {test.size}"
    if world is not None and world.hosts > max(1, world.ranks):
        yield f"its world of {plural(world.ranks, 'rank')} is on {world.hosts} hosts"
    sizes = world.sizes if world is not None else ()
    if world is not None and sizes and (sizes[-1] != world.ranks or list(sizes) != sorted({*sizes}) or sizes[0] < 1):
        yield f"its largest world has {world.ranks} ranks, but it drew from worlds of {', '.join(map(str, sizes))}"
    if sizes and not _SEVERAL.search(test.nodeid):
        yield "drew from several worlds, but by its name it has one"


def _counts(run: Run) -> Iterator[str]:
    if run.end is None:
        return
    counts = {verdict: count for verdict, count in run.counts().items() if count}
    if counts != run.end.counts:
        yield f"its last line counts {_shown(run.end.counts)}, but its tests are {_shown(counts)}"
    both = sorted(set(run.end.whole) - {test.stack for test in run.tests.values()})
    if both:
        yield f"its last line says that it ran all of {', '.join(both[:_SHOWN])}, but it has no test of that"


def _times(run: Run, lines: list[_Line], asked: Asked, now: float) -> Iterator[str]:
    started = run.header.started
    ended = run.end.finished if run.end is not None else now
    numbers = [started, ended, *(n for test in run.records() for n in (test.seconds, test.finished))]
    if not all(map(math.isfinite, numbers)):
        yield "a time is not a number"
        return
    if started > now + SLACK or ended > now + SLACK:
        yield "it ran in the future"
    day = INTRODUCED.get(run.header.version, "")
    if day and started < datetime.datetime.fromisoformat(f"{day}T00:00+00:00").timestamp():
        when = moment(started) or "the first day of 1970"
        yield f"it began on {when}, but version {run.header.version} of results is not older than {day}"
    if ended < started:
        yield "it ended before it began"
    if any(test.seconds < 0 for test in run.records()):
        yield "the time of a test is negative"
    outside = [
        test.nodeid
        for test in run.records()
        if not never_begun(test)
        and not started - SLACK <= test.finished - test.seconds <= test.finished <= ended + SLACK
    ]
    if outside:
        yield listed("tests ran outside the time of the run", outside)
    latest = itertools.accumulate((line.finished for line in lines), max)
    back = [line.nodeid for line, so_far in zip(lines, latest, strict=True) if line.finished < so_far - SLACK]
    if back:
        yield listed("tests whose results are not in the order in which they ended", back)
    if asked.workers in ("", "0") or asked.workers.isdecimal():
        together = sum(test.seconds for test in run.records())
        most = max(1, int(asked.workers or 1)) * (ended - started) if len(asked.workers) < 5 else math.inf
        if together > most + SLACK:
            yield f"its tests took {together:.0f} s in total, but its processes had {max(most, 0.0):.0f} s"


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "nothing"
