"""The zip file of a bundle, which is written and read in only one form.

A zip file can contain data that no program shows: bytes before, between and after its members, entries that only its
directory or only its body has, a second name in an extra field. So the reader parses the file itself, from the first
byte to the last, and accepts only what :func:`packed` writes. Compressed data is inflated rather than compared, because
another version of zlib may compress the same file differently, and its bundles are equally valid.
"""

from __future__ import annotations

import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.safe_io.files import FileError, contents
from harness.safe_io.untrusted import Refused
from reports.model import ReportError

MOST_FILES = 1000
LARGEST = 48 << 20
"""Bytes of all files in a bundle, unpacked: 16 times a bundle of two runs of all 2,341 tests, all passed."""
LARGEST_PACKED = LARGEST + (1 << 20)
_MOST_RATIO = 200
"""The highest compression ratio of a file.  Results of passed tests reach 30."""
_ALWAYS = 64 << 10
"""Bytes of a file that do not count for its compression ratio."""
_LONGEST_NAME = 150
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*(/[A-Za-z0-9][A-Za-z0-9_.+-]*)*")

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_TIME, _DAY = 0, (1 << 5) + 1
_VERSION = 20
_UNIX = 3
_PLAIN = (stat.S_IFREG | 0o644) << 16
_NOT_OURS = "not as `concord bundle` writes it"


def packed(found: Mapping[str, bytes]) -> bytes:
    """Pack files into a zip, sorted by name, in which nothing depends on time or user."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(found.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = _PLAIN
            info.create_system = _UNIX
            archive.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
    return stream.getvalue()


def unpacked(path: Path) -> dict[str, bytes]:
    """Unpack a bundle in memory, without writing anything to disk.

    Sizes are checked before anything is inflated, and no more than the checked size is inflated.
    Errors: :class:`ReportError` for a file that is not a zip, or that :func:`packed` does not write: other names,
    links, encryption, a byte that belongs to no member, more than :data:`LARGEST` bytes.
    """
    try:
        return dict(_members(contents(path, LARGEST_PACKED)))
    except FileError as e:
        raise ReportError(str(e)) from None
    except Refused as e:
        raise ReportError(f"{path}: {e}") from None


@dataclass(frozen=True)
class _Entry:
    """A member as the directory of the zip file lists it."""

    name: str
    crc: int
    packed: int
    size: int
    offset: int


def _members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Iterate over the name and content of each member.  Errors: :class:`Refused`."""
    entries, directory = _directory(data)
    _check_sizes(entries)
    at = 0
    for entry in entries:
        name = entry.name.encode()
        header = _LOCAL.pack(
            b"PK\3\4",
            _VERSION,
            0,
            zipfile.ZIP_DEFLATED,
            _TIME,
            _DAY,
            entry.crc,
            entry.packed,
            entry.size,
            len(name),
            0,
        )
        if entry.offset != at:
            raise Refused(f"{_NOT_OURS}: something lies before or behind {entry.name}")
        if data[at : at + len(header) + len(name)] != header + name:
            raise Refused(f"{_NOT_OURS}: its directory and the head of {entry.name} differ")
        at += len(header) + len(name) + entry.packed
        if at > directory:
            raise Refused(f"not a zip file that can be read: {entry.name} is cut off")
        yield entry.name, _inflated(entry, memoryview(data)[at - entry.packed : at])
    if at != directory:
        raise Refused(f"{_NOT_OURS}: something lies between its files and their directory")


def _directory(data: bytes) -> tuple[list[_Entry], int]:
    """Parse the list of members at the end of the file, and return its offset as well.  Errors: :class:`Refused`."""
    begin = len(data) - _END.size
    if begin < 0 or data[begin : begin + 4] != b"PK\5\6":
        what = f"{_NOT_OURS}: something is behind the zip file in it" if b"PK\5\6" in data else "not a zip file"
        raise Refused(what)
    _, disk, first, here, count, length, offset, comment = _END.unpack_from(data, begin)
    if disk or first or comment or here != count:
        raise Refused(f"{_NOT_OURS}: its last record has a comment, or other disks")
    if count > MOST_FILES:
        raise Refused(f"{count} files, and a bundle has at most {MOST_FILES}")
    if offset + length != begin:
        raise Refused(f"{_NOT_OURS}: something is before or behind the zip file in it")
    entries: list[_Entry] = []
    seen: set[str] = set()
    at = offset
    for _ in range(count):
        if at + _CENTRAL.size > begin:
            raise Refused("not a zip file that can be read: its directory is cut off")
        entry, at = _listed(data, at)
        if entry.name.lower() in seen:
            raise Refused(f"{entry.name} is in it twice")
        seen.add(entry.name.lower())
        entries.append(entry)
    if at != begin:
        raise Refused(f"{_NOT_OURS}: something lies behind the list of its files")
    if [entry.name for entry in entries] != sorted(entry.name for entry in entries):
        raise Refused(f"{_NOT_OURS}: its files are in another order")
    return entries, offset


def _listed(data: bytes, at: int) -> tuple[_Entry, int]:
    """Parse an entry of the directory, and return the offset of the next one as well.  Errors: :class:`Refused`."""
    fields = _CENTRAL.unpack_from(data, at)
    magic, made, needed, flags, method, time, day, crc, packed_size, size, long, extra, comment, disk, *rest = fields
    internal, external, offset = rest
    raw = data[at + _CENTRAL.size : at + _CENTRAL.size + long]
    name = raw.decode("ascii", "backslashreplace")
    if magic != b"PK\1\2":
        raise Refused("not a zip file that can be read: its directory is damaged")
    if long > _LONGEST_NAME or not _NAME.fullmatch(name) or ".." in name:
        raise Refused(f"a bundle has no file of the name {name[:_LONGEST_NAME]!r}")
    if stat.S_IFMT(external >> 16) not in (0, stat.S_IFREG):
        raise Refused(f"{name} is no plain file")
    if flags & 1 or method != zipfile.ZIP_DEFLATED:
        raise Refused(f"{name} is encrypted, or packed in a way that a bundle is not")
    if extra or comment:
        raise Refused(f"{_NOT_OURS}: {name} has a comment, or a field that only some programs read")
    ours = (_UNIX << 8 | _VERSION, _VERSION, 0, _TIME, _DAY, 0, 0, _PLAIN)
    if (made, needed, flags, time, day, disk, internal, external) != ours:
        raise Refused(f"{_NOT_OURS}: time, mode or flags of {name}")
    return _Entry(name, crc, packed_size, size, offset), at + _CENTRAL.size + long


def _check_sizes(entries: list[_Entry]) -> None:
    total = sum(entry.size for entry in entries)
    if total > LARGEST:
        raise Refused(f"{total >> 20} MiB unpacked, and a bundle has at most {LARGEST >> 20}")
    for entry in entries:
        if entry.size > _ALWAYS + _MOST_RATIO * entry.packed:
            raise Refused(
                f"{entry.name} is packed 1 to {entry.size // max(1, entry.packed)}: none of Concord's files is"
            )
        if entry.packed > 1024 + entry.size + entry.size // 1000:
            raise Refused(f"{_NOT_OURS}: {entry.name} is larger packed than it is")


def _inflated(entry: _Entry, stream: memoryview) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflater.decompress(stream, entry.size + 1)
    except zlib.error as e:
        raise Refused(f"not a zip file that can be read: {entry.name}: {e}") from None
    if len(data) != entry.size or not inflater.eof or inflater.unused_data or inflater.unconsumed_tail:
        raise Refused(f"not a zip file that can be read: {entry.name} is not as long as the zip file says")
    if zlib.crc32(data) != entry.crc:
        raise Refused(f"not a zip file that can be read: the checksum of {entry.name} is another")
    return data
