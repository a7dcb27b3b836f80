"""The data of a report, which is versioned and stored as JSON with a schema (docs/reports.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from harness.results import NOT_REACHED, VERDICTS, CaseOf, RankEvidence, Reproducer
from harness.safe_io.untrusted import Allowance, Count, Moment, Ranks, Refused, Seconds, Status, json_checked, said
from harness.safe_io.untrusted import Version as VersionNumber

SCHEMA = "concord.report"
VERSION = 2
"""Since version 2, a level has three answers, and reasons of two kinds (docs/reports.md)."""

CONFORMANT, NOT_CONFORMANT, NOT_SHOWN = ANSWERS = ("conformant", "not conformant", "not shown")
"""The answers for a level.  ``not conformant``: something is wrong.  ``not shown``: nothing is wrong, but something is
missing, such as a seed, a world size or a run."""

PYTORCH = "pytorch"
"""The owner of the known defects that are no fault of a backend's vendor."""

UNDECLARED = "undeclared"
"""The verdict of a test that was not run because the profile does not claim what it tests.  Results call it
``unsupported``, with the cause :class:`~harness.results.NotClaimed`."""

ORDER = ("crashed", "hung", "failed", "flaky", "not-run", "waived", "passed", UNDECLARED, "unsupported")
"""Every verdict of a report, worst first.  Verdicts of tests that did not have to run are last, because any other
verdict outweighs them."""

assert set(ORDER) == {*VERDICTS, UNDECLARED}


class ReportError(ValueError):
    """The error for input that is not a report, or from which none can be made; it says what is wrong and where."""


class RunReport(msgspec.Struct, kw_only=True):
    """One of the runs from which a report is made."""

    name: str
    sha256: str
    """The SHA-256 of its results file."""
    started: Moment
    """Seconds since the epoch."""
    finished: Moment
    """Seconds since the epoch; 0 if the run was cut off."""
    complete: bool
    seed: str
    seed_drawn: bool
    exit_status: Status | None
    arguments: list[str]
    effort: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    faults: list[str]
    whole: list[str]
    """The stacks of which every test was collected."""
    partial: list[str]
    """The reasons why other stacks are not whole, one sentence each."""
    counts: dict[str, Count]
    foreign: dict[str, str] = {}
    """Plug-ins that are neither pytest's nor Concord's, with their origin (:func:`harness.results.foreign`)."""


class WaiverReport(msgspec.Struct, kw_only=True):
    """A waiver of the profile that was used, and the tests that it waived."""

    place: str
    reason: str
    link: str
    expires: str
    intermittent: bool
    tests: list[str]
    owner: str = ""
    """The owner of the defect, such as ``pytorch``, or the profile's name; empty if the results do not say it."""
    defect: str = ""
    """The id of the defect among those of its owner; empty for a waiver of the profile."""

    @property
    def of_pytorch(self) -> bool:
        """Whether it is about a known defect of PyTorch's own; a waiver of a profile never is, whatever its name."""
        return self.owner == PYTORCH and bool(self.defect)

    @property
    def named(self) -> str:
        """The owner, with the id of the defect if it has one."""
        return f"{self.owner}/{self.defect}" if self.defect else self.owner


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
    """A test: its worst verdict in any run, with that run's evidence."""

    __test__ = False

    nodeid: str
    verdict: str
    verdicts: list[str]
    """The verdict of each run, in the order of the runs; empty for a run without the test."""
    stack: str = ""
    requirements: list[str] = []
    world: str = ""
    size: Ranks = 0
    sizes: list[Ranks] = []
    """The sizes of worlds from which it drew, if it draws them; of the run whose largest was the smallest."""
    dtype: str = ""
    seconds: Seconds = 0.0
    """The time that the test took in the run with the worst verdict."""
    reason: str = ""
    headline: str = ""
    waiver: str = ""
    owner: str = ""
    """The owner of the defect for which it is waived, as in :class:`WaiverReport`."""
    defect: str = ""
    bare: str = ""
    run: Count = 0
    """The index, from 0, of the run with the worst verdict, which has this evidence."""
    ranks: list[RankEvidence] = []
    text: str = ""
    reproducer: Reproducer | None = None
    attempts: list[AttemptReport] = []
    """Every attempt in that run, in order, if there were several."""

    @property
    def of_pytorch(self) -> bool:
        """Whether it is waived for a known defect of PyTorch's own."""
        return self.owner == PYTORCH and bool(self.defect)

    @property
    def most_ranks(self) -> int:
        """The size of the largest world that it had, if it draws them; of others, the size that they ask for."""
        return max(self.sizes, default=self.size)


class RequirementReport(msgspec.Struct, kw_only=True):
    """A requirement, and the worst verdict of its tests."""

    id: str
    sentence: str
    source: str
    level: str
    mandatory: bool
    verdict: str
    counts: dict[str, Count]
    """The number of its tests with each verdict."""
    tests: list[str]


class LevelReport(msgspec.Struct, kw_only=True):
    """A level: whether the backend is conformant at it, and every reason why not."""

    id: str
    stack: str
    answer: str = ""
    """One of :data:`ANSWERS`."""
    conformant: bool = False
    """Whether the answer is that it is."""
    partial: str = ""
    """The name of what is shown instead, such as ``L1 on one rank: partial``, if nothing is wrong and all was run, but
    it falls short of the level's minimum."""
    reds: list[str] = []
    """What is wrong, in sentences; empty unless the answer is ``not conformant``."""
    missing: list[str] = []
    """What is missing, in sentences."""
    requirements: dict[str, Count]
    """The number of its requirements with each verdict."""
    tests: dict[str, Count]
    """The number of its stack's tests with each verdict."""
    waived_of_pytorch: Count = 0
    """The number of its mandatory requirements with a test that is waived for a defect of PyTorch's own."""
    waived_of_others: Count = 0
    """The same for other defects: of the backend, of a package, or those that the profile declares."""
    may_be_waived: Count = 0
    """The largest number of the latter."""
    drawn: dict[str, Count] = {}
    """The number of its stack's tests that drew from worlds of each size, smallest first."""
    notes: list[str] = []
    """What a reader should know of it, conformant or not: whether its tests drew from smaller worlds than they ask for,
    in sentences."""

    def __post_init__(self) -> None:
        if not self.answer:  # a report of version 1, which knows two answers
            self.answer = CONFORMANT if self.conformant else NOT_CONFORMANT
        self.conformant = self.answer == CONFORMANT

    @property
    def why_not(self) -> list[str]:
        """Every reason why it is not conformant: what is wrong, then what is missing."""
        return [*self.reds, *self.missing]


class Step(msgspec.Struct, kw_only=True):
    """Something that is missing, and can be done."""

    do: str
    """A sentence."""
    command: str
    """The command, quoted for a shell; empty if it is not a command that is missing."""


CASE_ORDER = ("crashed", "hung", "failed", "waived", "passed", NOT_REACHED, UNDECLARED)
"""Every verdict of a case, worst first.  One that a test did not reach may be passed in another test."""


class CaseReport(msgspec.Struct, kw_only=True):
    """A case in worlds of a size: what all tests of all runs that tried it found."""

    case: CaseOf
    size: Ranks
    verdict: str
    """One of :data:`CASE_ORDER`.  A case that is wrong in a waived test is ``waived``."""
    count: Count = 0
    """How often it was executed, with other shapes, roots or data."""
    tests: list[Count] = []
    """The positions of its tests among the report's; those with the worst verdict first."""

    @property
    def words(self) -> tuple[str, ...]:
        """Its kind and the fields of the case."""
        return (type(self.case).__name__, *msgspec.structs.astuple(self.case))


class Cell(msgspec.Struct, kw_only=True):
    """The verdicts of the tests of a stack, dtype and world size."""

    stack: str
    dtype: str
    """Empty for tests with several dtypes or none."""
    size: Ranks
    """The world size; of tests that draw it, the largest that they had; 0 for tests without a world."""
    counts: dict[str, Count]


class Report(msgspec.Struct, kw_only=True):
    """A report on one or several runs on one backend."""

    schema: str = SCHEMA
    version: VersionNumber = VERSION
    concord: str
    made: Moment
    """The time when the last of its runs ended, so that the same runs always make the same report."""
    profile: str
    profile_hash: str
    backend: str
    device: str
    about: str
    never_run: bool = False
    """Whether the profile's author has never run it on such a device, so that it rests on documentation alone."""
    claims: dict[str, str]
    subject: str
    suite_hash: str
    environment: dict[str, str]
    conformant: str
    """The highest of L1 to L5 at which the backend is conformant; empty if there is none."""
    levels_version: Count = 0
    """The version of the minimums by which levels are judged (:mod:`reports.minimums`); 0 in older reports."""
    steps: list[Step] = []
    """What to do next so that levels that are not shown are; empty if there is nothing to do, or nothing that helps."""
    problems: list[str]
    """Problems of the runs as a whole.  If there are any, no level is conformant."""
    levels: list[LevelReport]
    counts: dict[str, Count]
    runs: list[RunReport]
    waivers: list[WaiverReport]
    owners: dict[str, Count] = {}
    """The number of waived tests by the owner of the defect; empty if the results do not say it."""
    requirements: list[RequirementReport]
    tests: list[TestReport]
    matrix: list[Cell]
    cases: list[CaseReport] = []
    """The cases that tests tried; results before version 9 do not say it."""

    @property
    def foreign(self) -> dict[str, str]:
        """The plug-ins of any run that are neither pytest's nor Concord's, with their origin."""
        return {name: where for run in self.runs for name, where in run.foreign.items()}


def worst(verdicts: list[str]) -> str:
    """Return the worst of several verdicts; ``not-run`` if there are none."""
    return min(verdicts, key=ORDER.index, default="not-run")


def counted(verdicts: list[str]) -> dict[str, int]:
    """Count each verdict, worst first; verdicts that do not occur are left out."""
    return {verdict: count for verdict in ORDER if (count := verdicts.count(verdict))}


def encode(report: Report) -> bytes:
    """Encode a report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decode(data: bytes, name: str, allowance: Allowance | None = None) -> Report:
    """Decode a report.

    ``name``: its name in messages; ``allowance``: how much of it may be read.
    Errors: :class:`ReportError` if it is not a report, has a newer version, or exceeds the allowance.
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
    """Return the JSON Schema of a report."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Report)), indent=2) + b"\n"
