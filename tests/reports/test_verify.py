"""Bundles: what is put in comes out, the same every time; every forgery of a list is found, and said in a line."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import (
    FILE,
    LEAST,
    PROFILE,
    STARTED,
    SUITE,
    WAIVER,
    change,
    checkout,
    every_test,
    records,
    runs,
    tried,
    written,
)

from harness.requirements import LEVELS
from harness.results import TestResult
from reports import bundle
from reports.bundle import MANIFEST, manifest_of, packed, unpacked
from reports.checkout import Checkout
from reports.minimums import Minimums
from reports.model import ReportError, decode, encode
from reports.verify import Checked, verify

NOW = STARTED + 86400
ALL = frozenset(test.nodeid for test in every_test())
HERE = checkout()

Files = dict[str, bytes]


def checked(path: Path, files: Files, checkout: Checkout | None = HERE, now: float = NOW) -> Checked:
    path.write_bytes(packed(files))
    return verify(path, "0.1.0", checkout, now)


def honest(*changes: Any) -> Files:
    """The files of a bundle, with the manifest that belongs to them."""
    found = bundle.made(runs(*changes)).files if changes else dict(_untouched())
    return {**found, MANIFEST: manifest_of(found, "0.1.0")}


@functools.cache
def _untouched() -> Files:
    return bundle.made(runs()).files


def signed_off(files: Files) -> Files:
    """With a new manifest: as someone would who has changed something and knows about checksums."""
    found = {name: data for name, data in files.items() if name != MANIFEST}
    return {**found, MANIFEST: manifest_of(found, "0.1.0")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.zip"


def test_honest(path: Path) -> None:
    """A bundle that nobody has touched is what it says it is."""
    found = checked(path, honest())
    assert (found.problems, found.unchecked, found.notes) == ((), (), ())
    assert found.shown
    assert found.report is not None
    assert found.report.conformant == "L5"


TWICE = "perf/test_a.py::test_one[2"


def test_flaky(path: Path) -> None:
    """A bundle of runs with a flaky test is what it says it is, and is not conformant where that test counts."""
    found = checked(path, honest(tried(TWICE, "failed", "passed")))
    assert (found.problems, found.notes) == ((), ())
    assert found.report is not None
    assert {level.id: level.conformant for level in found.report.levels} == {
        **{f"L{number}": True for number in range(1, 6)},
        "P": False,
    }


@pytest.mark.parametrize(
    ("made", "status", "said"),
    [
        (tried(TWICE, "failed", "passed"), 0, "tests ended badly, but by its exit status none did"),
        (tried(TWICE, "flaky"), 1, "'flaky' is not a verdict of an attempt"),
        (change(TWICE, attempt=2), None, "attempt 2 of suites/perf/test_a.py::test_one[2ranks], of which there are 0"),
        (change(TWICE, attempt=0), None, "attempt 0 of suites/perf/test_a.py::test_one[2ranks]"),
    ],
    ids=["exit-status", "verdict", "first-attempt-taken-out", "attempt-0"],
)
def test_forged_attempts(path: Path, made: Any, status: int | None, said: str) -> None:
    """Attempts that no run has are said: verdicts that none comes to, some that are missing, a wrong exit status."""
    files = {f"runs/{number}.jsonl": data for number, (_, data) in enumerate(runs(made, status=status), 1)}
    files = {**honest(), **files}
    assert any(said in problem for problem in checked(path, signed_off(files)).problems)


def test_same_bytes(tmp_path: Path) -> None:
    """The same runs make the same file, in whatever order they are given."""
    for name, files in (("a.zip", runs()), ("b.zip", runs()[::-1])):
        bundle.write(files, tmp_path / name, "0.1.0")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_contents() -> None:
    """A bundle has the runs, the report, the page, the profile, the environment, the suite and the reproducers."""
    assert sorted(honest()) == [
        "environment.json",
        "manifest.json",
        "profile/1-made-up.toml",
        "report.html",
        "report.json",
        "reproducers/repro_a.py",
        "runs/1.jsonl",
        "runs/2.jsonl",
        "suite.json",
    ]


def test_failures_are_no_forgery(path: Path) -> None:
    """A bundle that tells of failures tells the truth: it is right, and not conformant."""

    found = checked(path, honest(change("dynamo/test_a.py::test_one", verdict="failed", headline="no")))
    assert found.problems == ()
    assert found.report is not None
    assert found.report.conformant == "L4"


# Forgeries of a bundle: something in it is changed, with or without a new manifest.


def altered_byte(files: Files) -> Files:
    return {**files, "runs/1.jsonl": files["runs/1.jsonl"].replace(b'"seconds":2.0', b'"seconds":2.1', 1)}


def dropped_test(files: Files) -> Files:
    lines = files["runs/1.jsonl"].splitlines(keepends=True)
    kept = [line for line in lines if not (b'"record":"test"' in line and b"dynamo/test_a.py::test_one[2" in line)]
    return signed_off({**files, "runs/1.jsonl": b"".join(kept)})


def edited_profile(files: Files) -> Files:
    name = "profile/1-made-up.toml"
    return signed_off({**files, name: files[name].replace(b"2027", b"2037")})


def edited_verdict_in_report(files: Files) -> Files:
    report = decode(files["report.json"], "x")
    report.tests[-1].verdict = "failed"
    return signed_off({**files, "report.json": encode(report)})


def better_verdict(files: Files) -> Files:
    report = decode(files["report.json"], "x")
    for level in report.levels:
        level.answer, level.reds, level.missing = "conformant", [], []
    report.conformant = "L5"
    return signed_off({**files, "report.json": encode(report)})


def edited_verdict_in_results(files: Files) -> Files:
    data = files["runs/1.jsonl"].replace(b'"verdict":"waived"', b'"verdict":"passed"')
    return signed_off({**files, "runs/1.jsonl": data})


def dropped_run(files: Files) -> Files:
    return signed_off({name: data for name, data in files.items() if name != "runs/2.jsonl"})


def no_run(files: Files) -> Files:
    return signed_off({name: data for name, data in files.items() if not name.startswith("runs/")})


def renamed_test(files: Files) -> Files:
    data = files["runs/1.jsonl"]
    line = next(x for x in data.splitlines(keepends=True) if b'"record":"test"' in x and b"dynamo/" in x)
    return signed_off({**files, "runs/1.jsonl": data.replace(line, line.replace(b"test_one[2", b"test_won[2"))})


def swapped_environment(files: Files) -> Files:
    data = files["environment.json"].replace(b"A processor", b"A better one")
    return signed_off({**files, "environment.json": data})


def truncated_results(files: Files) -> Files:
    data = files["runs/2.jsonl"]
    return signed_off({**files, "runs/2.jsonl": data[: len(data) - 40]})


def extra_file(files: Files) -> Files:
    return {**files, "readme.txt": b"trust me"}


def extra_file_listed(files: Files) -> Files:
    return signed_off({**files, "readme.txt": b"trust me"})


def dropped_file(files: Files) -> Files:
    return {name: data for name, data in files.items() if name != "suite.json"}


def edited_page(files: Files) -> Files:
    data = files["report.html"].replace(b"Conformant at L5", b"Conformant at L9")
    return signed_off({**files, "report.html": data})


def edited_manifest(files: Files) -> Files:
    return {**files, MANIFEST: files[MANIFEST].replace(b'"report.html": "', b'"report.html": "0')}


def other_reproducer(files: Files) -> Files:
    return signed_off({**files, "reproducers/repro_a.py": b"import os; os.remove('x')"})


def garbage_run(files: Files) -> Files:
    return signed_off({**files, "runs/1.jsonl": b"garbage\n"})


def edited_suite(files: Files) -> Files:
    return signed_off({**files, "suite.json": files["suite.json"].replace(b"5" * 64, b"6" * 64)})


FORGERIES: list[tuple[Callable[[Files], Files], str]] = [
    (altered_byte, "runs/1.jsonl: its checksum differs from the one in the manifest"),
    (lambda f: signed_off(altered_byte(f)), "runs/1.jsonl: line 41: the file is not the one that the run wrote"),
    (dropped_test, "runs/1.jsonl: tests were collected but have no result: suites/dynamo/test_a.py::test_one[2ranks]"),
    (edited_profile, "profile/1-made-up.toml: not the profile that the runs went by"),
    (edited_verdict_in_report, "report.json: test suites/tp_extension/test_a.py::test_two[3ranks-float32] says failed"),
    (
        edited_verdict_in_results,
        "runs/1.jsonl: suites/replicate/test_a.py::test_two[2ranks-float32]: is passed but has",
    ),
    (edited_verdict_in_results, "runs/1.jsonl: its last line counts 22 passed, 1 unsupported, 1 waived, but its tests"),
    (dropped_run, "report.json: is of 2 runs, and there are 1"),
    (dropped_run, "report.json: says conformant at L5; the runs say none"),
    (no_run, "runs/: the bundle has no run"),
    (renamed_test, "runs/1.jsonl: tests have a result but were never collected: suites/dynamo/test_a.py::test_won[2"),
    (swapped_environment, "environment.json: not the environment in which the runs were made"),
    (truncated_results, "runs/2.jsonl: the run was cut off before its end"),
    (extra_file, "readme.txt: the manifest does not list it"),
    (extra_file_listed, "readme.txt: nothing in the runs makes such a file"),
    (dropped_file, "suite.json: the manifest lists it, but the bundle lacks it"),
    (lambda f: signed_off(dropped_file(f)), "suite.json: the runs make it, and it is not there"),
    (edited_page, "report.html: not what the runs make"),
    (edited_manifest, "report.html: its checksum differs from the one in the manifest"),
    (other_reproducer, "reproducers/repro_a.py: not what the runs make"),
    (garbage_run, "runs/1.jsonl, line 1: "),
    (edited_suite, "suite.json: not what the runs make"),
]


@pytest.mark.parametrize(("forge", "says"), FORGERIES, ids=[f"{i}-{f.__name__}" for i, (f, _) in enumerate(FORGERIES)])
def test_forgery(path: Path, forge: Callable[[Files], Files], says: str) -> None:
    """Whatever of a bundle is changed is found."""
    found = checked(path, forge(honest()))
    assert any(problem.startswith(says) for problem in found.problems), found.problems


def test_better_verdict(path: Path) -> None:
    """A report that claims more than its runs say is found."""
    files = better_verdict(honest(change("collectives/test_a.py::test_one[2", verdict="failed", headline="no")))
    assert "report.json: says conformant at L5; the runs say none" in checked(path, files).problems


def answered(answer: str, **fields: Any) -> Callable[[Files], Files]:
    """A report that gives all levels another answer, and says other things of itself."""

    def forge(files: Files) -> Files:
        report = decode(files["report.json"], "x")
        for level in report.levels:
            level.answer = answer
        for key, value in fields.items():
            setattr(report, key, value)
        return signed_off({**files, "report.json": encode(report)})

    return forge


def failing() -> Files:
    return honest(change("collectives/test_a.py::test_one[2", verdict="failed", headline="no"))


def test_better_answer(path: Path) -> None:
    """A report that calls not shown what is not conformant is found, and so is one that calls it conformant."""
    found = checked(path, answered("not shown")(failing())).problems
    assert "report.json: says that L1 is not shown; the runs say that it is not conformant" in found
    found = checked(path, answered("conformant")(failing())).problems
    assert "report.json: says that L1 is conformant; the runs say that it is not" in found
    assert any(
        line.startswith("report.json: says that L1 is conformant, but checked locally it is not: ") for line in found
    )


def test_other_minimums(path: Path) -> None:
    """Levels that are judged by other minimums are judged again by those here: wrong, or unchecked if a Concord of
    another version judged them."""
    forged = answered("conformant", levels_version=7, conformant="L5")(failing())
    found = checked(path, forged)
    assert "report.json: levels_version is not what the runs say" in found.problems
    path.write_bytes(packed(claimed_by_another(forged)))
    found = verify(path, "0.1.0", HERE, NOW)
    said = (
        "report.json: its levels are judged by version 7 of the minimums, and here by version 1; read the one made here"
    )
    assert (said in found.unchecked, found.shown) == (True, False)
    assert found.report is not None
    assert [level.answer for level in found.report.levels[:5]] == ["not conformant"] * 5


def test_minimums_are_those_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that was made with lower minimums than those here reaches no level here."""
    files = honest()
    more = msgspec.structs.replace(LEAST, world_sizes=(2, 3, 4))
    here = Minimums(version=2, levels=dict.fromkeys(LEVELS, more))
    monkeypatch.setattr("reports.minimums.shipped", lambda: here)
    found = checked(path, files)
    assert any(line.startswith("report.json: says that L1 is conformant; the runs say") for line in found.problems)
    assert found.report is not None
    assert (found.report.conformant, found.report.levels_version) == ("", 2)


# Forgeries of the runs, with everything that follows from them made anew, counts and digests as well.


def header(**fields: Any) -> Callable[[list[Any]], None]:
    def apply(made: list[Any]) -> None:
        for key, value in fields.items():
            setattr(made[0], key, value)

    return apply


def waiver_added_afterwards(made: list[Any]) -> None:
    for record in made:
        if type(record).__name__ == "ProfileText":
            more = msgspec.structs.replace(record.waivers[0], place=f"{FILE}:99", tests=["*"], reason="well")
            record.waivers = [*record.waivers, more]
    change("dynamo/test_a.py::test_one[2", verdict="waived", waiver=f"{FILE}:99", bare="failed")(made)


def waiver_written_afterwards(made: list[Any]) -> None:
    for record in made:
        if type(record).__name__ == "ProfileText":
            record.texts = {FILE: PROFILE.replace("test_two[2*]", "*")}


def without_tests(made: list[Any]) -> None:
    gone = "suites/dynamo/test_a.py::test_one[2ranks]"
    made[1].tests = [name for name in made[1].tests if name != gone]
    made[:] = [r for r in made if not (isinstance(r, TestResult) and r.nodeid == gone)]


def without_requirement(made: list[Any]) -> None:
    made[:] = [r for r in made if getattr(r, "id", "") != "DYNAMO-ONE-01"]


REMADE: list[tuple[Any, str]] = [
    (waiver_added_afterwards, f"runs/1.jsonl: the waiver {FILE}:99 is not in the profile's text"),
    (waiver_written_afterwards, f"runs/1.jsonl: the text of {FILE} is not the one that its hash is of"),
    (
        change("dynamo/test_a.py::test_one[2", verdict="waived", waiver="x:1", bare="failed"),
        "and the profile has no such",
    ),
    (change("test_two[2ranks-float32]", verdict="waived", waiver=WAIVER, bare="failed"), "which is not about it"),
    (change("replicate/test_a.py::test_two[2", bare="hung"), f"waived by {WAIVER}, which does not cover hung"),
    (change("replicate/test_a.py::test_two[2", bare=""), "is waived without its waiver and original verdict"),
    (change("replicate/test_a.py::test_two[2", verdict="passed"), "is passed but has the evidence of a failure"),
    (change("dynamo/test_a.py::test_one[2", verdict="fine"), "'fine' is not a verdict"),
    (change("dynamo/test_a.py::test_one[2", verdict="unsupported"), "is unsupported without a reason"),
    (change("dynamo/test_a.py::test_one[2", stack="perf"), "its stack is 'perf', but by its name it is"),
    (change("dynamo/test_a.py::test_one[2", finished=STARTED + 9e6), "tests ran outside the time of the run: suites"),
    (change("dynamo/test_a.py::test_one[2", seconds=-5.0), "the time of a test is negative"),
    (
        change("dynamo/test_a.py::test_one[2", requirements=["A-B-01"]),
        "the run has no sentence for the requirements A-B-01",
    ),
    (without_requirement, "the run has no sentence for the requirements DYNAMO-ONE-01"),
    (without_tests, "missing tests of dynamo: suites/dynamo/test_a.py::test_one[2ranks]"),
    (header(started=NOW + 1e6), "it ran in the future"),
    (header(started=STARTED + 9e3), "it ended before it began"),
    (header(profile="other"), "it went by the profile 'other', and the text is that of 'made-up'"),
    (header(profile_hash="0" * 64), f"the text of {FILE} is not the one that its hash is of"),
]


@pytest.mark.parametrize(("alter", "says"), REMADE, ids=[str(i) for i in range(len(REMADE))])
def test_forged_runs(path: Path, alter: Any, says: str) -> None:
    """Raw results that contradict themselves, the profile or the suite are found, with everything else made anew."""
    found = checked(path, honest(alter))
    assert any(says in problem for problem in found.problems), found.problems


def test_expired_waiver(path: Path) -> None:
    """A waiver that had had its last day when the test was run waives nothing."""
    late = PROFILE.replace("2027-06-30", "2026-01-31")

    def apply(made: list[Any]) -> None:
        made[0].profile_hash = hashlib.sha256(late.encode()).hexdigest()
        for record in made:
            if type(record).__name__ == "ProfileText":
                record.texts = {FILE: late}
                record.waivers[0].expires = "2026-01-31"

    problems = checked(path, honest(apply)).problems
    assert any(f"waived by {WAIVER}, which had expired on 2026-01-31" in problem for problem in problems)


def test_exit_status(path: Path) -> None:
    """Failures and an exit status that tells of none do not go together."""
    first = records()
    change("dynamo/test_a.py::test_one[2", verdict="failed")(first)
    found = bundle.made([("a", written(first, status=0))]).files
    problems = checked(path, signed_off(found)).problems
    assert "runs/1.jsonl: tests ended badly, but by its exit status none did" in problems


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"environment": {"torch": "2.12.0"}}, "the runs differ in the environment (torch): 2.13.0 and 2.12.0"),
        ({"suite_hash": "6" * 64}, "the runs differ in the suite (its hash): 555555555555 and 666666666666"),
        ({"subject": "reference"}, "the runs differ in the subject: torch and reference"),
    ],
)
def test_runs_of_different_things(path: Path, fields: dict[str, Any], says: str) -> None:
    """Runs of one bundle are on the same environment, suite and subject."""
    second = records("123", drawn=True, later=1000)
    header(**fields)(second)
    found = bundle.made([("a", written(records())), ("b", written(second))]).files
    assert says in checked(path, signed_off(found)).problems


def test_uneven_runs(path: Path) -> None:
    """A test that one whole run has and the other has not is missing in one of them."""
    second = records("123", drawn=True, later=1000)
    without_tests(second)
    found = bundle.made([("a", written(records())), ("b", written(second))]).files
    problems = checked(path, signed_off(found), None).problems
    says = "each run says that it ran all of dynamo, but these are not in every run: "
    assert f"{says}suites/dynamo/test_a.py::test_one[2ranks]" in problems


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (None, "there is no local suite to compare it with"),
        (Checkout(""), "there is no local suite to compare it with"),
        (
            dataclasses.replace(HERE, suite_hash="0" * 64),
            "its suite (555555555555) differs from the local one (000000000000)",
        ),
        (Checkout(SUITE), "its suite is the local one, but the tests of the local suite were not collected"),
    ],
    ids=["none", "no-suites", "other", "not-collected"],
)
def test_other_suite(path: Path, here: Checkout | None, says: str) -> None:
    """Without the same suite at hand nothing is shown, whatever the bundle says: no level is conformant."""
    found = checked(path, honest(without_tests), here)
    assert found.problems == ()
    assert any(line.startswith(says) for line in found.unchecked)
    assert not found.shown
    assert found.report is not None
    assert (found.report.conformant, [level.conformant for level in found.report.levels]) == ("", [False] * len(LEVELS))


def test_other_version(path: Path) -> None:
    """What another version of Concord has made of the runs is made anew; its page is named as unchecked."""
    path.write_bytes(packed(edited_page(honest())))
    found = verify(path, "9.9.9", HERE, NOW)
    assert found.problems == ()
    assert found.unchecked == (
        "report.html: a page of another version of Concord, which nobody has checked: do not open it",
    )
    assert not found.shown


def claimed_by_another(found: Files) -> Files:
    """A bundle that says of itself that another version has made it."""
    files = {name: data for name, data in found.items() if name != MANIFEST}
    return {**files, MANIFEST: manifest_of(files, "9.9.9")}


def test_other_version_with_other_verdicts(path: Path) -> None:
    """A report of another version is compared verdict by verdict; only how it is laid out is its own affair."""
    failed = change("dynamo/test_a.py::test_one[2", verdict="failed", headline="no")
    path.write_bytes(packed(claimed_by_another(better_verdict(honest(failed)))))
    problems = verify(path, "0.1.0", HERE, NOW).problems
    assert "report.json: says conformant at L5; the runs say L4" in problems
    path.write_bytes(packed(claimed_by_another(edited_verdict_in_report(honest()))))
    problems = verify(path, "0.1.0", HERE, NOW).problems
    assert any(line.startswith("report.json: test suites/tp_extension") for line in problems)


# What is no bundle


def raw_zip(*entries: tuple[zipfile.ZipInfo | str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name if isinstance(name, zipfile.ZipInfo) else member(name), data)
    return stream.getvalue()


def member(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    """A member with the headers that a bundle's have."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.external_attr, info.create_system, info.compress_type = mode << 16, 3, zipfile.ZIP_DEFLATED
    return info


def link() -> zipfile.ZipInfo:
    return member("runs/1.jsonl", stat.S_IFLNK | 0o777)


def lying_size() -> bytes:
    data = bytearray(raw_zip(("runs/1.jsonl", b"x" * 10_000)))
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 10)
    return bytes(data)


def huge() -> bytes:
    data = bytearray(raw_zip(*[(f"runs/{i}.jsonl", b"x") for i in range(1, 4)]))
    at = -1
    while (at := data.find(b"PK\x01\x02", at + 1)) >= 0:
        data[at + 24 : at + 28] = struct.pack("<I", 1 << 30)
    return bytes(data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: b"", "not a zip file"),
        (lambda: b"PK\x03\x04garbage", "not a zip file"),
        (lambda: packed(honest())[:-200], "not a zip file"),
        (lambda: raw_zip(), "it has no manifest.json"),
        (lambda: raw_zip(("../evil", b"")), "no file of the name '../evil'"),
        (lambda: raw_zip(("runs/../../evil", b"")), "no file of the name"),
        (lambda: raw_zip(("/etc/x", b"")), "no file of the name '/etc/x'"),
        (lambda: raw_zip(("a\\b", b"")), "no file of the name"),
        (lambda: raw_zip(("runs/", b"")), "no file of the name 'runs/'"),
        (lambda: raw_zip(("\u202etxt", b"")), "no file of the name"),
        (lambda: raw_zip(("a", b""), ("a", b"")), "a is in it twice"),
        (lambda: raw_zip(("a", b""), ("A", b"")), "A is in it twice"),
        (lambda: raw_zip((link(), b"/etc/passwd")), "runs/1.jsonl is no plain file"),
        (lambda: b"#!/bin/sh\n" + packed(honest()), "something is before or behind"),
        (lambda: packed(honest()) + b"\0", "something is behind the zip file"),
        (huge, "3072 MiB unpacked"),
        (lying_size, "x.zip: "),
        (lambda: raw_zip(*[(f"f{i}", b"") for i in range(1001)]), "1001 files"),
        (lambda: raw_zip((MANIFEST, b"garbage")), "manifest.json: JSON is malformed"),
        (lambda: raw_zip((MANIFEST, b"[" * 60_000)), "manifest.json: nested more than 32 deep"),
        (lambda: raw_zip((MANIFEST, b'{"concord":"1","files":{},"schema":"x"}')), "not a bundle of Concord"),
        (lambda: raw_zip((MANIFEST, b'{"concord":"1","files":{},"version":9}')), "version 9"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_bundle(path: Path, make: Callable[[], bytes], says: str) -> None:
    """What is no bundle is refused with one line, and nothing of it is written anywhere."""
    path.write_bytes(make())
    with pytest.raises(ReportError) as caught:
        verify(path, "0.1.0", HERE, NOW)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == [path]


def test_no_file(path: Path) -> None:
    """A file that is not there is said to be."""
    with pytest.raises(ReportError, match="No such file"):
        unpacked(path)


def test_every_byte(path: Path) -> None:
    """A changed byte anywhere in a bundle is found, or makes it none."""
    data = packed(honest())
    for at in range(0, len(data), len(data) // 20):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            found = verify(path, "0.1.0", HERE, NOW)
        except ReportError:
            continue
        same = unpacked(path) == {**honest()}  # what fills up the last byte of compressed data means nothing
        assert found.problems or same, at


def test_suite_file() -> None:
    """The suite's hash, the seeds and the tests are in a file of their own, for people."""
    found = json.loads(honest()["suite.json"])
    assert (found["hash"], found["seeds"], found["tests"]) == (SUITE, ["default", "123"], sorted(ALL))
