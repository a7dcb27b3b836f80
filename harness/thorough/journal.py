"""The progress of a thorough run on disk: one JSON object per line, appended as examples end.

An interrupted run continues from here, whatever interrupted it. The first line describes the run. Lines of several
processes follow one another in any order. A last line without a newline was cut off and does not count.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from harness.safe_io.files import FileError, require_regular
from harness.safe_io.shown import printable
from harness.safe_io.writing import append_or_nothing, write_whole

VERSION = 1

Time: TypeAlias = Annotated[float, Meta(ge=0, le=253402300799)]
"""Seconds, as a duration or since the epoch; not after the year 9999."""
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Begun(msgspec.Struct, tag="thorough", tag_field="record"):
    """The first line."""

    time: Time
    """Seconds since the epoch."""
    about: dict[str, str]
    """Versions of what is tested. If they change, earlier progress no longer counts."""
    version: int = VERSION


class Session(msgspec.Struct, tag="session", tag_field="record"):
    """A pytest session works on the run from here on."""

    id: str


class Plan(msgspec.Struct, tag="plan", tag_field="record"):
    """The properties of a session, by key."""

    properties: dict[str, str]


class Anew(msgspec.Struct, tag="anew", tag_field="record"):
    """A session runs finished properties again."""

    session: str
    properties: list[str]


class Round(msgspec.Struct, tag="round", tag_field="record"):
    """A property draws examples from a seed."""

    property: str
    seed: Seed
    goal: Time
    """When the property is done: a number of examples, or seconds if there is a budget."""


class Example(msgspec.Struct, tag="example", tag_field="record", omit_defaults=True):
    """One example has ended. ``seconds``: since the one before."""

    property: str
    outcome: str
    """``passed``, ``given up`` or ``failed``."""
    seconds: Time
    content: str = ""
    """A digest of what was drawn; empty if the example was given up."""


class Done(msgspec.Struct, tag="done", tag_field="record"):
    """A property is done, and has passed or failed."""

    property: str
    outcome: str


Record = Begun | Session | Plan | Anew | Round | Example | Done


class JournalError(ValueError):
    """A journal can't be read or written; the message says where and why."""


@dataclass
class Progress:
    """The progress of a property."""

    test: str
    passed: int = 0
    given_up: int = 0
    seconds: float = 0.0
    contents: set[str] = field(default_factory=set)
    seed: int | None = None
    goal: float = 0.0
    outcome: str = ""
    """``passed`` or ``failed`` if it is done; otherwise empty."""


@dataclass
class Tally:
    """The state of a run, added up from its records."""

    begun: Begun | None = None
    properties: dict[str, Progress] = field(default_factory=dict)
    """By key, in the order in which they were planned."""
    anew: set[str] = field(default_factory=set)
    """Sessions that ran properties again."""

    @property
    def done(self) -> int:
        """The number of properties that are done."""
        return sum(bool(p.outcome) for p in self.properties.values())

    def add(self, record: Record) -> None:
        """Count one more record. Errors: KeyError for a property that no session planned."""
        if isinstance(record, Begun):
            self.begun = record
        elif isinstance(record, Session):
            pass
        elif isinstance(record, Plan):
            for key, test in record.properties.items():
                self.properties.setdefault(key, Progress(printable(test)))
        elif isinstance(record, Anew):
            self.anew.add(record.session)
            for key in record.properties:
                self.properties[key] = Progress(self.properties[key].test)
        elif isinstance(record, Round):
            progress = self.properties[record.property]
            progress.seed, progress.goal, progress.outcome = record.seed, record.goal, ""
        elif isinstance(record, Example):
            progress = self.properties[record.property]
            progress.seconds += record.seconds
            if record.outcome == "given up":
                progress.given_up += 1
            else:
                progress.passed += record.outcome == "passed"
                progress.contents.add(record.content)
        else:
            self.properties[record.property].outcome = record.outcome


class Journal:
    """A journal file, which any number of processes append to and read."""

    def __init__(self, path: Path, shown: str) -> None:
        """``shown``: what messages call the file."""
        self.path, self.shown = path, shown
        self.tally = Tally()
        self._fd = -1
        self._read = 0
        self._lines = 0
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Record)

    def begin(self, begun: Begun) -> None:
        """Begin an empty journal, and keep the previous one beside it as ``...-before``. Errors: JournalError."""
        try:
            if self.path.exists():
                os.replace(self.path, self.path.with_name(f"{self.path.stem}-before{self.path.suffix}"))
            write_whole(self.path, self._encoder.encode(begun) + b"\n", follow=False)
        except OSError as e:
            raise JournalError(f"{self.shown}: {e.strerror}") from e
        self.close()
        self.tally, self._read, self._lines = Tally(), 0, 0
        self.read()

    def mend(self) -> None:
        """Remove a last line that was cut off. No other process may use the file meanwhile. Errors: JournalError."""
        try:
            text = self.path.read_bytes()
            if text and not text.endswith(b"\n"):
                fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.ftruncate(fd, text.rfind(b"\n") + 1)
                finally:
                    os.close(fd)
        except OSError as e:
            raise JournalError(f"{self.shown}: {e.strerror}") from e

    def write(self, *records: Record) -> None:
        """Append records. Errors: JournalError."""
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            text = b"".join(self._encoder.encode(r) + b"\n" for r in records)
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # on a full disk, part of a line is removed before others append
            try:
                append_or_nothing(self._fd, text)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError as e:
            raise JournalError(f"{self.shown}: {e.strerror}") from e

    def sync(self) -> None:
        """Flush what was written to disk, so that it survives a crash of the machine."""
        if self._fd >= 0:
            os.fsync(self._fd)

    def read(self, *, until: str = "") -> Tally:
        """Read new records and count them. ``until``: stop where this session begins.

        Errors: JournalError for a file that is no journal, which names the line.
        """
        try:
            require_regular(self.path)  # a pipe would block
            with open(self.path, "rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileError as e:
            raise JournalError(str(e)) from e
        except OSError as e:
            raise JournalError(f"{self.shown}: {e.strerror}") from e
        for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):
            number = self._lines + 1
            try:
                record = self._decoder.decode(line)
                if isinstance(record, Begun) != (number == 1):
                    raise ValueError("not where it belongs")
                if isinstance(record, Begun) and record.version > VERSION:
                    raise ValueError(f"version {record.version}, and this Concord reads up to {VERSION}")
                if until and isinstance(record, Session) and record.id == until:
                    return self.tally
                self.tally.add(record)
            except KeyError as e:
                raise JournalError(f"{self.shown}, line {number}: nobody planned the property {e}") from e
            except (ValueError, RecursionError) as e:
                raise JournalError(
                    f"{self.shown}, line {number}: no record of a thorough run ({printable(str(e))})"
                ) from e
            self._lines = number
            self._read += len(line)
        return self.tally

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def key_of(test: str) -> str:
    """Return a short key for a test in the journal."""
    return f"{zlib.crc32(test.encode(errors='surrogatepass')):08x}"
