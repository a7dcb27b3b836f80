"""Runs that someone has forged with care: counts, digests, exit status, report and manifest all fit what was forged.

Each is disproved by the suite, the profile's text, the arguments or the run itself, and the message names what it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import (
    FILE,
    PROFILE,
    STARTED,
    WAIVER,
    Change,
    change,
    checkout,
    evidence,
    records,
    written,
)

from harness.results import (
    VERSION,
    ProfileText,
    Reproducer,
    RequirementText,
    RunEnd,
    RunHeader,
    TestResult,
    WaiverEntry,
)
from harness.thorough.effort import LARGEST
from reports import bundle
from reports.bundle import MANIFEST, contents, manifest_of, packed
from reports.coherence import INTRODUCED
from reports.model import ReportError
from reports.verify import Checked, verify

NOW = STARTED + 86400
ONE = "suites/dynamo/test_a.py::test_one[2ranks]"
TWO = "suites/dynamo/test_a.py::test_two[2ranks-float32]"
CASE = "suites/collectives/test_a.py::test_one[3ranks]"
WAIVED = "suites/replicate/test_a.py::test_two[2ranks-float32]"


def checked(path: Path, *changes: Change, also: Callable[[list[bytes]], None] | None = None, **how: Any) -> Checked:
    """The check of a bundle of two runs with these changes, everything that follows from them made anew.

    ``also``: a change to the lines of each file; ``how``: for :func:`invented.written`.
    """
    files = []
    for name, made in (("first", records()), ("second", records("123", drawn=True, later=1000))):
        for each in changes:
            each(made)
        data = written(made, **how)
        if also is not None:
            data = relined(data, also)
        files.append((name, data))
    found = contents(files, "0.1.0")
    path.write_bytes(packed({**found, MANIFEST: manifest_of(found, "0.1.0")}))
    return verify(path, "0.1.0", checkout(), NOW)


def relined(data: bytes, also: Callable[[list[bytes]], None]) -> bytes:
    """A file with changed lines, and the digest in its last one as it has to be."""
    lines = data.splitlines(keepends=True)
    also(lines)
    for number, line in enumerate(lines):
        if b'"record":"end"' in line:
            end = msgspec.json.decode(line, type=RunEnd)
            end.digest = hashlib.sha256(b"".join(lines[:number])).hexdigest()
            lines[number] = msgspec.json.encode(end) + b"\n"
    return b"".join(lines)


def of(kind: type, **fields: Any) -> Change:
    """Changes the records of a kind."""

    def apply(made: list[Any]) -> None:
        for record in made:
            if isinstance(record, kind):
                for key, value in fields.items():
                    setattr(record, key, value)

    return apply


def requirement(**fields: Any) -> Change:
    """Changes a requirement."""

    def apply(made: list[Any]) -> None:
        (found,) = (r for r in made if isinstance(r, RequirementText) and r.id == "DYNAMO-ONE-01")
        for key, value in fields.items():
            setattr(found, key, value)

    return apply


def waiver(**fields: Any) -> Change:
    """Changes the waiver that the run has, and not the profile's text."""

    def apply(made: list[Any]) -> None:
        (told,) = (r for r in made if isinstance(r, ProfileText))
        told.waivers = [msgspec.structs.replace(told.waivers[0], **fields)]

    return apply


def text(old: str, new: str) -> Change:
    """Changes the profile's text, with its hash."""

    def apply(made: list[Any]) -> None:
        changed = PROFILE.replace(old, new)
        assert changed != PROFILE
        made[0].profile_hash = hashlib.sha256(changed.encode()).hexdigest()
        of(ProfileText, texts={FILE: changed})(made)

    return apply


def arguments(*more: str) -> Change:
    """Adds arguments."""

    def apply(made: list[Any]) -> None:
        made[0].arguments = [*made[0].arguments, *more]

    return apply


def environment(**variables: str) -> Change:
    """Adds variables to the environment."""

    def apply(made: list[Any]) -> None:
        more = {f"variable {name}": value for name, value in variables.items()}
        made[0].environment = {**made[0].environment, **more}

    return apply


def both(*changes: Change) -> Change:
    """Several changes."""

    def apply(made: list[Any]) -> None:
        for each in changes:
            each(made)

    return apply


def only_the_drawn(**fields: Any) -> Change:
    """Changes the first line of the run whose seed was drawn."""

    def apply(made: list[Any]) -> None:
        if made[0].seed_drawn:
            of(RunHeader, **fields)(made)

    return apply


def unsupported(nodeid: str, reason: str) -> Change:
    """Makes a test unsupported, as it is done: with nothing left of what it came to."""
    gone: dict[str, Any] = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reproducer": None}
    return change(nodeid, verdict="unsupported", reason=f"unsupported: {reason}", **gone)


def files(changed: dict[str, str | None]) -> Change:
    """Changes the hashes of loaded files; None takes one away."""

    def apply(made: list[Any]) -> None:
        end = made[-1]
        end.files = {name: digest for name, digest in {**end.files, **changed}.items() if digest is not None}

    return apply


def added(*more: Any) -> Change:
    """Adds records before the last."""

    def apply(made: list[Any]) -> None:
        made[-1:-1] = list(more)

    return apply


def invented_test(made: list[Any]) -> None:
    """A test that the suite does not have, which passed."""
    (real,) = (r for r in made if isinstance(r, TestResult) and r.nodeid == ONE)
    more = msgspec.structs.replace(real, nodeid="suites/dynamo/test_a.py::test_three[2ranks]")
    made[1].tests = [*made[1].tests, more.nodeid]
    made[-1:-1] = [more]


def as_if_collectives_alone(made: list[Any]) -> None:
    made[0].arguments = ["suites/collectives", *made[0].arguments[1:]]


def backwards(made: list[Any]) -> None:
    """The results in another order than that of their times."""
    tests = [r for r in made if isinstance(r, TestResult)]
    for number, record in enumerate(made):
        if isinstance(record, TestResult):
            made[number] = tests.pop()


def longest(made: list[Any]) -> None:
    """Every test took as long as the whole run."""
    made[-1].finished = made[0].started + 1000
    for record in made:
        if isinstance(record, TestResult):
            record.seconds = 900.0
            record.finished = made[-1].finished


CONTROL = change("dynamo/test_a.py::test_one[2", seconds=1.5)
"""A change that leaves a run what a run can be."""

LEFT = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reason": "", "reproducer": None}

FORGERIES: dict[str, tuple[Change, str]] = {
    # what the suite says
    "sentence": (requirement(sentence="Little."), "the sentence of requirement DYNAMO-ONE-01 is 'Little.', and in the"),
    "mandatory": (
        requirement(mandatory=False),
        "the mandatory of requirement DYNAMO-ONE-01 is False, and in the suite",
    ),
    "level": (requirement(level="P"), "the level of requirement DYNAMO-ONE-01 is 'P', and in the suite 'L5'"),
    "source": (
        requirement(source="me"),
        "the source of requirement DYNAMO-ONE-01 is 'me', and in the suite 'torch.nn'",
    ),
    "moved": (
        change(ONE, requirements=["DYNAMO-TWO-01"]),
        f"{ONE}: says that it proves DYNAMO-TWO-01, and in the suite it proves DYNAMO-ONE-01",
    ),
    "proves-nothing": (change(ONE, requirements=[]), f"{ONE}: says that it proves nothing, and in the suite it proves"),
    "proves-more": (
        change(ONE, requirements=["DYNAMO-ONE-01", "PERF-ONE-01"]),
        f"{ONE}: says that it proves DYNAMO-ONE-01, PERF-ONE-01, and in the suite",
    ),
    "unknown-requirement": (
        both(
            added(RequirementText(id="DYNAMO-THREE-01", sentence="All is well.", source="x", level="L5")),
            change(ONE, requirements=["DYNAMO-ONE-01", "DYNAMO-THREE-01"]),
        ),
        "the suite has no requirement DYNAMO-THREE-01",
    ),
    "idle-requirement": (
        added(RequirementText(id="DYNAMO-THREE-01", sentence="All is well.", source="x", level="L5")),
        "no test of it proves the requirements DYNAMO-THREE-01",
    ),
    "not-property-based": (change(TWO, property_based=False), f"{TWO}: says otherwise, and in the suite it draws from"),
    "property-based": (change(ONE, property_based=True), f"{ONE}: says otherwise, and in the suite it does not draw"),
    "invented-test": (invented_test, "no tests of the suite: suites/dynamo/test_a.py::test_three[2ranks]"),
    "another-version-of-results": (
        of(RunHeader, version=VERSION - 1),
        f"its results are of version {VERSION - 1}, and its suite writes version {VERSION}",
    ),
    "another-concord": (of(RunHeader, concord="9.9.9"), "it says Concord 9.9.9, and its suite is that of 0.1.0"),
    "no-concord": (of(RunHeader, concord=""), "it says Concord of no version, and its suite is that of 0.1.0"),
    "unread-suite-file": (
        files({"suites/dynamo/test_a.py": None}),
        "tests were run of files that the run never loaded: suites/",
    ),
    "edited-harness": (files({"harness/results.py": "b" * 64}), "harness/results.py: the run loaded another one than"),
    "unknown-file": (
        files({"harness/patch.py": "b" * 64}),
        "harness/patch.py: the run loaded it, and the suite has no such",
    ),
    # worlds
    "size": (change(ONE, size=3), f"{ONE}: its size is 3, and its name says 2 ranks"),
    "no-size": (change(ONE, size=0), f"{ONE}: its size is 0, and its name says 2 ranks"),
    "size-of-world": (change(ONE, world="4 ranks (gloo on cpu)"), f"{ONE}: its size is 2, and its world has 4 ranks"),
    "no-world": (change(ONE, world=""), f"{ONE}: passed on 2 ranks, and in no world"),
    "garbled-world": (change(ONE, world="many ranks"), f"{ONE}: 'many ranks' is no world"),
    "other-backend": (
        change(ONE, world="2 ranks (nccl on cuda)"),
        f"run on nccl on cuda, and the profile is about gloo on cpu: {ONE}",
    ),
    "dtype": (change(TWO, dtype="float64"), f"{TWO}: its dtype is float64, and its name does not say so"),
    "no-dtype": (change(TWO, dtype=""), f"{TWO}: says that its dtype is none, and in the suite it is float32"),
    # records
    "text-left": (change(ONE, text="E   1 is not 2"), f"{ONE}: says passed, and carries the evidence of a failure"),
    "reproducer-left": (
        change(ONE, reproducer=Reproducer(file="repro.py", command="torchrun repro.py")),
        f"{ONE}: says passed, and carries the evidence of a failure",
    ),
    "bare-left": (change(ONE, bare="failed"), f"{ONE}: says passed, and carries the evidence of a failure"),
    "reason-left": (change(ONE, reason="known to be wrong"), f"{ONE}: says passed, and gives a reason for something"),
    "ranks-left": (change(ONE, ranks=evidence()), f"{ONE}: says passed, and carries the evidence of a failure"),
    "not-run-as-unsupported": (
        change(ONE, verdict="not-run", reason="unsupported: no"),
        f"{ONE}: says not-run, and that it is unsupported",
    ),
    "failed-and-waived": (
        change(ONE, verdict="failed", headline="no", waiver=WAIVER, bare="failed"),
        f"{ONE}: says failed, and by which waiver it is waived",
    ),
    # the profile
    "waiver-verdicts": (
        both(waiver(verdicts=["failed", "hung"]), change(WAIVED, bare="hung")),
        f"the waiver {WAIVER}: its verdicts is failed, hung, and by the profile's text failed",
    ),
    "waived-by-wider-verdicts": (
        both(waiver(verdicts=["failed", "hung"]), change(WAIVED, bare="hung")),
        f"{WAIVED}: waived by {WAIVER}, which does not cover hung",
    ),
    "waiver-tests": (waiver(tests=["*"]), f"the waiver {WAIVER}: its tests is *, and by the profile's text suites/"),
    "waiver-reason": (
        waiver(reason="well"),
        f"the waiver {WAIVER}: its reason is well, and by the profile's text known",
    ),
    "waiver-owner": (
        waiver(owner="pytorch", defect="tp_frozen"),
        f"the waiver {WAIVER}: its owner is pytorch, and by the profile's text made-up",
    ),
    "waiver-link": (waiver(link="unreported"), f"the waiver {WAIVER}: its link is unreported, and by the profile's"),
    "waiver-expires": (waiver(expires="2037-06-30"), f"the waiver {WAIVER}: its expires is 2037-06-30, and by the"),
    "waiver-intermittent": (waiver(intermittent=True), f"the waiver {WAIVER}: its intermittent is True, and by the"),
    "waiver-of-another-torch": (
        text('verdicts = ["failed"]', 'verdicts = ["failed"]\ntorch = "<2.13"'),
        f"the waiver {WAIVER}: its applies is True, and by the profile's text False",
    ),
    "waiver-of-another-subject": (
        text('verdicts = ["failed"]', 'verdicts = ["failed"]\nsubjects = ["reference"]'),
        f"{WAIVED}: waived by {WAIVER}, which is about another torch or subject",
    ),
    "waiver-of-another-machine": (
        text('verdicts = ["failed"]', 'verdicts = ["failed"]\nmachine = ["aarch64"]'),
        f"{WAIVED}: waived by {WAIVER}, which is about another torch or subject",
    ),
    "waiver-of-another-system": (
        text('verdicts = ["failed"]', 'verdicts = ["failed"]\nos = ["Linux 5.*"]'),
        f"{WAIVED}: waived by {WAIVER}, which is about another torch or subject",
    ),
    "waiver-dropped": (
        both(of(ProfileText, waivers=[]), change(WAIVED, verdict="passed", **LEFT)),
        f"the waiver {WAIVER} is in the profile's text, and not among those of the run",
    ),
    "waiver-invented": (
        both(
            of(
                ProfileText,
                waivers=[
                    WaiverEntry(
                        place=f"{FILE}:99", tests=["*"], reason="x", link="y", expires="2037-01-01", verdicts=["failed"]
                    )
                ],
            ),
        ),
        f"the waiver {FILE}:99 is not in the profile's text",
    ),
    "claims": (
        of(ProfileText, claims={"world sizes": "1 to 1000", "ranks on a device": "1"}),
        "the profile claims world sizes: 1 to 1000; its text says any",
    ),
    "claims-dropped": (of(ProfileText, claims={}), "the profile claims ranks on a device: nothing; its text says 1"),
    "about": (of(ProfileText, about="The best of all backends."), "the profile's about is 'The best of all backends.'"),
    "backend": (of(ProfileText, backend="nccl"), "the profile's backend is 'nccl', and its text says 'gloo'"),
    "device": (of(ProfileText, device="cuda"), "the profile's device is 'cuda', and its text says 'cpu'"),
    "name-of-profile": (
        both(of(ProfileText, name="famous"), of(RunHeader, profile="famous")),
        "it went by the profile 'famous', and the text is that of 'made-up'",
    ),
    "unreadable-profile": (text("[[waiver]]", "[[waver]]"), f"its profile can't be read: {FILE}:"),
    "profile-of-nothing": (
        text('name = "made-up"', 'name = "made-up"\ninherits = "other"'),
        "the text of the profile 'other' is not in the run",
    ),
    "text-beside": (
        both(
            of(ProfileText, texts={FILE: PROFILE, "other.toml": ""}),
            of(RunHeader, profile_hash=hashlib.sha256(f"{PROFILE}\0".encode()).hexdigest()),
        ),
        "texts that its profile does not inherit from: other.toml",
    ),
    "worlds-of-another-profile": (
        both(text('device = "cpu"', 'device = "cuda"'), of(ProfileText, device="cuda")),
        "run on gloo on cpu, and the profile is about gloo on cuda: suites/collectives",
    ),
    # arguments
    "-k": (arguments("-k", "not test_one"), "its last line says that it ran all of collectives, replicate"),
    "-k-unsaid": (
        arguments("-kfast"),
        "-k is among its arguments, and its last line does not say that tests were left",
    ),
    "-m": (arguments("-m", "not slow"), "-m is among its arguments"),
    "--deselect": (arguments("--deselect", ONE), "--deselect is among its arguments"),
    "--ignore": (arguments("--ignore=suites/dynamo"), "--ignore is among its arguments"),
    "--lf": (arguments("--last-failed"), "--lf is among its arguments"),
    "-k-in-a-variable": (environment(PYTEST_ADDOPTS="-k 'not test_one'"), "-k is among its arguments"),
    "--fault": (arguments("--fault", "no_sync"), "its faults are none, and --fault in its arguments says no_sync"),
    "--fault-in-a-variable": (environment(PYTEST_ADDOPTS="--fault=no_sync"), "--fault in its arguments says no_sync"),
    "other-fault": (
        both(arguments("--fault", "no_sync"), of(RunHeader, faults=["slow"])),
        "its faults are slow, and --fault in its arguments says no_sync",
    ),
    "--subject": (arguments("--subject", "reference"), "its subject is torch, and its arguments say reference"),
    "subject": (of(RunHeader, subject="reference"), "its subject is reference, and its arguments say torch"),
    "--profile": (
        arguments("--profile", "cpu-gloo"),
        "it went by the profile 'made-up', and its arguments say --profile cpu-gloo",
    ),
    "--profile-none": (
        arguments("--profile=none"),
        "it went by the profile 'made-up', and its arguments say --profile",
    ),
    "paths": (
        as_if_collectives_alone,
        "replicate, replicate_fsdp, tp_extension, dynamo, perf, and its arguments ask for suites/collectives",
    ),
    "left-out-and-whole": (
        of(RunEnd, partial=["tests were deselected, or a file could not be collected"]),
        "and that tests were left out: tests were deselected",
    ),
    # the seed
    "given-and-drawn": (
        only_the_drawn(arguments=["suites", "-n", "2", "--concord-seed", "123"]),
        "its seed 123 was drawn at random, and its arguments say --concord-seed 123",
    ),
    "given-to-hypothesis": (
        only_the_drawn(arguments=["suites", "-n", "2", "--hypothesis-seed=123"]),
        "its seed 123 was drawn at random, and its arguments say --hypothesis-seed 123",
    ),
    "given-in-a-variable": (
        both(only_the_drawn(arguments=["suites", "-n", "2"]), environment(PYTEST_ADDOPTS="--concord-seed=123")),
        "its seed 123 was drawn at random, and its arguments say --concord-seed 123",
    ),
    "nothing-drawn": (
        only_the_drawn(arguments=["suites", "-n", "2"]),
        "its seed 123 was drawn at random, and its arguments do not ask for that",
    ),
    "drawn-and-not-said": (only_the_drawn(seed_drawn=False), "its seed 123 was not drawn, and its arguments say"),
    "no-number": (only_the_drawn(seed="lucky"), "its seed 'lucky' can't have been drawn"),
    "too-large": (only_the_drawn(seed=str(2**40)), f"its seed '{2**40}' can't have been drawn"),
    "not-the-default": (arguments("--concord-seed", "7"), "its seed is default, and its arguments say 7"),
    "thorough": (environment(CONCORD_EXAMPLES="thorough"), "its seed is default, and its arguments say free"),
    # effort
    "effort": (of(RunHeader, effort=1e9), "its effort is 1e+09, and CONCORD_EXAMPLES is not set, which is 1"),
    "no-effort": (
        environment(CONCORD_EXAMPLES="smoke"),
        "its effort is 1, and CONCORD_EXAMPLES is smoke, which is 0.1",
    ),
    "impossible-effort": (
        both(of(RunHeader, effort=1e9), environment(CONCORD_EXAMPLES="1e9")),
        f"CONCORD_EXAMPLES='1e9': one of smoke, default, thorough, or a factor above 0 such as 2.5, up to {LARGEST:g}",
    ),
    # times
    "1970": (
        both(
            of(RunHeader, started=0.0),
            of(RunEnd, finished=100.0),
            of(TestResult, finished=50.0),
        ),
        f"it was begun on the first day of 1970, and there is no version {VERSION} of results before",
    ),
    "before-concord": (of(RunHeader, started=1.7e9), "it was begun on 2023-11-14"),
    "never-finished": (change(ONE, finished=0.0), f"run at a time at which the run was not: {ONE}"),
    "backwards": (backwards, "ended before the one whose result is written before it"),
    "longer-than-the-run": (longest, "its tests took 21600 s together, and its processes had 2000 s"),
    # unsupported
    "undeclared-that-passed": (
        change(CASE, verdict="passed", reason=""),
        f"{CASE}: was run, and the profile does not claim reduce",
    ),
    "unsupported-and-claimed": (
        unsupported(ONE, "not claimed: feature ddp of dynamo (profile made-up)"),
        f"{ONE}: says that feature ddp of dynamo is not claimed, and the profile made-up claims what it needs",
    ),
    "unsupported-dtype": (
        unsupported(ONE, "not claimed: all_reduce of float32 (profile made-up)"),
        f"{ONE}: says that all_reduce of float32 is not claimed, and the profile made-up claims what it needs",
    ),
    "unsupported-by-another-profile": (
        unsupported(CASE, "not claimed: reduce (profile other)"),
        f"{CASE}: not claimed by the profile other, and the run went by made-up",
    ),
    "unsupported-for-something-else": (
        unsupported(CASE, "not claimed: gather (profile made-up)"),
        f"{CASE}: not claimed is reduce, and it says gather",
    ),
    "unsupported-size": (
        unsupported(ONE, "profile made-up claims worlds of 1 ranks, not of 2"),
        f"{ONE}: the profile made-up claims worlds of any number of ranks",
    ),
    "size-not-claimed": (
        both(
            text('device = "cpu"', 'device = "cpu"\nworld_sizes = [2]'),
            of(ProfileText, claims={"world sizes": "2", "ranks on a device": "1"}),
        ),
        "was run on 3 ranks, and the profile does not claim worlds of that",
    ),
    "unsupported-devices-of-the-host": (
        unsupported(ONE, "a world of 2 ranks needs 2 cpu devices, and there are 1"),
        f"{ONE}: says that it needs devices, and the host has room for worlds of any size",
    ),
    "unsupported-devices": (
        unsupported(ONE, "a world of 2 ranks needs 2 cuda devices, and there are 1"),
        f"{ONE}: says that it needs cuda devices, and nobody asked for such",
    ),
    "unsupported-no-device": (
        unsupported(ONE, "no cpu device: torch sees none"),
        f"{ONE}: there is no cpu device, and other tests of the run had one",
    ),
    "unsupported-backend": (
        unsupported(ONE, "torch has no backend 'gloo' here"),
        f"{ONE}: torch has no backend gloo, and other tests of the run had worlds of it",
    ),
    "unsupported-other-backend": (
        unsupported(ONE, "torch has no backend 'mpi' here"),
        f"{ONE}: torch has no backend mpi, and it asks for gloo",
    ),
    "unsupported-subject": (
        unsupported(ONE, "subject torch has no dynamo; it implements nothing"),
        f"{ONE}: the subject torch lacks it, and the run is of torch",
    ),
    "unsupported-on-the-host": (
        unsupported(ONE, "streams of the device: the host has none"),
        f"{ONE}: says that it needs an accelerator for streams of the device, and it does not",
    ),
    "unsupported-for-no-reason": (
        unsupported(ONE, "it is Monday"),
        f"{ONE}: unsupported for a reason that it never gives: it is Monday",
    ),
    "unsupported-as-another-test-may-be": (
        unsupported(ONE, "this torch has no compass"),
        f"{ONE}: unsupported for a reason that it never gives: this torch has no compass",
    ),
    "no-torch": (of(RunHeader, environment={"python": "3.11.7"}), "its environment has no torch"),
    "whole-of-nothing": (of(RunEnd, whole=["collectives", "moon"]), "it ran all of moon, and it has no test of that"),
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bundle, "page", lambda report: "no page")  # made twice for each, it would be half of the time
    return tmp_path / "x.zip"


def test_control(path: Path) -> None:
    """A run with a change that a run can have is what it says it is, so what is found below is what was forged."""
    found = checked(path, CONTROL)
    assert (found.problems, found.unchecked, found.notes) == ((), (), ())


@pytest.mark.parametrize(("forge", "says"), FORGERIES.values(), ids=FORGERIES)
def test_forgery(path: Path, forge: Change, says: str) -> None:
    """A forgery is found, its message names it, and no level is conformant."""
    found = checked(path, forge)
    assert any(says in problem for problem in found.problems), found.problems
    assert found.report is not None
    assert not any(level.conformant for level in found.report.levels)


# What is in no record, but in how records follow each other


def twice(which: bytes) -> Callable[[list[bytes]], None]:
    """Writes a record a second time, as far behind as it goes without being the last."""

    def apply(lines: list[bytes]) -> None:
        lines.insert(len(lines) - 1, next(line for line in lines if which in line))

    return apply


def behind_the_end(lines: list[bytes]) -> None:
    lines.append(next(line for line in lines if ONE.encode() in line and b'"record":"test"' in line))


def another_end(lines: list[bytes]) -> None:
    lines.append(lines[-1])


@pytest.mark.parametrize(
    ("also", "says"),
    [
        (twice(b'"record":"run"'), "a second run begins here"),
        (twice(b'"record":"profile"'), "a second profile"),
        (twice(b'"record":"test","nodeid":"' + ONE.encode()), "a second result for attempt 1 of "),
        (behind_the_end, "a record after the one that ends the run"),
        (another_end, "a record after the one that ends the run"),
    ],
    ids=["two-headers", "two-profiles", "two-results", "behind-the-end", "two-ends"],
)
def test_records_too_many(path: Path, also: Callable[[list[bytes]], None], says: str) -> None:
    """A file with more records than a run writes can't be read, so that nobody chooses which of them count."""
    with pytest.raises(ReportError, match=says):
        checked(path, also=also)


FAILED = change(ONE, verdict="failed", headline="no")


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ([FAILED], 0, "tests ended badly, and pytest's exit status says that none did"),
        ([], 1, "its exit status says that tests ended badly, and none did"),
        ([], 5, "its exit status says that there was no test, and there are tests"),
        ([], 77, "its exit status is 77, and pytest has none such"),
        ([], -11, "its exit status is -11, and pytest has none such"),
        ([change(WAIVED, verdict="passed", **LEFT)], 0, "its exit status is 0, and a waiver that is stale fails a run"),
    ],
)
def test_exit_status(path: Path, changes: list[Change], status: int, says: str) -> None:
    """Exit status and verdicts fit each other, in both directions."""
    problems = checked(path, *changes, status=status).problems
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize("status", [2, 3, 4])
def test_not_to_its_end(path: Path, status: int) -> None:
    """A session that pytest itself says was broken off, or broken, is conformant at no level."""
    found = checked(path, status=status)
    assert (found.problems, found.unchecked) == ((), ())
    assert found.report is not None
    assert found.report.problems[0] == f"Run 1 did not come to its end (exit status {status} of pytest)."
    assert found.report.conformant == ""


# What nobody can check


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            both(of(RunHeader, plugins={"evil": "c" * 64}), of(RunEnd, plugins={})),
            f"made with foreign code, the plug-ins: evil ({'c' * 64})",
        ),
        (
            of(RunEnd, plugins={"xdist": f"pytest-xdist 3.8.0, {'c' * 64}"}),
            f"the plug-ins: xdist (pytest-xdist 3.8.0, {'c' * 64})",
        ),
        (of(RunEnd, plugins={"anyio": "anyio 4.1"}), "made with foreign code, the plug-ins: anyio (anyio 4.1)"),
        (of(RunEnd, plugins={"pytest": "pytest-is-fun 1.0"}), "the plug-ins: pytest (pytest-is-fun 1.0)"),
        (both(of(RunHeader, plugins={}), of(RunEnd, plugins={})), "it does not say which plug-ins were loaded"),
        (of(RunEnd, files={}), "it does not say which files of the suite were loaded"),
        (arguments("-p", "evil"), "made with arguments that may change what it came to: -p evil"),
        (arguments("-pevil"), "made with arguments that may change what it came to: -p evil"),
        (arguments("-p", "no:concord-waivers"), "that may change what it came to: -p no:concord-waivers"),
        (arguments("-c", "mine.ini"), "that may change what it came to: -c"),
        (arguments("-o", "addopts=-k x"), "that may change what it came to: -o addopts=-k x"),
        (arguments("--runxfail"), "that may change what it came to: --runxfail"),
        (arguments("@more"), "that may change what it came to: the file of arguments @more"),
        (arguments("--reruns", "2"), "that may change what it came to: --reruns"),
        (arguments("-k"), "its arguments are none that can be read: argument -k: expected one argument"),
        (environment(PYTEST_ADDOPTS="-p evil"), "that may change what it came to: -p evil"),
        (environment(PYTEST_ADDOPTS="'"), "its arguments are none that can be read: No closing quotation"),
        (environment(PYTEST_ADDOPTS="set, not shown"), "change what it came to: PYTEST_ADDOPTS (set, not shown)"),
        (environment(PYTHONOPTIMIZE="1"), "made by a Python that leaves out assertions (PYTHONOPTIMIZE)"),
        (environment(PYTEST_PLUGINS="evil"), "variables that may change what it came to: PYTEST_PLUGINS"),
    ],
)
def test_unchecked(path: Path, change: Change, says: str) -> None:
    """What may have changed verdicts, in a way that nobody here can follow, is named, and nothing is shown by it."""
    found = checked(path, change)
    assert any(says in line for line in found.unchecked), found.unchecked
    assert found.report is not None
    assert (found.shown, found.report.conformant) == (False, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (environment(PYTHONPATH="/somewhere"), "PYTHONPATH was set, so that code may have come from elsewhere"),
        (
            unsupported("dynamo/test_a.py::test_one[3", "this torch has no compass"),
            "torch 2.13.0 lacks what these tests are about: suites/dynamo/test_a.py::test_one[3ranks]",
        ),
    ],
)
def test_noted(path: Path, change: Change, says: str) -> None:
    """What a reader should know and is no reason for doubt is a note."""
    found = checked(path, change)
    assert (found.problems, found.unchecked) == ((), ())
    assert any(says in note for note in found.notes)


# What honest runs are like


def interrupted(made: list[Any]) -> None:
    """Ctrl-C before the last test."""
    made[:] = [r for r in made if not (isinstance(r, TestResult) and r.nodeid == TWO)]


def stopped(made: list[Any]) -> None:
    """A test failed, and ``-x`` had been given."""
    FAILED(made)
    made[0].arguments = [*made[0].arguments, "-x"]
    made[:] = [r for r in made if not (isinstance(r, TestResult) and r.nodeid == TWO)]


def narrowed(made: list[Any]) -> None:
    """``-k`` was given, and the run says so."""
    made[0].arguments = [*made[0].arguments, "-k", "test_one or test_two"]
    made[-1].whole, made[-1].partial = [], ["-k was given"]


def died_in_setup(made: list[Any]) -> None:
    """The process of a test died before it could tell what the test is."""
    facts: dict[str, Any] = {"requirements": [], "size": 0, "dtype": "", "property_based": False, "world": ""}
    change(ONE, verdict="crashed", headline="worker 'gw1' crashed", **facts)(made)


def other_devices(made: list[Any]) -> None:
    """More ranks than there are devices, by a profile of an accelerator."""
    text('device = "cpu"', 'device = "cuda"')(made)
    of(ProfileText, device="cuda")(made)
    for record in made:
        if isinstance(record, TestResult):
            record.world = record.world.replace("cpu", "cuda")
    unsupported("[3ranks-float32]", "a world of 3 ranks needs 3 cuda devices, and there are 2")(made)
    unsupported("[3ranks]", "a world of 3 ranks needs 3 cuda devices, and there are 2")(made)
    unsupported(CASE, "not claimed: reduce (profile made-up)")(made)


HONEST: dict[str, tuple[Change, dict[str, Any]]] = {
    "failed": (FAILED, {}),
    "interrupted": (interrupted, {"status": 2}),
    "stopped": (stopped, {}),
    "narrowed": (narrowed, {}),
    "died-in-setup": (died_in_setup, {}),
    "crashed": (change(ONE, verdict="crashed", headline="signal 11"), {}),
    "stale-waiver": (change(WAIVED, verdict="passed", **LEFT), {"status": 1}),
    "skipped": (change(ONE, verdict="not-run", reason="not now"), {}),
    "smoke": (both(of(RunHeader, effort=0.1), environment(CONCORD_EXAMPLES="smoke")), {}),
    "fault": (both(of(RunHeader, faults=["no_sync"]), arguments("--fault", "no_sync")), {}),
    "harmless": (
        arguments("-q", "-ra", "--tb=short", "--durations", "5", "-p", "no:cacheprovider", "--timeout=60"),
        {},
    ),
    "too-few-devices": (other_devices, {}),
}


@pytest.mark.parametrize(("apply", "how"), HONEST.values(), ids=HONEST)
def test_honest(path: Path, apply: Change, how: dict[str, Any]) -> None:
    """What runs really come to, good or bad, is no forgery."""
    found = checked(path, apply, **how)
    assert (found.problems, found.unchecked) == ((), ())


def test_every_version_has_its_day() -> None:
    """The day of each version of results is known, so that no run can be older than what has written it."""
    assert VERSION in INTRODUCED


def test_conformance_is_the_checkout_s(path: Path) -> None:
    """A requirement that the run calls optional fails its level all the same, in the report that is made anew."""
    failed = change("dynamo/test_a.py::test_one", verdict="failed", headline="no")
    found = checked(path, failed, requirement(mandatory=False, level="P"))
    says = "report.json: says that L5 is conformant; judged here it is not: DYNAMO-ONE-01: 2 failed of 2 tests"
    assert any(problem.startswith(says) for problem in found.problems), found.problems


def test_worlds_that_were_asked_for(path: Path) -> None:
    """A run that was asked for other worlds than its profile's is honest, and no level of it is conformant."""

    def on_another(made: list[Any]) -> None:
        arguments("--world-backend", "mpi")(made)
        for record in made:
            if isinstance(record, TestResult):
                record.world = record.world.replace("gloo", "mpi")

    found = checked(path, on_another, change(CASE, verdict="passed", reason=""))
    assert (found.problems, found.unchecked) == ((), ())
    assert found.report is not None
    assert found.report.problems[0] == "Run 1 had worlds of mpi on cpu, and its profile is about gloo on cpu."
    assert found.report.conformant == ""
