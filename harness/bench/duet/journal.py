"""The journal of a duet: one JSON object on each line, appended as pairs of sets end.  A cut last line does not count.

An interrupted duet continues from its journal, whatever interrupted it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from harness.bench.duet.records import SHARES, VERSION, Begun, Counts, Failed, Pair, Record
from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import one_line
from harness.safe_io.untrusted import Allowance, Refused
from harness.safe_io.writing import append_or_nothing, write_whole

NAME = "duet.jsonl"
MOST = 256 << 20
"""Bytes of the largest journal that is read."""
_LINE = 4 << 20


class JournalError(ValueError):
    """A journal that can't be used.  The message says which, where and why."""


class Journal:
    """A journal file, of which this process is the only writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()

    def begin(self, begun: Begun) -> None:
        """Begin an empty journal.  Errors: OSError."""
        write_whole(self.path, self._encoder.encode(begun) + b"\n", follow=False)

    def write(self, *records: Record) -> None:
        """Append records, all or none.  Errors: OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            append_or_nothing(descriptor, b"".join(self._encoder.encode(record) + b"\n" for record in records))
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Remove a last line that was cut off.  Errors: OSError."""
        text = self.path.read_bytes()
        if text and not text.endswith(b"\n"):
            os.truncate(self.path, text.rfind(b"\n") + 1)

    def read(self) -> list[Record]:
        """Return the records; the first is a :class:`Begun`, and the only one.  Errors: :class:`JournalError`."""
        return read(self.path)


def read(path: Path) -> list[Record]:
    """Read the journal in a file that anybody may have written.  Errors: :class:`JournalError`."""
    try:
        text = contents(path, MOST)
    except FileError as e:
        raise JournalError(f"{e}; it should be the journal of a duet") from e
    allowance = Allowance(line=_LINE)
    decoder = msgspec.json.Decoder(Record)
    records: list[Record] = []
    try:
        allowance.take_lines(text)
        for line in text[: text.rfind(b"\n") + 1].splitlines():
            allowance.take_json(line)
            record = decoder.decode(line)
            if isinstance(record, Begun) != (not records):
                raise ValueError("not where it belongs")
            _check(record, records[0] if records else record)
            records.append(record)
    except (Refused, msgspec.MsgspecError, ValueError, RecursionError) as e:
        why = one_line(str(e))[:300]
        raise JournalError(
            f"{path}, line {len(records) + 1}: no record of a duet ({why}); give another --out, or remove the file"
        ) from e
    if not records:
        raise JournalError(f"{path}: an empty journal; give another --out, or remove the file")
    return records


def _check(record: Record, first: Record) -> None:
    """Check what the types do not say.  Errors: ValueError."""
    if isinstance(record, Begun):
        if record.version > VERSION:
            raise ValueError(f"version {record.version}, and this Concord reads up to {VERSION}")
        if len(set(record.series)) < len(record.series):
            raise ValueError("a series twice")
        return
    assert isinstance(first, Begun)
    count = len(first.series)
    if isinstance(record, Failed | Counts) and record.series >= count:
        raise ValueError(f"series {record.series} of {count}")
    if isinstance(record, Pair):
        if any(one.series >= count for one in record.taken):
            raise ValueError(f"a series that is none of {count}")
        if any(tuple(sorted(side)) != side for one in record.taken for side in (one.a, one.b)):
            raise ValueError(f"quantiles {SHARES} that do not ascend")
