"""What a report says, as data: versioned, written as JSON, with a schema (docs/reports.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from harness.results import VERDICTS, RankEvidence, Reproducer
from harness.safe_io.untrusted import Allowance, Count, Moment, Ranks, Refused, Seconds, Status, json_checked, said
from harness.safe_io.untrusted import Version as VersionNumber

SCHEMA = "concord.report"
VERSION = 1

UNDECLARED = "undeclared"
"""Verdict of a test that was not run because the profile does not claim what it is about; results call it
``unsupported``, with a reason that says so."""

ORDER = ("crashed", "hung", "failed", "flaky", "not-run", "waived", "passed", UNDECLARED, "unsupported")
"""Every verdict of a report, worst first.  What was not asked for is last: it says nothing beside what was run."""

FINE = ("waived", "passed", "unsupported")
"""Verdicts of a requirement that a level can have and be conformant."""

assert set(ORDER) == {*VERDICTS, UNDECLARED}


class ReportError(ValueError):
    """Something that no report can be made of, or that is no report; says what and where."""


class RunReport(msgspec.Struct, kw_only=True):
    """One of the runs that a report is made of."""

    name: str
    sha256: str
    """Of its results file."""
    started: Moment
    """Seconds since the epoch."""
    finished: Moment
    """0 if it was cut off."""
    complete: bool
    seed: str
    seed_drawn: bool
    exit_status: Status | None
    arguments: list[str]
    effort: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    faults: list[str]
    whole: list[str]
    """Stacks of which every test was collected."""
    partial: list[str]
    counts: dict[str, Count]
    foreign: dict[str, str] = {}
    """Plug-ins that are neither pytest's nor Concord's, and where they are from (:func:`harness.results.foreign`)."""


class WaiverReport(msgspec.Struct, kw_only=True):
    """A waiver of the profile that was used, and for what."""

    place: str
    reason: str
    link: str
    expires: str
    intermittent: bool
    tests: list[str]


class AttemptReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of several attempts at a test, with its evidence."""

    verdict: str
    seconds: float = 0.0
    reason: str = ""
    headline: str = ""
    ranks: list[RankEvidence] = []
    text: str = ""
    reproducer: Reproducer | None = None


class TestReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A test: the worst that any run says of it."""

    __test__ = False

    nodeid: str
    verdict: str
    verdicts: list[str]
    """Of each run, in their order; empty where it has none."""
    stack: str = ""
    requirements: list[str] = []
    world: str = ""
    size: Ranks = 0
    dtype: str = ""
    seconds: Seconds = 0.0
    """In the run that says the worst."""
    reason: str = ""
    headline: str = ""
    waiver: str = ""
    bare: str = ""
    run: Count = 0
    """From 0: the run that says the worst, and whose evidence this is."""
    ranks: list[RankEvidence] = []
    text: str = ""
    reproducer: Reproducer | None = None
    attempts: list[AttemptReport] = []
    """Every attempt in that run, in order, if there were several."""


class RequirementReport(msgspec.Struct, kw_only=True):
    """A requirement, and what its tests come to together."""

    id: str
    sentence: str
    source: str
    level: str
    mandatory: bool
    verdict: str
    counts: dict[str, Count]
    """Of its tests, by verdict."""
    tests: list[str]


class LevelReport(msgspec.Struct, kw_only=True):
    """A level: whether the backend is conformant at it, and every reason why not."""

    id: str
    stack: str
    conformant: bool
    why_not: list[str]
    requirements: dict[str, Count]
    """How many of its requirements came to each verdict."""
    tests: dict[str, Count]
    """How many tests of its stack came to each verdict."""


class Cell(msgspec.Struct, kw_only=True):
    """What the tests of a stack, dtype and world size came to."""

    stack: str
    dtype: str
    """Empty: tests that are about several, or about none."""
    size: Ranks
    """0: tests without a world."""
    counts: dict[str, Count]


class Report(msgspec.Struct, kw_only=True):
    """A report, made of one or several runs on one backend."""

    schema: str = SCHEMA
    version: VersionNumber = VERSION
    concord: str
    made: Moment
    """When the last of its runs ended: the same runs always make the same report."""
    profile: str
    profile_hash: str
    backend: str
    device: str
    about: str
    claims: dict[str, str]
    subject: str
    suite_hash: str
    environment: dict[str, str]
    conformant: str
    """The highest of L1 to L5 at which it is conformant; empty if there is none."""
    problems: list[str]
    """What is wrong with the runs as a whole; no level is conformant then."""
    levels: list[LevelReport]
    counts: dict[str, Count]
    runs: list[RunReport]
    waivers: list[WaiverReport]
    requirements: list[RequirementReport]
    tests: list[TestReport]
    matrix: list[Cell]


def worst(verdicts: list[str]) -> str:
    """The verdict that several come to together: ``not-run`` if there are none."""
    return min(verdicts, key=ORDER.index, default="not-run")


def counted(verdicts: list[str]) -> dict[str, int]:
    """How many came to each verdict, worst first; those that nothing came to are left out."""
    return {verdict: count for verdict in ORDER if (count := verdicts.count(verdict))}


def encode(report: Report) -> bytes:
    """A report as JSON, laid out for people."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decode(data: bytes, name: str, allowance: Allowance | None = None) -> Report:
    """Read a report.

    ``name``: what messages call it; ``allowance``: what may be read of it.  Errors: :class:`ReportError`.
    """
    try:
        head = msgspec.json.decode(json_checked(data, allowance), type=_Head)
        if head.schema != SCHEMA:
            raise ReportError(f"{name}: not a report of Concord")
        if head.version > VERSION:
            raise ReportError(f"{name}: version {head.version}, and this Concord reads up to {VERSION}; update it")
        return msgspec.json.decode(data, type=Report)
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ReportError(f"{name}: not a report of Concord: {said(e)}") from None


class _Head(msgspec.Struct):
    schema: str
    version: VersionNumber


def json_schema() -> bytes:
    """The JSON Schema of a report."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Report)), indent=2) + b"\n"
