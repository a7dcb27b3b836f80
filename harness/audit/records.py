"""What an audit finds out, as data: the lines of its journal, and the file that ``--save`` writes."""

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
"""Bytes of what ``--save`` writes; an audit of all suites comes to 2 MiB."""

KILLED, SURVIVED, TIMED_OUT, NOT_REACHED, FAILED = "killed", "survived", "timed out", "not reached", "not injected"
"""What can become of a defect.  ``not reached``: no test executes the lines; ``not injected``: it can't be put in."""


class Defect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault of the catalogue, or a mutant."""

    name: str
    sort: str
    """``fault`` or ``mutant``."""
    component: str
    says: str
    """What is wrong."""
    about: str = ""
    """Of a fault, its class and its issue; of a mutant, file and line."""


class Healthy(msgspec.Struct, tag="healthy", tag_field="record", kw_only=True, omit_defaults=True):
    """A test without any defect."""

    test: str
    verdict: str
    seconds: Seconds
    headline: str = ""
    about: str = ""
    """What the test requires and does, in words."""
    steps: dict[str, list[tuple[int, int]]] = {}
    """From line to line in the sources that mutants are made of, as ranks went."""


class Result(msgspec.Struct, tag="result", tag_field="record", kw_only=True, omit_defaults=True):
    """What became of one defect."""

    defect: Defect
    state: str
    seconds: Seconds
    tests: Count = 0
    """How many were run."""
    test: str = ""
    """That noticed."""
    verdict: str = ""
    headline: str = ""
    requirements: list[str] = []
    ranks: list[Ranks] = []
    equivalent: str = ""
    """Why nobody could notice it, where the list of equivalent mutants says so."""


class Begun(msgspec.Struct, tag="audit", tag_field="record", kw_only=True):
    """The first line of a journal."""

    version: VersionNumber = VERSION
    started: Moment
    digest: str
    environment: dict[str, str]


Record = Begun | Healthy | Result


class Summary(msgspec.Struct, kw_only=True):
    """A whole audit: what ``--save`` writes and ``--compare`` reads."""

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
    """A file of an audit that can't be used; says which, where and why."""


class Journal:
    """Lines on disk, one a record, so that an interrupted audit goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o644)
        except OSError as e:
            raise AuditError(f"{path}: {e.strerror}") from e

    def read(self) -> list[Record]:
        """What is there; a line that was cut off does not count, and is taken away."""
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.ftruncate(self._fd, len(whole))
        decoder = msgspec.json.Decoder(Record)
        records: list[Record] = []
        allowance = Allowance(values=100_000_000)  # steps of all tests, from line to line
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                allowance.take_json(line)
                records.append(decoder.decode(line))
            except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
                raise AuditError(f"{self.path}, line {number}: {said(e)}; move the file away to begin anew") from e
        return records

    def write(self, record: Record) -> None:
        """Append a record, without any credentials.  Errors: AuditError."""
        line = msgspec.json.encode(current().record(msgspec.to_builtins(record))) + b"\n"
        try:
            append_or_nothing(self._fd, line)
        except OSError as e:
            raise AuditError(f"{self.path}: {e.strerror}; once it can be written to, the audit goes on there") from e

    def close(self) -> None:
        os.close(self._fd)


def load(path: Path) -> Summary:
    """Read what ``--save`` wrote.  Errors: AuditError."""
    try:
        data = contents(path, LARGEST)
    except FileError as e:
        raise AuditError(str(e)) from e
    try:
        found = msgspec.convert(_fit(msgspec.json.decode(json_checked(data))), Summary)
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise AuditError(f"{path}: not a file of `concord audit --save`: {said(e)}") from e
    if found.version > VERSION:
        raise AuditError(f"{path}: version {found.version}, and this Concord reads up to {VERSION}; update it")
    return found


def _fit(value: Any) -> Any:
    """The same with texts that are fit to be shown: somebody may have sent the file."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_fit(part) for part in value]
    return {printable(key): _fit(part) for key, part in value.items()} if isinstance(value, dict) else value


def shortened(summary: Summary) -> Summary:
    """What a later audit needs to know: of each defect its state, and which test noticed it."""
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
    """Mutants that nobody could notice, and why.  Errors: AuditError."""
    try:
        rows = toml(path.read_text()).get("equivalent", [])
    except FileNotFoundError:
        return {}
    except Refused as e:
        raise AuditError(f"{path}:{e.line}: {e}") from e
    except UnicodeDecodeError as e:
        raise AuditError(f"{path}: {e}") from e
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or set(row) != {"mutants", "why"} or not str(row["why"]).strip():
            raise AuditError(f"{path}, entry {number}: an entry has `mutants`, a list of names, and `why`, a sentence")
        found.update(dict.fromkeys(row["mutants"], str(row["why"])))
    return found


def digest(root: Path) -> str:
    """Of everything that an audit's outcome depends on in this tree."""
    found = hashlib.sha256()
    for folder in ("harness", "suites", "fixtures"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".toml") and path.name != "equivalent.toml":
                found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
