"""Verdicts and evidence on disk: one JSON object a line, appended as tests end, so that a crash loses nothing.

The first line describes the run, each later one a test, and the last says that the run came to its end; a file
without that last line is a run that was cut off.  :data:`VERSION` counts up whenever a reader must change.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

SCHEMA = "concord.results"
VERSION = 1

VERDICTS = ("passed", "failed", "crashed", "hung", "unsupported", "waived", "not-run")
"""What a test can come to.  ``unsupported``: the profile does not claim it; ``not-run``: nobody looked."""

BAD = ("failed", "crashed", "hung")


class RunHeader(msgspec.Struct, tag="run", tag_field="record", kw_only=True):
    """The first line: what ran, where, on what."""

    schema: str = SCHEMA
    version: int = VERSION
    started: float
    """Seconds since the epoch."""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    subject: str = "torch"
    """Whose implementation of the stacks ran (:mod:`harness.subjects`)."""
    profile: str = ""
    """Name of the profile that the run goes by."""
    profile_hash: str = ""
    """SHA-256 of its text."""


class Collected(msgspec.Struct, tag="collected", tag_field="record"):
    """The tests that were to run."""

    tests: list[str]


class RankEvidence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rank of a failed world said."""

    rank: int
    kind: str
    what: str = ""
    first: bool = False
    text: str = ""
    stack: str = ""
    collectives: list[str] = []
    output: str = ""


class TestResult(msgspec.Struct, tag="test", tag_field="record", kw_only=True, omit_defaults=True):
    """One test's verdict, with its evidence if it is a bad one."""

    __test__ = False

    nodeid: str
    verdict: str
    stack: str = ""
    requirements: list[str] = []
    world: str = ""
    seconds: float = 0.0
    reason: str = ""
    headline: str = ""
    ranks: list[RankEvidence] = []


class RunEnd(msgspec.Struct, tag="end", tag_field="record"):
    """The last line of a run that came to its end."""

    finished: float
    exit_status: int
    profile: str = ""
    """As in :class:`RunHeader`, where it is only known now which one fits; a reader puts it there."""
    profile_hash: str = ""


Record = RunHeader | Collected | TestResult | RunEnd


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

    def write(self, record: Record) -> None:
        try:
            line = self._encoder.encode(record)
        except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
            text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
            line = text.encode(errors="replace")
        append(self._fd, line + b"\n")

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
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise ResultsError(f"{path}: {e.strerror}") from e
    decoder = msgspec.json.Decoder(Record)
    header: RunHeader | None = None
    records: list[Record] = []
    torn = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            if number == len(lines) and header is not None:  # no newline after it: the writer was cut off here
                torn = True
                continue
            raise ResultsError(f"{path}, line {number}: {e}") from e
        if header is not None:
            records.append(record)
        elif not isinstance(record, RunHeader) or record.schema != SCHEMA:
            break
        elif record.version > VERSION:  # said before anything that this version may not know is read
            raise ResultsError(f"{path}: version {record.version}, and this Concord reads up to {VERSION}; update it")
        else:
            header = record
    if header is None:
        raise ResultsError(f"{path}: not a results file of Concord (its first line must describe the run)")
    run = Run(header, {}, complete=False, torn=torn)
    for record in records:
        if isinstance(record, Collected):
            for nodeid in record.tests:
                run.tests.setdefault(nodeid, TestResult(nodeid=nodeid, verdict="not-run", stack=stack_of(nodeid)))
        elif isinstance(record, TestResult):
            run.tests[record.nodeid] = record
        elif isinstance(record, RunEnd):
            run.complete, run.exit_status = True, record.exit_status
            if not header.profile:
                header.profile, header.profile_hash = record.profile, record.profile_hash
    return run


def stack_of(nodeid: str) -> str:
    """The stack that a suite test is about: the folder under ``suites/``; empty for any other test."""
    parts = nodeid.split("::")[0].split("/")
    for i, part in enumerate(parts[:-2]):
        if part == "suites":
            return parts[i + 1]
    return ""


def environment() -> dict[str, str]:
    """What a verdict depends on besides the code: versions and machine."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def torch_version() -> str:
    """As its installation says it, without importing it where it can be helped."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return str(torch.__version__)


def header(arguments: Iterable[str], profile: str = "", profile_hash: str = "", *, subject: str = "torch") -> RunHeader:
    """The first line of a run that starts now."""
    return RunHeader(
        started=time.time(),
        arguments=list(arguments),
        environment=environment(),
        subject=subject,
        profile=profile,
        profile_hash=profile_hash,
    )
