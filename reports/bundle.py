"""A bundle: the runs, and everything that follows from them, as one zip file that can be checked.

Only ``runs/`` is raw.  Whatever else is in it is made of the runs, so that checking is making it again
(:mod:`reports.verify`).  The same runs always make the same file.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from harness import results
from harness.writing import write_whole
from reports.build import build
from reports.model import Report, ReportError, encode
from reports.page import page

SCHEMA = "concord.bundle"
VERSION = 1
MANIFEST = "manifest.json"
MOST_FILES = 1000
LARGEST = 512 << 20
"""Bytes of everything in a bundle, unpacked."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*(/[A-Za-z0-9][A-Za-z0-9_.+-]*)*")
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The list of what is in a bundle."""

    schema: str = SCHEMA
    version: int = VERSION
    concord: str
    """Version of the Concord that made it."""
    files: dict[str, str]
    """Name to SHA-256."""


def contents(files: Sequence[tuple[str, bytes]], concord: str) -> dict[str, bytes]:
    """What a bundle of some runs has, by name, without its manifest.  Errors: :class:`ReportError`."""
    report = build(files)
    by_digest = {hashlib.sha256(data).hexdigest(): data for _, data in files}
    raw = [by_digest[run.sha256] for run in report.runs]
    names = [f"runs/{number}.jsonl" for number in range(1, len(raw) + 1)]
    report = build(list(zip(names, raw, strict=True)))
    found = dict(zip(names, raw, strict=True))
    runs = [results.parse(data, name) for name, data in found.items()]
    found["report.json"] = encode(report)
    found["report.html"] = page(report).encode(errors="replace")
    found["environment.json"] = _json({n: run.header.environment for n, run in zip(names, runs, strict=True)})
    found["suite.json"] = _json(
        {
            "hash": report.suite_hash,
            "concord": report.concord,
            "seeds": [run.seed for run in report.runs],
            "tests": sorted({nodeid for run in runs for nodeid in run.collected}),
        }
    )
    texts: dict[str, str] = {}
    for run in runs:
        texts.update(run.profile.texts if run.profile is not None else {})
    for number, (file, text) in enumerate(sorted(texts.items()), 1):
        found[f"profile/{number}-{_plain(PurePosixPath(file).name)}"] = text.encode(errors="surrogatepass")
    for test in report.tests:
        if test.reproducer is not None and test.reproducer.text:
            found[f"reproducers/{_plain(test.reproducer.file)}"] = test.reproducer.text.encode(errors="replace")
    return found


def write(files: Sequence[tuple[str, bytes]], path: Path, concord: str) -> tuple[Report, str]:
    """Write a bundle; returns its report, and the SHA-256 of its manifest.  Errors: :class:`ReportError`."""
    found = contents(files, concord)
    manifest = manifest_of(found, concord)
    try:
        write_whole(path, packed({**found, MANIFEST: manifest}))
    except OSError as e:
        raise ReportError(f"{path}: {e.strerror}") from None
    return msgspec.json.decode(found["report.json"], type=Report), hashlib.sha256(manifest).hexdigest()


def manifest_of(found: Mapping[str, bytes], concord: str) -> bytes:
    """The manifest of some files."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(found.items())}
    return msgspec.json.format(msgspec.json.encode(Manifest(concord=concord, files=digests)), indent=1) + b"\n"


def packed(found: Mapping[str, bytes]) -> bytes:
    """Files as a zip, in the order of names, with nothing in it that depends on time or user."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(found.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            info.create_system = 3
            archive.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
    return stream.getvalue()


def unpacked(path: Path) -> dict[str, bytes]:
    """What is in a bundle, in memory; nothing is written anywhere.

    Errors: :class:`ReportError` for what is no zip file, or one that no bundle can be: names that lead elsewhere or are
    there twice, links, encryption, more than :data:`LARGEST` bytes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _refuse(path, archive, entries)
            return {entry.filename: _content(path, archive, entry) for entry in entries}
    except OSError as e:
        raise ReportError(f"{path}: {e.strerror or e}") from None
    except ReportError:
        raise
    except Exception as e:  # zipfile raises a dozen kinds for damaged files
        raise ReportError(f"{path}: not a zip file that can be read: {e}") from None


def _refuse(path: Path, archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo]) -> None:
    seen: set[str] = set()
    if len(entries) > MOST_FILES:
        raise ReportError(f"{path}: {len(entries)} files, and a bundle has at most {MOST_FILES}")
    if archive.comment or (entries and min(entry.header_offset for entry in entries)):
        raise ReportError(f"{path}: something is before or behind the zip file in it")
    for entry in entries:
        name = ascii(entry.filename)[1:-1]
        if not _NAME.fullmatch(entry.filename) or ".." in entry.filename:
            raise ReportError(f"{path}: a bundle has no file of the name {name[:200]!r}")
        if entry.filename.lower() in seen:
            raise ReportError(f"{path}: {name} is in it twice")
        seen.add(entry.filename.lower())
        if entry.is_dir() or stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
            raise ReportError(f"{path}: {name} is no plain file")
        if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ReportError(f"{path}: {name} is encrypted, or packed in a way that a bundle is not")
    total = sum(entry.file_size for entry in entries)
    if total > LARGEST:
        raise ReportError(f"{path}: {total >> 20} MiB unpacked, and a bundle has at most {LARGEST >> 20}")


def _content(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as stream:
        data = stream.read(entry.file_size + 1)
    if len(data) != entry.file_size:
        raise ReportError(f"{path}: {entry.filename} is not as long as the zip file says")
    return data


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip("_.+-")[-100:] or "file"
