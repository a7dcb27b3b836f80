"""The records of an audit: the lines of its journal, and the file that ``--save`` writes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from harness.redaction import current
from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import printable
from harness.safe_io.untrusted import Allowance, Count, Moment, Ranks, Refused, Seconds, json_checked, said, toml
from harness.safe_io.untrusted import Version as VersionNumber
from harness.safe_io.writing import append_or_nothing

VERSION = 1
LARGEST = 256 << 20
"""Maximum size in bytes of a file that ``--save`` writes; an audit of all suites takes 2 MiB."""

KILLED, SURVIVED, TIMED_OUT, NOT_REACHED, FAILED = "killed", "survived", "timed out", "not reached", "not injected"
"""States of a defect.  ``not reached``: no test executes the lines; ``not injected``: the defect can't be injected."""


class Defect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault of the catalog, a mutant, or a pair of mutants."""

    name: str
    sort: str
    """``fault``, ``mutant`` or ``pair``."""
    component: str
    says: str
    """What is wrong."""
    about: str = ""
    """For a fault, its class and its issue; for mutants, file and line."""


class Healthy(msgspec.Struct, tag="healthy", tag_field="record", kw_only=True, omit_defaults=True):
    """The result of a test without any defect."""

    test: str
    verdict: str
    seconds: Seconds
    headline: str = ""
    about: str = ""
    """The test's requirements and docstring."""
    steps: dict[str, list[tuple[int, int]]] = {}
    """By file, the steps from line to line that ranks took in the sources of mutants."""


class Result(msgspec.Struct, tag="result", tag_field="record", kw_only=True, omit_defaults=True):
    """The result of one defect."""

    defect: Defect
    state: str
    seconds: Seconds
    tests: Count = 0
    """Number of tests that were run."""
    test: str = ""
    """The test that detected the defect."""
    verdict: str = ""
    headline: str = ""
    requirements: list[str] = []
    ranks: list[Ranks] = []
    equivalent: str = ""
    """Why no test could detect it, if the list of equivalent mutants has it."""


class Begun(msgspec.Struct, tag="audit", tag_field="record", kw_only=True):
    """The first line of a journal."""

    version: VersionNumber = VERSION
    started: Moment
    digest: str
    environment: dict[str, str]


Record = Begun | Healthy | Result


class Summary(msgspec.Struct, kw_only=True):
    """The result of a whole audit, which ``--save`` writes and ``--compare`` reads."""

    schema: str = "concord.audit"
    version: VersionNumber = VERSION
    started: Moment
    seconds: Seconds
    arguments: list[str]
    environment: dict[str, str]
    digest: str
    red: list[str]
    """Tests that failed without a defect."""
    healthy: dict[str, str]
    """Verdicts without a defect, by test."""
    results: list[Result]


class AuditError(ValueError):
    """A file of an audit that can't be used.  The message says which file, where and why."""


class Journal:
    """A file with one line for each record, so that an interrupted audit resumes where it stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o644)
        except OSError as e:
            raise AuditError(f"{path}: {e.strerror}") from e

    def read(self) -> list[Record]:
        """Read all records, and remove a last line that was cut off.  Errors: AuditError."""
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.ftruncate(self._fd, len(whole))
        decoder = msgspec.json.Decoder(Record)
        records: list[Record] = []
        allowance = Allowance(values=100_000_000)  # the steps of all tests
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                allowance.take_json(line)
                records.append(decoder.decode(line))
            except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
                raise AuditError(f"{self.path}, line {number}: {said(e)}; move the file away to begin anew") from e
        return records

    def write(self, record: Record) -> None:
        """Append a record without its credentials.  Errors: AuditError."""
        line = msgspec.json.encode(current().record(msgspec.to_builtins(record))) + b"\n"
        try:
            append_or_nothing(self._fd, line)
        except OSError as e:
            raise AuditError(f"{self.path}: {e.strerror}; once it can be written to, the audit goes on there") from e

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def load(path: Path) -> Summary:
    """Read a file that ``--save`` wrote.  Errors: AuditError."""
    try:
        data = contents(path, LARGEST)
    except FileError as e:
        raise AuditError(str(e)) from e
    try:
        summary = msgspec.convert(_fit(msgspec.json.decode(json_checked(data))), Summary)
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise AuditError(f"{path}: not a file of `concord audit --save`: {said(e)}") from e
    if summary.version > VERSION:
        raise AuditError(f"{path}: version {summary.version}, and this Concord reads up to {VERSION}; update it")
    return summary


def _fit(value: Any) -> Any:
    """Make all texts printable, because the file may come from somebody else."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_fit(part) for part in value]
    return {printable(key): _fit(part) for key, part in value.items()} if isinstance(value, dict) else value


def shortened(summary: Summary) -> Summary:
    """Reduce a summary to what a later audit needs: the state of each defect, and the test that detected it."""
    results = [
        Result(
            defect=Defect(name=r.defect.name, sort=r.defect.sort, component=r.defect.component, says=""),
            state=r.state,
            seconds=r.seconds,
            test=r.test,
        )
        for r in summary.results
    ]
    return msgspec.structs.replace(summary, healthy={}, results=results)


def equivalents(path: Path) -> dict[str, str]:
    """Read the list of equivalent mutants.  Returns reasons by the mutants' names.  Errors: AuditError."""
    try:
        rows = toml(path.read_text()).get("equivalent", [])
    except FileNotFoundError:
        return {}
    except Refused as e:
        raise AuditError(f"{path}:{e.line}: {e}") from e
    except UnicodeDecodeError as e:
        raise AuditError(f"{path}: {e}") from e
    reasons: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or set(row) != {"mutants", "why"} or not str(row["why"]).strip():
            raise AuditError(f"{path}, entry {number}: an entry has `mutants`, a list of names, and `why`, a sentence")
        reasons.update(dict.fromkeys(row["mutants"], str(row["why"])))
    return reasons


_ABOUT_OUTCOMES = ("equivalent.toml", "unnoticed.toml")
"""Lists that are written after an audit and do not change what it does."""


def digest(root: Path) -> str:
    """Return a digest of the files in this tree that an audit's outcome depends on."""
    sha256 = hashlib.sha256()
    for folder in ("harness", "suites", "fixtures"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".toml") and path.name not in _ABOUT_OUTCOMES:
                sha256.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return sha256.hexdigest()[:16]
