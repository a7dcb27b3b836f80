"""Verdicts and evidence on disk: one JSON object a line, appended as tests end, so that a crash loses nothing.

The first line describes the run, each later one a test, and the last says that the run came to its end; a file
without that last line is a run that was cut off.  :data:`VERSION` counts up whenever a reader must change.

Version 2 has what a report needs: requirements, the profile's text and waivers, seed, suite hash, what was left out,
and a digest of the file in its last line.  Files of version 1 are read; they have none of it.

From version 4 on each attempt of a test is a record (:attr:`TestResult.attempt`): a plug-in that runs a failed test
again can't make it a passed one.  Readers merge them (:func:`merged`).  It says how the run was made as well: plug-ins
and files that were loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness.provenance import environment
from harness.redaction import current, redacted_arguments
from harness.safe_io.untrusted import Allowance, Count, Moment, Ranks, Refused, Seconds, Status, said
from harness.safe_io.untrusted import Version as VersionNumber
from harness.safe_io.writing import append_or_nothing, open_new

SCHEMA = "concord.results"
VERSION = 4

VERDICTS = ("passed", "failed", "crashed", "hung", "flaky", "unsupported", "waived", "not-run")
"""What a test can come to.  ``unsupported``: the profile does not claim it; ``not-run``: nobody looked; ``flaky``: an
attempt of it ended badly, and the last one did not, so no single attempt comes to it."""

ENDED_BADLY = ("failed", "crashed", "hung")
"""Bad verdicts of an attempt: what a waiver can cover."""
BAD = (*ENDED_BADLY, "flaky")
"""Bad verdicts of a test; none of them is a pass."""
_SAYS_NOTHING = ("not-run", "unsupported")
"""Verdicts of an attempt that tell nothing beside those of others."""

UNSUPPORTED = "unsupported: "
"""How the reason of a skip begins that is one of the backend, the profile or the machine."""
NOT_CLAIMED = "unsupported: not claimed: "
"""How it begins where nobody knows whether the backend could do it: the profile does not say that it does."""

LEVELS = {
    "L1": "collectives",
    "L2": "replicate",
    "L3": "replicate_fsdp",
    "L4": "tp_extension",
    "L5": "dynamo",
    "P": "perf",
}
"""Levels of conformance, each with its stack; one of L1 to L5 stands on those before it."""

DEFAULT_SEED = "default"
"""The seed of a run whose properties draw what their own text decides, the same in every run."""
FREE_SEED = "free"
"""The seed of a run in which Hypothesis draws as it likes."""


_KNOWN = ("concord-harness", "hypothesis", "pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist")
"""Distributions whose pytest plug-ins are a part of every run."""
OWN_CONFTEST = ("a6fcb8a3173d922917c8c20b208740fb1520063a46e499434d6e01afacc4bf98",)
"""SHA-256 of the ``conftest.py`` beside the suites, which loads Concord's plug-in and nothing else."""


def foreign(plugins: Mapping[str, str], suite: Collection[str] | None = None) -> dict[str, str]:
    """The plug-ins that are neither pytest's, nor of what Concord stands on, nor of the suites.

    ``plugins``: as in :class:`RunHeader`; ``suite``: SHA-256 of each file of the suite, where they are known; else a
    ``conftest.py`` of the suites is one by its name.  A plug-in can turn any verdict into any other.
    """

    def is_ours(name: str, where: str) -> bool:
        if suite is None and name.startswith("suites/") and name.endswith("/conftest.py"):
            return True
        own = {*OWN_CONFTEST, *(suite or ())}
        return all(each.split(" ")[0] in _KNOWN or each in own for each in where.split(", "))

    return {name: where for name, where in plugins.items() if not is_ours(name, where)}


class RunHeader(msgspec.Struct, tag="run", tag_field="record", kw_only=True):
    """The first line: what ran, where, on what."""

    schema: str = SCHEMA
    version: VersionNumber = VERSION
    started: Moment
    """Seconds since the epoch."""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    subject: str = "torch"
    """Whose implementation of the stacks ran (:mod:`harness.subjects`)."""
    profile: str = ""
    """Name of the profile that the run goes by."""
    profile_hash: str = ""
    """SHA-256 of its text."""
    concord: str = ""
    """Version of Concord."""
    suite_hash: str = ""
    """SHA-256 over the suite (:func:`harness.provenance.suite_hash`)."""
    seed: str = ""
    """What properties draw from: :data:`DEFAULT_SEED`, a number, :data:`FREE_SEED`; empty: nobody has said."""
    seed_drawn: bool = False
    """Whether that number was drawn for this run, and not chosen by anyone."""
    effort: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 1.0
    """How many examples properties have, as a share of what suites say (``CONCORD_EXAMPLES``)."""
    faults: list[str] = []
    """Defects that were put into ranks on purpose."""
    plugins: dict[str, str] = {}
    """Each pytest plug-in loaded when the first test was about to run: its name, and where it is from: the distribution
    and its version, or the SHA-256 of a file that belongs to no distribution (:mod:`harness.plugin.loaded`)."""


class Collected(msgspec.Struct, tag="collected", tag_field="record"):
    """The tests that were to run."""

    tests: list[str]


class WaiverEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A waiver of the profile, or (``intermittent``) what a test comes to now and then."""

    place: str
    """``file:line``."""
    tests: list[str]
    reason: str
    link: str
    expires: str
    """The last day on which it counts, as in 2027-06-30."""
    verdicts: list[str]
    intermittent: bool = False
    applies: bool = True
    """Whether it is about the torch and the subject of this run."""


class ProfileText(msgspec.Struct, tag="profile", tag_field="record", kw_only=True):
    """The profile that the run goes by, whole."""

    name: str
    file: str
    """What messages call it: a key of ``texts``."""
    texts: dict[str, str]
    """Of its file and of those that it stands on."""
    backend: str = ""
    device: str = ""
    about: str = ""
    claims: dict[str, str] = {}
    """What it claims, for people: what, and how much of it."""
    waivers: list[WaiverEntry] = []


class RequirementText(msgspec.Struct, tag="requirement", tag_field="record", kw_only=True, omit_defaults=True):
    """A requirement that a test of this run proves."""

    id: str
    sentence: str
    source: str = ""
    level: str = ""
    """Of :data:`LEVELS`."""
    mandatory: bool = True


class RankEvidence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rank of a failed world said."""

    rank: Ranks
    kind: str
    what: str = ""
    first: bool = False
    text: str = ""
    stack: str = ""
    collectives: list[str] = []
    output: str = ""


class Reproducer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file that shows a failure with torch alone."""

    file: str
    command: str
    text: str = ""
    """Of the file; empty where it is too long."""


class TestResult(msgspec.Struct, tag="test", tag_field="record", kw_only=True, omit_defaults=True):
    """One test's verdict, with its evidence if it is a bad one."""

    __test__ = False

    nodeid: str
    verdict: str
    attempt: int = 1
    """Which run of the test this is, from 1: other plug-ins may run one that failed again."""
    stack: str = ""
    requirements: list[str] = []
    world: str = ""
    seconds: Seconds = 0.0
    """How long it took, without what it waited for devices."""
    waited: Seconds = 0.0
    """Seconds for which it waited for devices that other tests and sessions held."""
    reason: str = ""
    headline: str = ""
    ranks: list[RankEvidence] = []
    size: Ranks = 0
    """How many ranks its world has, at most; 0: it has none."""
    dtype: str = ""
    """The dtype that it is about, if it is one."""
    bare: str = ""
    """What a waived test came to: ``failed``, ``crashed`` or ``hung``."""
    waiver: str = ""
    """The place of the waiver that was used."""
    property_based: bool = False
    """Whether it draws its examples from the run's seed; nobody has said so before version 3."""
    finished: Moment = 0.0
    """Seconds since the epoch."""
    text: str = ""
    """What pytest showed of a failure that is not one of ranks."""
    reproducer: Reproducer | None = None

    @property
    def undeclared(self) -> bool:
        """Whether it was not run because the profile does not claim what it is about."""
        return self.verdict == "unsupported" and self.reason.startswith(NOT_CLAIMED)


class RunEnd(msgspec.Struct, tag="end", tag_field="record"):
    """The last line of a run that came to its end."""

    finished: Moment
    exit_status: Status
    profile: str = ""
    """As in :class:`RunHeader`, where it is only known now which one fits; a reader puts it there."""
    profile_hash: str = ""
    environment: dict[str, str] = {}
    """What was found out while tests ran; a reader puts it to the header's."""
    whole: list[str] = []
    """Stacks of which every test was collected."""
    partial: list[str] = []
    """Why others were not: a sentence each."""
    lost: list[str] = []
    """What else the run was to write and could not, which fails it: a file and the reason each."""
    counts: dict[str, Count] = {}
    """How many tests came to each verdict."""
    plugins: dict[str, str] = {}
    """As in :class:`RunHeader`, of every process of the run, at its end."""
    files: dict[str, str] = {}
    """SHA-256 of every file of harness, suites and fixtures that a process of the run has loaded, by the name that the
    suite hash knows it by (:func:`harness.provenance.suite_files`)."""
    digest: str = ""
    """SHA-256 of the file up to here."""


Record = RunHeader | Collected | ProfileText | RequirementText | TestResult | RunEnd


class ResultsError(ValueError):
    """A results file that can't be read; says where and why."""


class Run(msgspec.Struct):
    """A results file, read."""

    header: RunHeader
    tests: dict[str, TestResult]
    """What each test came to, by node id: its attempts, :func:`merged`."""
    complete: bool
    exit_status: int | None = None
    torn: bool = False
    """Whether the last line was cut off in the middle."""
    requirements: dict[str, RequirementText] = {}
    profile: ProfileText | None = None
    end: RunEnd | None = None
    collected: frozenset[str] = frozenset()
    damaged: str = ""
    """Why the file is not as the run left it; empty where it is, or nobody can know."""
    attempts: dict[str, list[TestResult]] = {}
    """Every attempt of the tests that have more than one, in order."""

    def records(self) -> Iterator[TestResult]:
        """Each attempt of each test, as it is in the file; of tests without a result, that they were not run."""
        for nodeid, test in self.tests.items():
            yield from self.attempts.get(nodeid, (test,))

    def counts(self) -> dict[str, int]:
        """How many tests came to each verdict."""
        return {v: sum(t.verdict == v for t in self.tests.values()) for v in VERDICTS}


class Writer:
    """Writes records to a new results file; each is on its way to the disk before :meth:`write` returns.

    No record has credentials in it (:mod:`harness.redaction`).  Only the profile is written as it is: its hash is in
    the header, and it would have been refused if it had any.

    Errors: OSError, where anything is there, a link as well.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = open_new(path)
        self._encoder = msgspec.json.Encoder()
        self._digest = hashlib.sha256()

    def write(self, record: Record) -> None:
        """Append a record, or nothing.  Errors: OSError."""
        data = msgspec.to_builtins(record)
        if not isinstance(record, ProfileText):
            data = current().record(data)
        try:
            line = self._encoder.encode(data)
        except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
            text = json.dumps(data, ensure_ascii=False)
            line = text.encode(errors="replace")
        append_or_nothing(self._fd, line + b"\n")
        self._digest.update(line + b"\n")

    @property
    def digest(self) -> str:
        """SHA-256 of the file so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """See to it that the file outlives the machine.  Errors: OSError."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Leave the file as it is, and none where it is empty."""
        with contextlib.suppress(OSError):  # why it is abandoned has been said
            if not self.path.lstat().st_size:
                self.path.unlink()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def read(path: Path) -> Run:
    """Read a results file, a cut-off one as well: tests that were collected and have no result are ``not-run``.

    Errors: :class:`ResultsError` for a file that is not one of ours, of a newer version, damaged before its end, or
    with records that no run writes: a second header, profile or end, anything after the end, two results for one
    attempt.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ResultsError(f"{path}: {e.strerror}") from e
    return parse(data, str(path))


def parse(data: bytes, name: str, allowance: Allowance | None = None) -> Run:
    """As :func:`read`, of what is in the file.

    ``name``: what messages call it; ``allowance``: what may be read of it, for a file that comes from others.
    """
    allowance = allowance or Allowance()
    try:
        allowance.take_lines(data)
    except Refused as e:
        raise ResultsError(f"{name}: {e}") from None
    lines = data.split(b"\n")
    decoder = msgspec.json.Decoder(Record)
    header: RunHeader | None = None
    records: list[tuple[int, Record]] = []
    torn = False
    damaged = ""
    digest = hashlib.sha256()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            allowance.take_json(line)
            record = decoder.decode(line)
            allowance.take_tests(len(record.tests) if isinstance(record, Collected) else isinstance(record, TestResult))
        except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            if number == len(lines) and header is not None:  # no newline after it: the writer was cut off here
                torn = True
                continue
            raise ResultsError(f"{name}, line {number}: {said(e)}") from e
        if header is not None:
            records.append((number, record))
        elif not isinstance(record, RunHeader) or record.schema != SCHEMA:
            break
        elif record.version > VERSION:  # said before anything that this version may not know is read
            raise ResultsError(f"{name}: version {record.version}, and this Concord reads up to {VERSION}; update it")
        else:
            header = record
        if isinstance(record, RunEnd) and record.digest and record.digest != digest.hexdigest():
            damaged = f"line {number}: the file is not the one that the run wrote (its digest is another)"
        digest.update(line + b"\n")
    if header is None:
        raise ResultsError(f"{name}: not a results file of Concord (its first line must describe the run)")
    return _run(header, records, name, torn=torn, damaged=damaged)


def _run(header: RunHeader, records: Iterable[tuple[int, Record]], name: str, *, torn: bool, damaged: str) -> Run:
    """Put records together, each with the number of its line.  Errors: :class:`ResultsError` for one that no run
    writes there."""
    run = Run(header, {}, complete=False, torn=torn, damaged=damaged)
    collected: set[str] = set()
    attempts: dict[str, list[TestResult]] = {}
    for line, record in records:
        if run.end is not None:
            raise ResultsError(f"{name}, line {line}: a record after the one that ends the run")
        if isinstance(record, Collected):
            collected.update(record.tests)
            for nodeid in record.tests:
                run.tests.setdefault(nodeid, TestResult(nodeid=nodeid, verdict="not-run", stack=stack_of(nodeid)))
        elif isinstance(record, TestResult):
            before = attempts.setdefault(record.nodeid, [])
            if record.attempt != len(before) + 1:
                raise ResultsError(f"{name}, line {line}: {_out_of_order(record, len(before))}")
            before.append(record)
            run.tests[record.nodeid] = record
        elif isinstance(record, RequirementText):
            if record.id in run.requirements:
                raise ResultsError(f"{name}, line {line}: the requirement {record.id} for the second time")
            run.requirements[record.id] = record
        elif isinstance(record, ProfileText):
            if run.profile is not None:
                raise ResultsError(f"{name}, line {line}: a second profile; a run goes by one")
            run.profile = record
        elif isinstance(record, RunHeader):
            raise ResultsError(f"{name}, line {line}: a second run begins here; a file has one")
        else:
            run.complete, run.exit_status, run.end = True, record.exit_status, record
            header.environment = {**header.environment, **record.environment}
            if not header.profile:
                header.profile, header.profile_hash = record.profile, record.profile_hash
    run.collected = frozenset(collected)
    run.attempts = {nodeid: several for nodeid, several in attempts.items() if len(several) > 1}
    run.tests.update((nodeid, merged(several)) for nodeid, several in run.attempts.items())
    return run


def _out_of_order(record: TestResult, before: int) -> str:
    if 1 <= record.attempt <= before:
        return f"a second result for attempt {record.attempt} of {record.nodeid}; a run has one for each"
    return f"attempt {record.attempt} of {record.nodeid}, of which there are {before} before it"


def merged(attempts: Sequence[TestResult]) -> TestResult:
    """What a test comes to by its attempts, in order: the worst of them, evidence included.

    Where the last attempt was right and an earlier one was not, the test is ``flaky``.
    """
    saying = [each for each in attempts if each.verdict not in _SAYS_NOTHING] or list(attempts)
    worst = min(saying, key=lambda each: _WORST_FIRST.index(each.verdict) if each.verdict in VERDICTS else -1)
    flaky = worst.verdict in ENDED_BADLY and saying[-1].verdict not in BAD
    return msgspec.structs.replace(
        worst,
        verdict="flaky" if flaky else worst.verdict,
        requirements=next((each.requirements for each in attempts if each.requirements), []),  # a crash tells none
        property_based=any(each.property_based for each in attempts),
        world=worst.world or attempts[-1].world,
        size=worst.size or attempts[-1].size,
        dtype=worst.dtype or attempts[-1].dtype,
    )


_WORST_FIRST = ("crashed", "hung", "failed", "flaky", "waived", "passed", "not-run", "unsupported")


def stack_of(nodeid: str) -> str:
    """The stack that a suite test is about: the folder under ``suites/``; empty for any other test."""
    parts = nodeid.split("::")[0].split("/")
    for i, part in enumerate(parts[:-2]):
        if part == "suites":
            return parts[i + 1]
    return ""


def torch_version() -> str:
    """As its installation says it, without importing it where it can be helped."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return str(torch.__version__)


def header(
    arguments: Iterable[str], profile: str = "", profile_hash: str = "", *, subject: str = "torch", **facts: Any
) -> RunHeader:
    """The first line of a run that starts now; ``facts``: other fields of it."""
    return RunHeader(
        started=time.time(),
        arguments=redacted_arguments(list(arguments)),
        environment=environment(),
        subject=subject,
        profile=profile,
        profile_hash=profile_hash,
        **facts,
    )
