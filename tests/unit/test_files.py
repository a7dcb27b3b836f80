"""Files from elsewhere are read whole and within a bound, or refused; nothing blocks, and nothing drives a terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.audit.records import AuditError, Summary
from harness.audit.records import load as load_audit
from harness.bench.history.nights import BadNight
from harness.bench.history.nights import load as load_night
from harness.probe.found import decoded
from harness.safe_io.files import FileError, contents
from harness.thorough.journal import Begun, Journal, JournalError, Plan


@pytest.mark.parametrize("size", [0, 9, 10])
def test_within_the_bound(size: int, tmp_path: Path) -> None:
    """A file of at most so many bytes is read whole, through links as well."""
    (tmp_path / "file").write_bytes(b"x" * size)
    (tmp_path / "link").symlink_to("file")
    assert contents(tmp_path / "link", 10) == b"x" * size


def test_too_large(tmp_path: Path) -> None:
    """One byte more is too many, and no more than that is read."""
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(FileError, match="file: larger than 10 bytes"):
        contents(tmp_path / "file", 10)


@pytest.mark.parametrize("path", ["nothing", "a\0b"])
def test_nothing_there(path: str, tmp_path: Path) -> None:
    """What is no path, or leads nowhere, is named."""
    with pytest.raises(FileError, match=r"nothing: No such file|embedded null"):
        contents(tmp_path / path, 10)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    """Whatever reads a stored file refuses a pipe, which would block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for load, error in ((load_audit, AuditError), (load_night, BadNight), (lambda p: contents(p, 1), FileError)):
        with pytest.raises(error, match="a pipe, not a file"):
            load(pipe)
    with pytest.raises(JournalError, match="a pipe, not a file"):
        Journal(pipe, "pipe").read()


def test_journal_shows_no_escapes(tmp_path: Path) -> None:
    """Names of tests in a journal of somebody else's do not drive the terminal."""
    journal = Journal(tmp_path / "progress.jsonl", "progress.jsonl")
    journal.begin(Begun(1.0, {}))
    journal.write(Plan({"a": "\x1b[31mtest"}))
    assert journal.read().properties["a"].test == "\\x1b[31mtest"


@pytest.mark.parametrize(
    "line",
    [
        {"record": "thorough", "time": 1e300, "about": {}},
        {"record": "thorough", "time": -1.0, "about": {}},
        {"record": "\x1b[31m"},
    ],
)
def test_journal_refuses_what_is_no_time(line: dict[str, object], tmp_path: Path) -> None:
    """A time that is none, or a record that is none, is refused with its line."""
    (tmp_path / "progress.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(JournalError, match="line 1: no record of a thorough run") as error:
        Journal(tmp_path / "progress.jsonl", "progress.jsonl").read()
    assert "\x1b" not in str(error.value)


def summary(**changed: object) -> dict[str, object]:
    empty = Summary(started=1.0, seconds=1.0, arguments=[], environment={}, digest="", red=[], healthy={}, results=[])
    return {**{name: getattr(empty, name) for name in empty.__struct_fields__}, **changed}


def test_audit_shows_no_escapes(tmp_path: Path) -> None:
    """Nor do names in a saved audit."""
    (tmp_path / "audit.json").write_text(json.dumps(summary(red=["\x1b[31mtest"], healthy={"\u202ea": "passed"})))
    found = load_audit(tmp_path / "audit.json")
    assert (found.red, found.healthy) == (["\\x1b[31mtest"], {"\\u202ea": "passed"})


@pytest.mark.parametrize("text", [json.dumps(summary(started=1e300)), "[" * 500_000, '{"\x1b": 1}', "\ud800"])
def test_audit_refuses(text: str, tmp_path: Path) -> None:
    """What is no saved audit is refused in one line."""
    (tmp_path / "audit.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(AuditError, match="not a file of `concord audit --save`"):
        load_audit(tmp_path / "audit.json")


@pytest.mark.parametrize("text", [b"[" * 500_000, b"\xff", b'{"a":' * 100_000])
def test_probe_refuses(text: bytes) -> None:
    """What is no outcome of a probe is refused."""
    with pytest.raises(ValueError, match="this is no probe's outcome"):
        decoded(text)
