"""The journal of a duet: what is written is read again, a cut line does not count, and garbage is refused in a line."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from harness.bench.duet.journal import Journal, JournalError, read
from harness.bench.duet.records import Ended, Failed, Generation, Pair, Round, Session, Taken, identity
from harness.bench.duet.state import replayed
from tests.perf.duets import ABOUT, OFFERS, begun

TAKEN = Taken(series=0, a=(1.0, 1.1, 1.2, 1.3, 1.4), b=(2.0, 2.1, 2.2, 2.3, 2.4), rounds=(Round("A", 1.7e9, 1.0),))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    found = Journal(tmp_path / "duet.jsonl")
    found.begin(begun())
    return found


def test_what_is_written_is_read(journal: Journal) -> None:
    """Every kind of record comes back as it was."""
    records = [Session(1.7e9), Pair((TAKEN,)), Failed(1, "B", "values", "rank 0"), Generation(3.0), Ended()]
    journal.write(*records)
    assert journal.read() == [begun(), *records]
    state = replayed(journal.read())
    assert state.differences[0]["fastest"] == [pytest.approx(0.693, abs=1e-3)]
    assert (state.generations, state.ends, state.seconds) == (1, 1, 3.0)


def test_a_cut_line_does_not_count(journal: Journal) -> None:
    """It is removed before others are appended."""
    journal.write(Generation(3.0))
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + b'{"record":"gener')
    assert len(journal.read()) == 2
    journal.mend()
    assert journal.path.read_bytes() == whole


def test_identity() -> None:
    """The time of a duet is not part of its identity; sides, series and margin are."""
    assert identity(begun(time=1.0)) == identity(begun(time=2.0))
    others = [
        begun(margin=0.02),
        begun(seed=1),
        begun(OFFERS[:2]),
        begun(b=msgspec.structs.replace(ABOUT, variables=(("GLOO_X", "1"),))),
    ]
    assert len({identity(one) for one in (begun(), *others)}) == 5


PAIR = b'{"record":"pair","taken":[{"series":%s,"a":%s,"b":[1,1,1,1,1]}]}\n'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"garbage\n", "line 2: no record of a duet"),
        (b"\xff\xfe\x00\n", "line 2"),
        (b'{"record":"session","time":1e400}\n', "line 2"),
        (b'{"record":"nothing"}\n', "line 2"),
        (b"[" * 100_000 + b"\n", "nested more than"),
        (PAIR % (b"6", b"[1,1,1,1,1]"), "a series that is none of 6"),
        (PAIR % (b"-1", b"[1,1,1,1,1]"), "line 2"),
        (PAIR % (b"0", b"[1,1,1,1,0]"), "line 2"),
        (PAIR % (b"0", b"[5,4,3,2,1]"), "do not ascend"),
        (PAIR % (b"0", b"[1]"), "line 2"),
        (b'{"record":"failed","series":9,"side":"B","kind":"x","why":""}\n', "series 9 of 6"),
        (b'{"record":"counts","series":6,"a":[],"b":[]}\n', "series 6 of 6"),
        (b'{"record":"counts","series":0,"a":[{"copies":-1}],"b":[]}\n', "line 2"),
        (b'{"record":"counts","series":0,"a":[{"copies":1e300}],"b":[]}\n', "line 2"),
        (b'{"record":"failed","series":1,"side":"C","kind":"x","why":""}\n', "line 2"),
        (b'{"record":"generation","seconds":-1}\n', "line 2"),
        (b'{"record":"nothing","\\u001b[31m":1}\n', "line 2"),
    ],
)
def test_garbage(journal: Journal, line: bytes, says: str) -> None:
    """A line that is no record is named with its number, and what to do is said."""
    with open(journal.path, "ab") as file:
        file.write(line)
    with pytest.raises(JournalError, match=says) as found:
        journal.read()
    assert "remove the file" in str(found.value)
    assert "\x1b" not in str(found.value)
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "an empty journal"),
        (b'{"record":"session","time":1.0}\n', "line 1: no record of a duet .not where it belongs"),
        (msgspec.json.encode(begun()) + b"\n" + msgspec.json.encode(begun()) + b"\n", "line 2"),
        (msgspec.json.encode(begun(version=99)) + b"\n", "version 99, and this Concord reads up to 1"),
        (msgspec.json.encode(begun((OFFERS[0], OFFERS[0]))) + b"\n", "a series twice"),
    ],
)
def test_what_is_no_journal(tmp_path: Path, text: bytes, says: str) -> None:
    """It is refused."""
    (tmp_path / "j").write_bytes(text)
    with pytest.raises(JournalError, match=says):
        read(tmp_path / "j")


def test_files_that_are_none(tmp_path: Path) -> None:
    """A pipe, a folder and nothing at all are refused without waiting."""
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("pipe", "a pipe"), (".", "a folder"), ("nothing", "No such file")):
        with pytest.raises(JournalError, match=says):
            read(tmp_path / name)


def test_a_full_disk_leaves_whole_lines(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no space for a record, none of it stays."""
    before = journal.path.read_bytes()
    right = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 10:
            return right(descriptor, bytes(data[:10]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        journal.write(Generation(1.25), Generation(1.0))
    monkeypatch.undo()
    assert journal.path.read_bytes() == before
