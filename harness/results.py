"""Verdicts and evidence on disk: one JSON object a line, appended as tests end, so that a crash loses nothing.

The first line describes the run, each later one a test, and the last says that the run came to its end; a file
without that last line is a run that was cut off.  :data:`VERSION` counts up whenever a reader must change.

Version 2 has what a report needs: requirements, the profile's text and waivers, seed, suite hash, what was left out,
and a digest of the file in its last line.  Files of version 1 are read; they have none of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness.provenance import environment
from harness.untrusted import Allowance, Count, Moment, Ranks, Refused, Seconds, Status, said
from harness.untrusted import Version as VersionNumber

SCHEMA = "concord.results"
VERSION = 3

VERDICTS = ("passed", "failed", "crashed", "hung", "unsupported", "waived", "not-run")
"""What a test can come to.  ``unsupported``: the profile does not claim it; ``not-run``: nobody looked."""

BAD = ("failed", "crashed", "hung")

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
    stack: str = ""
    requirements: list[str] = []
    world: str = ""
    seconds: Seconds = 0.0
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
    counts: dict[str, Count] = {}
    """How many tests came to each verdict."""
    digest: str = ""
    """SHA-256 of the file up to here."""


Record = RunHeader | Collected | ProfileText | RequirementText | TestResult | RunEnd


class ResultsError(ValueError):
    """A results file that can't be read; says where and why."""


class Run(msgspec.Struct):
    """A results file, read."""

    header: RunHeader
    tests: dict[str, TestResult]
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

    def counts(self) -> dict[str, int]:
        """How many tests came to each verdict."""
        return {v: sum(t.verdict == v for t in self.tests.values()) for v in VERDICTS}


class Writer:
    """Appends records to a results file; each is on its way to the disk before :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._encoder = msgspec.json.Encoder()
        self._digest: hashlib._Hash | None = hashlib.sha256() if os.fstat(self._fd).st_size == 0 else None

    def write(self, record: Record) -> None:
        try:
            line = self._encoder.encode(record)
        except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
            text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
            line = text.encode(errors="replace")
        append(self._fd, line + b"\n")
        if self._digest is not None:
            self._digest.update(line + b"\n")

    @property
    def digest(self) -> str:
        """SHA-256 of the file so far; empty where others have written to it before."""
        return self._digest.hexdigest() if self._digest is not None else ""

    def close(self) -> None:
        os.close(self._fd)


def append(fd: int, data: bytes) -> None:
    """Write all of it.  Errors: OSError."""
    rest = memoryview(data)
    while rest:  # a nearly full disk takes a part, and says so only the next time
        rest = rest[os.write(fd, rest) :]


def read(path: Path) -> Run:
    """Read a results file, a cut-off one as well: tests that were collected and have no result are ``not-run``.

    Errors: :class:`ResultsError` for a file that is not one of ours, of a newer version, or damaged before its end.
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
    records: list[Record] = []
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
            records.append(record)
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
    return _run(header, records, torn=torn, damaged=damaged)


def _run(header: RunHeader, records: Iterable[Record], *, torn: bool, damaged: str) -> Run:
    run = Run(header, {}, complete=False, torn=torn, damaged=damaged)
    collected: set[str] = set()
    for record in records:
        if isinstance(record, Collected):
            collected.update(record.tests)
            for nodeid in record.tests:
                run.tests.setdefault(nodeid, TestResult(nodeid=nodeid, verdict="not-run", stack=stack_of(nodeid)))
        elif isinstance(record, TestResult):
            run.tests[record.nodeid] = record
        elif isinstance(record, RequirementText):
            run.requirements.setdefault(record.id, record)
        elif isinstance(record, ProfileText):
            run.profile = record
        elif isinstance(record, RunEnd):
            run.complete, run.exit_status, run.end = True, record.exit_status, record
            header.environment = {**header.environment, **record.environment}
            if not header.profile:
                header.profile, header.profile_hash = record.profile, record.profile_hash
    run.collected = frozenset(collected)
    return run


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
        arguments=list(arguments),
        environment=environment(),
        subject=subject,
        profile=profile,
        profile_hash=profile_hash,
        **facts,
    )
