"""The bundle: a zip file with runs and everything that is derived from them, which can be checked.

Only ``runs/`` is raw data. All other files are made from the runs, so a check makes them again (:mod:`reports.verify`).
The same runs always make the same file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import msgspec

from harness.results import Run, TestResult
from harness.safe_io.untrusted import TOML_SIZE, Allowance
from harness.safe_io.writing import write_whole
from reports.archive import LARGEST, packed, unpacked
from reports.build import made_of, ordered, parsed
from reports.model import Report, ReportError, encode
from reports.page import page

SCHEMA = "concord.bundle"
VERSION = 1
MANIFEST = "manifest.json"
LARGEST_RUNS = 16 << 20
"""Bytes of all runs in a bundle, which is 9 times two runs of all 2,341 tests, all passed."""
MOST_RUNS = 20
_MOST_TESTS = 20_000
"""Tests of all runs together; two complete runs have 4,682."""
_MOST_VALUES = 1_000_000
_LONGEST_NAMES = 4 << 20
"""Characters of tests' names.  Each name counts once, and once more for every requirement that the test proves, because
a report and its page contain it as often."""
_MOST_PIECES = 60_000
"""Pieces of a page: tests, each once more for every requirement that it proves, and their ranks."""
_MOST_REQUIREMENTS = 10_000
"""Requirements of all runs together, each once: each is a part of the page. The suites here have some 700."""
_LONGEST_HEADERS = 1 << 20
"""Bytes of the first and last records of runs, which a report contains up to eight times."""
_LONGEST_GLOBS = 256 << 10
"""Characters of all globs of waivers; the largest profile in this repository has 32,639 characters."""
_MOST_MATCHING = 100_000_000
"""The length of a test's name times that of the globs of its waiver, added over all waived tests."""

__all__ = [
    "LARGEST",
    "MANIFEST",
    "Contents",
    "Manifest",
    "made",
    "manifest_of",
    "packed",
    "unpacked",
    "write",
]


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The list of a bundle's files."""

    schema: str = SCHEMA
    version: int = VERSION
    concord: str
    """The version of Concord that made the bundle."""
    files: dict[str, str]
    """The SHA-256 of each file, by name."""


@dataclass(frozen=True)
class Contents:
    """The files of a bundle, with the report and the runs from which they are made."""

    files: dict[str, bytes]
    """The content of each file by name, without the manifest."""
    report: Report
    runs: tuple[Run, ...]
    """The runs, in the order of their names."""


def made(files: Sequence[tuple[str, bytes]]) -> Contents:
    """Make everything that is derived from some runs.

    ``files``: the name of each run and the content of its results file.
    Errors: :class:`ReportError` for runs from which no report can be made, and for more than a bundle may have.
    """
    _check_sizes(files)
    allowance = bundle_allowance()
    runs = ordered([parsed(name, data, allowance) for name, data in files])
    _check_amounts([each.run for each in runs])
    by_digest = {hashlib.sha256(data).hexdigest(): data for _, data in files}
    names = [f"runs/{number}.jsonl" for number in range(1, len(runs) + 1)]
    runs = [replace(each, name=name) for each, name in zip(runs, names, strict=True)]
    report = made_of(runs)
    results = {each.name: by_digest[each.digest] for each in runs}
    return Contents(_all_files(results, report, [each.run for each in runs]), report, tuple(each.run for each in runs))


def bundle_allowance() -> Allowance:
    """Return the allowance for reading a bundle."""
    return Allowance(values=_MOST_VALUES, lines=100_000, line=LARGEST_RUNS, tests=_MOST_TESTS)


def _check_sizes(files: Sequence[tuple[str, bytes]]) -> None:
    """Check the number and size of runs.  Errors: :class:`ReportError` for more than a bundle may have."""
    if len(files) > MOST_RUNS:
        raise ReportError(f"{len(files)} runs, and a bundle has at most {MOST_RUNS}")
    total = sum(len(data) for _, data in files)
    if total > LARGEST_RUNS:
        raise ReportError(
            f"the runs have {total >> 20} MiB, and in a bundle at most {LARGEST_RUNS >> 20}: bundle fewer of them, "
            "or run what fails with less output"
        )


def _check_amounts(runs: Sequence[Run]) -> None:
    """Check amounts that may become much larger in a report than in the runs.  Errors: :class:`ReportError`."""
    names = sum(len(t.nodeid) * (1 + len(t.requirements)) for run in runs for t in run.tests.values())
    if names > _LONGEST_NAMES:
        raise ReportError(f"names of tests, under each requirement, of more than {_LONGEST_NAMES >> 20} MiB")
    if sum(_pieces(test) for run in runs for test in run.tests.values()) > _MOST_PIECES:
        raise ReportError(f"more tests of requirements, and ranks of tests that failed, than {_MOST_PIECES:,}")
    told = {each for run in runs for each in run.requirements}
    proven = {each for run in runs for test in run.tests.values() for each in test.requirements}
    if len(told | proven) > _MOST_REQUIREMENTS:
        raise ReportError(f"more than {_MOST_REQUIREMENTS:,} requirements")
    headers = sum(len(_encoded(run.header)) + len(_encoded(run.end)) for run in runs)
    if headers > _LONGEST_HEADERS:
        raise ReportError(f"arguments and environments of more than {_LONGEST_HEADERS >> 20} MiB")
    texts = {text for run in runs if run.profile is not None for text in run.profile.texts.values()}
    if sum(map(len, texts)) > TOML_SIZE or any(len(run.profile.texts) > MOST_RUNS for run in runs if run.profile):
        raise ReportError(f"profiles of more than {TOML_SIZE >> 10} KiB, or of more than {MOST_RUNS} files")
    globs = {glob for run in runs if run.profile is not None for waiver in run.profile.waivers for glob in waiver.tests}
    if sum(map(len, globs)) > _LONGEST_GLOBS or sum(map(_matching, runs)) > _MOST_MATCHING:
        raise ReportError("waivers with more globs than can be held against tests")


def _pieces(test: TestResult) -> int:
    collectives = sum(len(rank.collectives) for rank in test.ranks)
    return (1 + len(test.requirements)) * (1 + len(test.ranks) + collectives // 20)


def _matching(run: Run) -> int:
    """Return the largest number of steps that it takes to match each waived test with the globs of its waiver."""
    waivers = run.profile.waivers if run.profile is not None else []
    longest = {waiver.place: sum(map(len, waiver.tests)) for waiver in waivers}
    return sum(len(t.nodeid) * longest.get(t.waiver, 0) for t in run.tests.values() if t.waiver)


def _encoded(value: object) -> bytes:
    return msgspec.json.encode(value) if value is not None else b""


def _all_files(found: dict[str, bytes], report: Report, runs: Sequence[Run]) -> dict[str, bytes]:
    """Return the runs and everything that is derived from them; ``found``: the raw results by name."""
    names = list(found)
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


def write(
    files: Sequence[tuple[str, bytes]], path: Path, concord: str, sign: Callable[[bytes], bytes] | None = None
) -> tuple[Report, str]:
    """Write a bundle, and return its report and the SHA-256 of its manifest.

    ``files``: as for :func:`made`; ``concord``: the version of Concord; ``sign``: makes the signature of a bundle,
    which is written to the file of :func:`signature_of`. Nothing is written if it cannot be made.
    Errors: :class:`ReportError`, also if the bundle is too large or cannot be written.
    """
    everything = made(files)
    files_of_bundle = everything.files
    total = sum(map(len, files_of_bundle.values()))
    if total > LARGEST:
        raise ReportError(f"{total >> 20} MiB, and a bundle has at most {LARGEST >> 20}: bundle fewer runs")
    manifest = manifest_of(files_of_bundle, concord)
    data = packed({**files_of_bundle, MANIFEST: manifest})
    outputs = [(path, data)] if sign is None else [(path, data), (signature_of(path), sign(data))]
    for file, content in outputs:
        try:
            write_whole(file, content)
        except OSError as e:
            raise ReportError(f"{file}: {e.strerror}") from None
    return everything.report, hashlib.sha256(manifest).hexdigest()


def signature_of(path: Path) -> Path:
    """Return the file with the signature of a bundle, which is beside it."""
    return path.with_name(f"{path.name}.sig")


def manifest_of(found: Mapping[str, bytes], concord: str) -> bytes:
    """Encode the manifest of some files."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(found.items())}
    return msgspec.json.format(msgspec.json.encode(Manifest(concord=concord, files=digests)), indent=1) + b"\n"


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip("_.+-")[-100:] or "file"
