"""The zip file of a bundle: every byte of it is one that `concord bundle` writes, or it is none."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from reports.archive import MOST_FILES, packed, unpacked
from reports.model import ReportError

FILES = {
    "manifest.json": b"{}\n" * 50,
    "runs/1.jsonl": b"one\n" * 100,
    "runs/2.jsonl": os.urandom(300),
    "suite.json": b"",
}
HEAD, LISTED, END = 30, 46, 22


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.zip"


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ReportError) as caught:
        unpacked(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """The members, the directory, and the last record."""
    (offset,) = struct.unpack_from("<I", data, len(data) - 6)
    return data[:offset], data[offset:-END], data[-END:]


def joined(members: bytes, directory: bytes, *, count: int = len(FILES), comment: bytes = b"") -> bytes:
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), len(members), len(comment))
    return members + directory + end + comment


def test_comes_back(path: Path) -> None:
    """What is packed comes back, and a program for zip files reads it, too."""
    path.write_bytes(packed(FILES))
    assert unpacked(path) == FILES
    with zipfile.ZipFile(path) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == FILES


@pytest.mark.parametrize("level", [1, 6, 9])
def test_other_zlib(path: Path, level: int) -> None:
    """A file that another version of zlib has packed otherwise is read all the same."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, data in FILES.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr, info.create_system = 0o100644 << 16, 3
            archive.writestr(info, data, zipfile.ZIP_DEFLATED, level)
    path.write_bytes(stream.getvalue())
    assert unpacked(path) == FILES


def test_every_bit_of_the_headers(path: Path) -> None:
    """Whatever bit of the zip file's own is changed, the file is none of ours: there is no room for anything."""
    data = packed({"a": b"x", "b/c": b""})
    bodies, at = set[int](), 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            at = info.header_offset + HEAD + len(info.filename)
            bodies |= {*range(at, at + info.compress_size)}
    taken = []
    for at in sorted({*range(len(data))} - bodies):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            try:
                unpacked(path)
            except ReportError:
                continue
            taken.append((at, bit))
    assert taken == []


def unicode_path() -> bytes:
    """A second name of a member, in the extra field that Info-ZIP reads and others do not."""
    members, directory, _ = parts(packed(FILES))
    name = "manifest.json"
    extra = struct.pack("<HHBI", 0x7075, 5 + 4, 1, zlib.crc32(name.encode())) + b"evil"
    at = LISTED + len(name)
    patched = directory[:30] + struct.pack("<H", len(extra)) + directory[32:at] + extra + directory[at:]
    return joined(members, patched)


def local_extra() -> bytes:
    """The same in the head of the member only."""
    members, directory, _ = parts(packed({"a": b"x"}))
    extra = struct.pack("<HHB", 0x7075, 1, 1)
    patched = members[:28] + struct.pack("<H", len(extra)) + members[30:31] + extra + members[31:]
    return joined(patched, directory, count=1)


def hidden_entry() -> bytes:
    """A member that the directory does not list."""
    members, directory, _ = parts(packed(FILES))
    hidden, _, _ = parts(packed({"runs/3.jsonl": b"hidden"}))
    return joined(members + hidden, directory)


def hidden_between() -> bytes:
    first, one, _ = parts(packed({"a": b"1"}))
    second, two, _ = parts(packed({"b": b"2"}))
    gap = b"hidden"
    moved = two[:42] + struct.pack("<I", len(first) + len(gap)) + two[46:]
    return joined(first + gap + second, one + moved, count=2)


def twice_the_same_data() -> bytes:
    """Two names for one member: more comes out than is in it (as zip bombs do that overlap)."""
    members, one, _ = parts(packed({"a": bytes(1000)}))
    return joined(members, one + one[:46] + b"b", count=2)


def behind_the_stream() -> bytes:
    """Bytes behind the end of compressed data, which count as packed."""
    members, directory, _ = parts(packed({"a": b"x" * 5000}))
    (length,) = struct.unpack_from("<I", members, 18)
    size = struct.pack("<I", length + 6)
    return joined(members[:18] + size + members[22:] + b"hidden", directory[:20] + size + directory[24:], count=1)


def other_order() -> bytes:
    members, directory, _ = parts(packed({"a": b"", "b": b""}))
    half = len(directory) // 2
    return joined(members, directory[half:] + directory[:half], count=2)


def two_directories() -> bytes:
    data = packed(FILES)
    return data + data


def of_stream(*, stream: bool) -> bytes:
    """As programs write it that can't go back in their output: sizes behind the data."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return not stream

        def tell(self) -> int:
            raise OSError

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo("manifest.json", (1980, 1, 1, 0, 0, 0))
        info.external_attr, info.create_system = 0o100644 << 16, 3
        archive.writestr(info, b"{}", zipfile.ZIP_DEFLATED)
    return pipe.getvalue()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: packed(FILES) + b"\0", "something is behind the zip file"),
        (lambda: packed(FILES) + b"PK\5\6" + bytes(18), "something is before or behind"),
        (lambda: b"\0" + packed(FILES), "something is before or behind"),
        (lambda: joined(*parts(packed(FILES))[:2], comment=b"hello"), "something is behind the zip file"),
        (unicode_path, "manifest.json has a comment, or a field"),
        (local_extra, "its directory and the head of a differ"),
        (hidden_entry, "something lies between its files and their directory"),
        (hidden_between, "something lies before or behind b"),
        (twice_the_same_data, "something lies before or behind b"),
        (behind_the_stream, "a is not as long as the zip file says"),
        (other_order, "its files are in another order"),
        (two_directories, "something is before or behind"),
        (lambda: of_stream(stream=True), "time, mode or flags of manifest.json"),
        (lambda: packed({f"{i:04}": b"" for i in range(MOST_FILES + 1)}), "1001 files"),
        (lambda: packed({"a" * 151: b""}), "no file of the name 'aaa"),
        (lambda: packed({"9" * 5000: b""}), "no file of the name '999"),
        (lambda: packed({"a": bytes(40 << 20)}), "a is packed 1 to 10"),
        (lambda: packed({"a": bytes(49 << 20)}), "49 MiB unpacked, and a bundle has at most 48"),
        (lambda: bytes(50 << 20), "larger than 49 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_not_ours(path: Path, make: Callable[[], bytes], says: str) -> None:
    """A zip file with anything in it that `concord bundle` does not write is refused in a line that says what."""
    assert says in refused(path, make())


def test_no_plain_file(tmp_path: Path) -> None:
    """A pipe, a device and a folder are refused at once, and not waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(ReportError, match="not a file"):
            unpacked(name)
