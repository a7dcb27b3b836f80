"""Checks a bundle: everything in it against the raw results, and the raw results against themselves and the suite.

What it can't see: raw results that someone has made up consistently, digests and all.  Against that there is only a
signature of whoever ran the suite, or running it again (docs/reports.md).
"""

from __future__ import annotations

import datetime
import fnmatch
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness import results
from harness.results import BAD, UNSUPPORTED, VERDICTS, Run, TestResult, WaiverEntry
from harness.untrusted import Refused, json_checked, said, toml
from reports import bundle
from reports.build import differences
from reports.bundle import MANIFEST, Manifest
from reports.model import Report, ReportError, decode

_SLACK = 5.0
"""Seconds by which the clocks of processes and roundings may disagree."""
_SHOWN = 3


@dataclass(frozen=True)
class Checkout:
    """The suite that the bundle is held against."""

    suite_hash: str
    tests: frozenset[str] = frozenset()
    """Every test of it; empty: nobody has collected them."""


@dataclass(frozen=True)
class Checked:
    """What came of a check."""

    report: Report | None
    problems: tuple[str, ...]
    """What is not as it should be, a line each; none: the bundle is what it says it is."""
    notes: tuple[str, ...] = ()
    """What could not be checked, and why."""
    manifest: str = ""
    """SHA-256 of the manifest, which stands for the whole bundle."""
    runs: tuple[Run, ...] = field(default=(), repr=False)


def verify(path: Path, concord: str, checkout: Checkout | None, now: float) -> Checked:
    """Check a bundle.  ``concord``: the version that checks; ``now``: seconds since the epoch.

    Errors: :class:`ReportError` for a file that is no bundle.
    """
    found = bundle.unpacked(path)
    manifest = _manifest(path, found)
    digest = hashlib.sha256(found.pop(MANIFEST)).hexdigest()
    problems = list(_checksums(manifest, found))
    raw = [(name, data) for name, data in found.items() if re.fullmatch(r"runs/[1-9]\d{0,3}\.jsonl", name)]
    raw.sort(key=lambda pair: int(pair[0][5:-6]))
    if not raw:
        return Checked(None, (*problems, "runs/: there is no run in it"), manifest=digest)
    try:
        made = bundle.made(raw)
    except ReportError as e:
        return Checked(None, (*problems, str(e)), manifest=digest)
    again, runs = made.files, made.runs
    notes: list[str] = []
    problems += _derived(found, again, notes if manifest.concord != concord else None)
    for name, run in zip(again, runs, strict=False):  # the runs come first in what is made of them
        problems += (f"{name}: {problem}" for problem in run_problems(run, now))
    for what, values in differences(runs).items():
        problems.append(f"the runs differ in {what}: {' and '.join(value or 'none' for value in values)}")
    if len({tuple(sorted(run.tests)) for run in runs}) > 1 and all(run.end for run in runs):
        problems += _uneven(runs)
    problems += _suite(runs, checkout, notes)
    return Checked(made.report, tuple(dict.fromkeys(problems)), tuple(notes), digest, runs)


def _manifest(path: Path, found: Mapping[str, bytes]) -> Manifest:
    if MANIFEST not in found:
        raise ReportError(f"{path}: not a bundle of Concord: it has no {MANIFEST}")
    try:
        manifest = msgspec.json.decode(json_checked(found[MANIFEST], bundle.bundle_allowance()), type=Manifest)
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ReportError(f"{path}: {MANIFEST}: {said(e)}") from None
    if manifest.schema != bundle.SCHEMA:
        raise ReportError(f"{path}: not a bundle of Concord")
    if manifest.version > bundle.VERSION:
        raise ReportError(
            f"{path}: version {manifest.version}, and this Concord reads up to {bundle.VERSION}; update it"
        )
    return manifest


def _checksums(manifest: Manifest, found: Mapping[str, bytes]) -> Iterator[str]:
    for name, digest in manifest.files.items():
        if name not in found:
            yield f"{name}: the manifest lists it, and it is not there"
        elif hashlib.sha256(found[name]).hexdigest() != digest:
            yield f"{name}: its checksum is not the one in the manifest"
    for name in found:
        if name not in manifest.files:
            yield f"{name}: the manifest does not list it"


def _derived(found: Mapping[str, bytes], again: Mapping[str, bytes], notes: list[str] | None) -> Iterator[str]:
    """What in a bundle is not what its runs make.  ``notes``: for what another version may make otherwise."""
    for name in sorted({*found, *again}):
        if name not in again:
            yield f"{name}: nothing in the runs makes such a file"
        elif name not in found:
            yield f"{name}: the runs make it, and it is not there"
        elif found[name] == again[name]:
            continue
        elif name == "report.json":
            yield from _report(found[name], again[name])
        elif name == "report.html" and notes is not None:
            notes.append("report.html: made by another version of Concord, so it can't be compared; trust report.json")
        elif name.startswith("profile/"):
            yield f"{name}: not the profile that the runs went by"
        elif name == "environment.json":
            yield f"{name}: not the environment in which the runs were made"
        else:
            yield f"{name}: not what the runs make"


def _report(claimed: bytes, again: bytes) -> Iterator[str]:
    if len(claimed) > 2 * len(again):
        yield f"report.json: has {len(claimed):,} bytes, and the runs make {len(again):,}"
        return
    try:
        old, new = (decode(data, "report.json", bundle.bundle_allowance()) for data in (claimed, again))
    except ReportError as e:
        yield str(e)
        return
    if old == new:
        yield "report.json: says the same as the runs, in other bytes"
        return
    if len(old.runs) != len(new.runs):
        yield f"report.json: is of {len(old.runs)} runs, and there are {len(new.runs)}"
    if old.conformant != new.conformant:
        yield f"report.json: says conformant at {old.conformant or 'no level'}; the runs say {new.conformant or 'none'}"
    for what in ("tests", "requirements", "waivers"):
        yield from _entries(what[:-1], getattr(old, what), getattr(new, what))
    if msgspec.structs.replace(old, runs=[]) == msgspec.structs.replace(new, runs=[]) and len(old.runs) == len(
        new.runs
    ):
        yield "report.json: says something else about the runs than they do"
    others = [
        f for f in Report.__struct_fields__ if f not in ("tests", "requirements", "waivers", "runs", "conformant")
    ]
    for name in others:
        if getattr(old, name) != getattr(new, name):
            yield f"report.json: {name} is not what the runs say"


def _entries(what: str, old: Iterable[Any], new: Iterable[Any]) -> Iterator[str]:
    key = {"test": "nodeid", "requirement": "id", "waiver": "place"}[what]
    claimed, real = ({getattr(each, key): each for each in entries} for entries in (old, new))
    for name in sorted({*claimed, *real}):
        if name not in real:
            yield f"report.json: {what} {name} is in no run"
        elif name not in claimed:
            yield f"report.json: {what} {name} is in the runs, and not here"
        elif claimed[name] != real[name]:
            pairs = [(getattr(each, "verdict", "") or "") for each in (claimed[name], real[name])]
            said = f"says {pairs[0]}, and the runs say {pairs[1]}" if pairs[0] != pairs[1] else "is not as in the runs"
            yield f"report.json: {what} {name} {said}"


def run_problems(run: Run, now: float) -> Iterator[str]:
    """What is wrong with the raw results of a run, in themselves."""
    if run.header.version < 2:
        yield f"version {run.header.version} of the results keeps too little to be checked"
        return
    if run.torn or not run.complete:
        yield "the run was cut off before its end"
    if run.damaged:
        yield run.damaged
    elif run.end is not None and not run.end.digest:
        yield "its last line has no digest"
    yield from _tests(run)
    yield from _times(run, now)
    yield from _profile(run)


def _tests(run: Run) -> Iterator[str]:
    missing = [
        n for n in run.collected if run.tests[n] == TestResult(nodeid=n, verdict="not-run", stack=run.tests[n].stack)
    ]
    if missing and run.complete:
        yield _listed("collected, and without a result", missing)
    stray = [nodeid for nodeid in run.tests if nodeid not in run.collected]
    if stray:
        yield _listed("with a result, and never collected", stray)
    for test in run.tests.values():
        why = _contradiction(test)
        if why:
            yield f"{test.nodeid}: {why}"
    unknown = sorted({r for test in run.tests.values() for r in test.requirements} - set(run.requirements))
    if unknown:
        yield f"no sentence is there for the requirements {', '.join(unknown[:_SHOWN])}"
    if run.end is None:
        return
    counts = {verdict: count for verdict, count in run.counts().items() if count}
    if counts != run.end.counts:
        yield f"its last line counts {_shown(run.end.counts)}, and its tests are {_shown(counts)}"
    if run.exit_status == 0 and any(verdict in counts for verdict in BAD):
        yield "tests ended badly, and pytest's exit status says that none did"


def _contradiction(test: TestResult) -> str:
    if test.verdict not in VERDICTS:
        return f"{test.verdict!r} is no verdict"
    if test.stack != results.stack_of(test.nodeid):
        return f"its stack is {test.stack!r}, and its name says another"
    if test.verdict in ("passed", "unsupported", "not-run") and (test.headline or test.ranks or test.waiver):
        return f"says {test.verdict}, and carries the evidence of a failure"
    if test.verdict == "unsupported" and not test.reason.startswith(UNSUPPORTED):
        return "says unsupported, and not why"
    if test.verdict == "waived" and not (test.waiver and test.bare in BAD):
        return "says waived, and not by which waiver and what it came to"
    return ""


def _times(run: Run, now: float) -> Iterator[str]:
    started = run.header.started
    ended = run.end.finished if run.end is not None else now
    if started > now + _SLACK or ended > now + _SLACK:
        yield "it was run in the future"
    if ended < started:
        yield "it ended before it began"
    outside = [
        test.nodeid
        for test in run.tests.values()
        if test.finished and not started - _SLACK <= test.finished - test.seconds <= test.finished <= ended + _SLACK
    ]
    if outside:
        yield _listed("run at a time at which the run was not", outside)
    if any(test.seconds < 0 for test in run.tests.values()):
        yield "a test took less than no time"


def _profile(run: Run) -> Iterator[str]:
    profile, header = run.profile, run.header
    waived = [test for test in run.tests.values() if test.verdict == "waived"]
    if profile is None:
        if header.profile or waived:
            yield f"the text of its profile {header.profile!r} is not there"
        return
    text = profile.texts.get(profile.file)
    if text is None:
        yield f"the text of {profile.file} is not there"
    elif (
        hashlib.sha256("\0".join(profile.texts.values()).encode(errors="surrogatepass")).hexdigest()
        != header.profile_hash
    ):
        yield f"the text of {profile.file} is not the one that its hash is of"
    if profile.name != header.profile:
        yield f"it went by the profile {header.profile!r}, and the text is that of {profile.name!r}"
    try:
        written = {_key(table, kind) for kind, table in _waivers_in(profile.texts.values())}
    except Refused as e:
        yield f"its profile, line {e.line}: {e}"
        return
    entries = {entry.place: entry for entry in profile.waivers}
    for entry in profile.waivers:
        if (entry.intermittent, tuple(entry.tests), entry.reason, entry.link, entry.expires) not in written:
            yield f"the waiver {entry.place} is not in the profile's text"
    day = datetime.datetime.fromtimestamp(header.started, datetime.UTC).date().isoformat()
    for test in waived:
        why = _uncovered(test, entries.get(test.waiver), day)
        if why:
            yield f"{test.nodeid}: {why}"


def _waivers_in(texts: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for text in texts:
        yield from _tables(text)


@functools.lru_cache(bundle.MOST_RUNS)
def _tables(text: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """The waivers of a profile's text, which all runs of a bundle have.  Errors: :class:`Refused`."""
    document = toml(text.replace("\r\n", "\n"))
    lists = ((kind, document.get(kind, [])) for kind in ("waiver", "intermittent"))
    return tuple((kind, t) for kind, tables in lists if isinstance(tables, list) for t in tables if isinstance(t, dict))


def _key(table: Mapping[str, Any], kind: str) -> tuple[bool, tuple[str, ...], str, str, str]:
    tests = table.get("tests", ())
    return (
        kind == "intermittent",
        tuple(map(str, tests)) if isinstance(tests, list) else (str(tests),),
        str(table.get("reason")),
        str(table.get("link")),
        str(table.get("expires")),
    )


def _uncovered(test: TestResult, entry: WaiverEntry | None, day: str) -> str:
    if entry is None:
        return f"waived by {test.waiver}, and the profile has no such waiver"
    if not _about(entry, test.nodeid):
        return f"waived by {entry.place}, which is not about it"
    if test.bare not in entry.verdicts:
        return f"waived by {entry.place}, which does not cover {test.bare}"
    if not entry.applies:
        return f"waived by {entry.place}, which is about another torch or subject"
    if day > entry.expires:
        return f"waived by {entry.place}, which had expired on {entry.expires}"
    return ""


def _about(entry: WaiverEntry, nodeid: str) -> bool:
    return any(_glob(glob).match(nodeid) for glob in entry.tests)


@functools.lru_cache(100_000)
def _glob(glob: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(glob.replace("[", "[[]")))


def _uneven(runs: Sequence[Run]) -> Iterator[str]:
    for stack in {stack for run in runs if run.end for stack in run.end.whole}:
        sets = [
            {t for t in run.tests if results.stack_of(t) == stack} for run in runs if run.end and stack in run.end.whole
        ]
        odd = set[str]().union(*sets) - sets[0].intersection(*sets)
        if odd:
            yield _listed(f"each run has all of {stack}, and yet not in every one", odd)


def _suite(runs: Sequence[Run], checkout: Checkout | None, notes: list[str]) -> Iterator[str]:
    """Tests against those of the suite, where it is the same one."""
    digest = runs[0].header.suite_hash
    if checkout is None or not checkout.suite_hash:
        notes.append("no suite here to hold it against: run this in a checkout of the same suite")
        return
    if digest != checkout.suite_hash:
        notes.append(
            f"its suite ({digest[:12] or 'unknown'}) is not the one here ({checkout.suite_hash[:12]}), so nobody has "
            "checked that all tests are there, and that they are unchanged"
        )
        return
    if not checkout.tests:
        notes.append("its suite is the one here; that every test of it is there was not checked")
        return
    for number, run in enumerate(runs, 1):
        for stack in run.end.whole if run.end else ():
            there = {test for test in checkout.tests if results.stack_of(test) == stack}
            mine = {test for test in run.tests if results.stack_of(test) == stack}
            if there - mine:
                yield f"runs/{number}.jsonl: {_listed(f'tests of {stack} that are missing', sorted(there - mine))}"
            if mine - there:
                yield f"runs/{number}.jsonl: {_listed(f'no tests of {stack}', sorted(mine - there))}"


def _listed(what: str, names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{what}: {', '.join(every[:_SHOWN])}{more}"


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "nothing"
