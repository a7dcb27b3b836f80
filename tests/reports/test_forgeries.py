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
    UNDECLARED,
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
    Call,
    Cases,
    Cause,
    Deselected,
    GivenWorld,
    HostLacks,
    Issued,
    MaybeLeftOut,
    NoBackend,
    NoDevice,
    NoStack,
    NotClaimed,
    NotCollected,
    OnlySome,
    OptionGiven,
    ProfileText,
    Reproducer,
    RequirementText,
    RunEnd,
    RunHeader,
    SizeNotClaimed,
    TestResult,
    TooFewDevices,
    TooLittleMemory,
    TorchLacks,
    Tried,
    WaiverEntry,
)
from harness.thorough.effort import LARGEST
from reports import bundle
from reports.bundle import MANIFEST, manifest_of, packed
from reports.coherence import INTRODUCED
from reports.model import ReportError
from reports.verify import Checked, verify

NOW = STARTED + 86400
ONE = "suites/dynamo/test_a.py::test_one[2ranks]"
TWO = "suites/dynamo/test_a.py::test_two[2ranks-float32]"
CASE = "suites/collectives/test_a.py::test_one[3ranks]"
ON_THREE = "suites/dynamo/test_a.py::test_one[3ranks]"
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
    found = bundle.made(files).files
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


def unsupported(nodeid: str, cause: Cause | str) -> Change:
    """Makes a test unsupported, as it is done: with nothing left of what it came to.

    ``cause``: a text is the reason of a plain ``pytest.skip``.
    """
    gone: dict[str, Any] = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reproducer": None}
    data = None if isinstance(cause, str) else cause
    return change(nodeid, verdict="unsupported", reason=f"unsupported: {cause}", cause=data, **gone)


def claimed(what: str, **about: Any) -> NotClaimed:
    """Something that the profile is said not to claim."""
    return NotClaimed(what=what, profile="made-up", **about)


def of_reference(made: list[Any]) -> None:
    """The subject is the reference, and no waiver is about it."""
    of(RunHeader, subject="reference")(made)
    arguments("--subject", "reference")(made)


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


def other_devices(made: list[Any]) -> None:
    """More ranks than there are devices, by a profile of an accelerator."""
    text('device = "cpu"', 'device = "cuda"')(made)
    of(ProfileText, device="cuda")(made)
    for record in made:
        if isinstance(record, TestResult):
            record.world = msgspec.structs.replace(record.world, device="cuda")
    unsupported("[3ranks-float32]", TooFewDevices(3, 3, "cuda", 2))(made)
    unsupported("[3ranks]", TooFewDevices(3, 3, "cuda", 2))(made)
    unsupported(CASE, UNDECLARED)(made)


MIN = Call("all_reduce", "MIN", "float32", "contiguous", "", "world", "sync")
TRIES = "suites/collectives/test_a.py::test_one[2ranks]"


def tries(*cases: int, size: int = 2, ended: str = "passed", count: int = 1) -> Change:
    """A test says that it tried other cases; those that only it tried are tried by another one."""

    def apply(made: list[Any]) -> None:
        (test,) = (r for r in made if isinstance(r, TestResult) and r.nodeid == TRIES)
        (other,) = (r for r in made if isinstance(r, TestResult) and "collectives/test_a.py::test_two[2" in r.nodeid)
        test.tried, other.tried = [Tried(size, ended, list(cases), [count] * len(cases))], test.tried

    return apply


def counts(times: int) -> Change:
    """A test says that its ranks issued so many all-reduces."""
    return change(ONE, issued=Issued({"all_reduce": times}, times))


def of_version(number: int) -> Change:
    """The results say that they are of another version."""

    def apply(made: list[Any]) -> None:
        made[0].version = number

    return apply


def of_cases(**fields: str) -> Change:
    """The first case of the table is another."""

    def apply(made: list[Any]) -> None:
        (table,) = (r for r in made if isinstance(r, Cases))
        table.cases[0] = msgspec.structs.replace(table.cases[0], **fields)

    return apply


def again_in_the_table(made: list[Any]) -> None:
    (table,) = (r for r in made if isinstance(r, Cases))
    table.cases.append(table.cases[0])


CONTROL = change("dynamo/test_a.py::test_one[2", seconds=1.5)
"""A change that leaves a run what a run can be."""

LEFT = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reason": "", "reproducer": None}

FORGERIES: dict[str, tuple[Change, str]] = {
    # what the suite says
    "sentence": (requirement(sentence="Little."), "the sentence of requirement DYNAMO-ONE-01 is 'Little.', but in the"),
    "mandatory": (
        requirement(mandatory=False),
        "the mandatory of requirement DYNAMO-ONE-01 is False, but in the suite",
    ),
    "level": (requirement(level="P"), "the level of requirement DYNAMO-ONE-01 is 'P', but in the suite 'L5'"),
    "source": (
        requirement(source="me"),
        "the source of requirement DYNAMO-ONE-01 is 'me', but in the suite 'torch.nn'",
    ),
    "moved": (
        change(ONE, requirements=["DYNAMO-TWO-01"]),
        f"{ONE}: says that it proves DYNAMO-TWO-01, but in the suite it proves DYNAMO-ONE-01",
    ),
    "proves-nothing": (change(ONE, requirements=[]), f"{ONE}: says that it proves nothing, but in the suite it proves"),
    "proves-more": (
        change(ONE, requirements=["DYNAMO-ONE-01", "PERF-ONE-01"]),
        f"{ONE}: says that it proves DYNAMO-ONE-01, PERF-ONE-01, but in the suite",
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
        "no test of the run proves the requirements DYNAMO-THREE-01",
    ),
    "not-property-based": (
        change(TWO, property_based=False),
        f"{TWO}: its property_based is wrong: in the suite it draws from",
    ),
    "property-based": (
        change(ONE, property_based=True),
        f"{ONE}: its property_based is wrong: in the suite it does not draw",
    ),
    "invented-test": (invented_test, "tests that the suite does not have: suites/dynamo/test_a.py::test_three[2ranks]"),
    "another-version-of-results": (
        of(RunHeader, version=VERSION - 1),
        f"its results have version {VERSION - 1}, but its suite writes version {VERSION}",
    ),
    "another-concord": (of(RunHeader, concord="9.9.9"), "its Concord is 9.9.9, but its suite belongs to Concord 0.1.0"),
    "no-concord": (of(RunHeader, concord=""), "its Concord is unknown, but its suite belongs to Concord 0.1.0"),
    "unread-suite-file": (
        files({"suites/dynamo/test_a.py": None}),
        "tests ran whose files the run never loaded: suites/",
    ),
    "edited-harness": (
        files({"harness/results.py": "b" * 64}),
        "harness/results.py: the run loaded a version that differs from",
    ),
    "unknown-file": (
        files({"harness/patch.py": "b" * 64}),
        "harness/patch.py: the run loaded it, but the suite has no such",
    ),
    # cases
    "case-of-no-test": (added(Cases([MIN])), "no test tried the case all_reduce MIN float32 contiguous world sync"),
    "case-twice": (both(again_in_the_table, tries(0, 6)), "its table has a case twice: all_reduce SUM float32"),
    "case-of-no-collective": (
        of_cases(collective="all_shout"),
        "the case all_shout SUM float32 contiguous world sync: there is no such collective",
    ),
    "case-without-reduction": (
        of_cases(op=""),
        "all_reduce float32 contiguous world sync: all_reduce reduces",
    ),
    "case-of-no-group": (of_cases(group="few"), "'few' is no kind of group"),
    "passed-with-a-wrong-case": (tries(0, ended="wrong"), f"{TRIES}: is passed, but 1 case of it: wrong"),
    "passed-with-cases-that-it-did-not-reach": (
        tries(0, ended="not-reached"),
        f"{TRIES}: is passed, but 1 case of it: not-reached",
    ),
    "case-with-an-ending-of-its-own": (tries(0, ended="fine"), f"{TRIES}: 'fine' is no way in which a case ends"),
    "case-on-more-ranks": (tries(0, size=8), f"{TRIES}: tried 1 case on 8 ranks, but it had 2"),
    "cases-out-of-order": (tries(1, 0), f"{TRIES}: the numbers of its cases are not ascending"),
    "case-that-did-not-run": (tries(0, count=0), f"{TRIES}: tried a case 0 times"),
    "case-that-is-not-claimed": (
        tries(3),
        f"{TRIES}: the case reduce SUM float32 contiguous world sync is not claimed, but was tried",
    ),
    "case-left-out-though-claimed": (
        tries(0, ended="undeclared"),
        f"{TRIES}: the case all_reduce SUM float32 contiguous world sync was left out, but the profile claims it",
    ),
    "case-of-another-collective": (
        change("test_one[3", verdict="passed", cause=None, reason="", tried=[Tried(3, "passed", [0], [1])]),
        "test_one[3ranks]: is about reduce, but tried all_reduce SUM float32",
    ),
    # collectives
    "collectives-without-a-world": (
        both(change(ONE, world=None), counts(12)),
        f"{ONE}: has collectives of ranks, but it had no world",
    ),
    "collectives-in-an-older-file": (
        both(counts(12), of_version(9)),
        "version 9 of results does not count collectives",
    ),
    # worlds
    "size": (change(ONE, size=3), f"{ONE}: its size is 3, but its name says 2 ranks"),
    "no-size": (change(ONE, size=0), f"{ONE}: its size is 0, but its name says 2 ranks"),
    "size-of-world": (
        change(ONE, world=GivenWorld(4, "gloo", "cpu")),
        f"{ONE}: its size is 2, but its world has 4 ranks",
    ),
    "no-world": (change(ONE, world=None), f"{ONE}: passed on 2 ranks, but has no world"),
    "other-backend": (
        change(ONE, world=GivenWorld(2, "nccl", "cuda")),
        f"tests ran on nccl on cuda, but the profile is about gloo on cpu: {ONE}",
    ),
    "dtype": (change(TWO, dtype="float64"), f"{TWO}: its dtype is float64, but its name does not say so"),
    "no-dtype": (change(TWO, dtype=""), f"{TWO}: says that its dtype is none, but in the suite it is float32"),
    # records
    "text-left": (change(ONE, text="E   1 is not 2"), f"{ONE}: is passed but has the evidence of a failure"),
    "reproducer-left": (
        change(ONE, reproducer=Reproducer(file="repro.py", command="torchrun repro.py")),
        f"{ONE}: is passed but has the evidence of a failure",
    ),
    "bare-left": (change(ONE, bare="failed"), f"{ONE}: is passed but has the evidence of a failure"),
    "reason-left": (change(ONE, reason="known to be wrong"), f"{ONE}: is passed but has a reason"),
    "ranks-left": (change(ONE, ranks=evidence()), f"{ONE}: is passed but has the evidence of a failure"),
    "not-run-as-unsupported": (
        change(ONE, verdict="not-run", reason="unsupported: no"),
        f"{ONE}: is not-run but has the reason of an unsupported test",
    ),
    "failed-and-waived": (
        change(ONE, verdict="failed", headline="no", waiver=WAIVER, bare="failed"),
        f"{ONE}: is failed but has a waiver or an original verdict",
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
        "tests ran on gloo on cpu, but the profile is about gloo on cuda: suites/collectives",
    ),
    # arguments
    "-k": (arguments("-k", "not test_one"), "its last line says that it ran all of collectives, replicate"),
    "-k-unsaid": (
        arguments("-kfast"),
        "-k is among its arguments, but its last line does not say that tests were left",
    ),
    "-m": (arguments("-m", "not slow"), "-m is among its arguments"),
    "--deselect": (arguments("--deselect", ONE), "--deselect is among its arguments"),
    "--ignore": (arguments("--ignore=suites/dynamo"), "--ignore is among its arguments"),
    "--lf": (arguments("--last-failed"), "--lf is among its arguments"),
    "-k-in-a-variable": (environment(PYTEST_ADDOPTS="-k 'not test_one'"), "-k is among its arguments"),
    "--fault": (arguments("--fault", "no_sync"), "its faults are none, but --fault in its arguments says no_sync"),
    "--fault-in-a-variable": (environment(PYTEST_ADDOPTS="--fault=no_sync"), "--fault in its arguments says no_sync"),
    "other-fault": (
        both(arguments("--fault", "no_sync"), of(RunHeader, faults=["slow"])),
        "its faults are slow, but --fault in its arguments says no_sync",
    ),
    "--subject": (arguments("--subject", "reference"), "its subject is torch, but its arguments say reference"),
    "subject": (of(RunHeader, subject="reference"), "its subject is reference, but its arguments say torch"),
    "--profile": (
        arguments("--profile", "cpu-gloo"),
        "it went by the profile 'made-up', but its arguments say --profile cpu-gloo",
    ),
    "--profile-none": (
        arguments("--profile=none"),
        "it went by the profile 'made-up', but its arguments say --profile",
    ),
    "paths": (
        as_if_collectives_alone,
        "replicate, replicate_fsdp, tp_extension, dynamo, perf, but its arguments ask for suites/collectives",
    ),
    "left-out-and-whole": (
        of(RunEnd, left_out=[Deselected()]),
        "and that tests were left out: tests were deselected",
    ),
    "not-collected-and-whole": (
        of(RunEnd, left_out=[NotCollected()]),
        "and that tests were left out: a file could not be collected",
    ),
    "some-and-whole": (
        of(RunEnd, left_out=[OnlySome(("moon", "dynamo"))]),
        "its last line says that it ran all of dynamo, and that it ran only some of its tests",
    ),
    "-k-said-of-another": (
        both(arguments("-kfast"), of(RunEnd, whole=[], left_out=[OptionGiven("-m"), Deselected()])),
        "-k is among its arguments, but its last line does not say that tests were left",
    ),
    # the seed
    "given-and-drawn": (
        only_the_drawn(arguments=["suites", "-n", "2", "--concord-seed", "123"]),
        "its seed 123 was drawn at random, but its arguments say --concord-seed 123",
    ),
    "given-to-hypothesis": (
        only_the_drawn(arguments=["suites", "-n", "2", "--hypothesis-seed=123"]),
        "its seed 123 was drawn at random, but its arguments say --hypothesis-seed 123",
    ),
    "given-in-a-variable": (
        both(only_the_drawn(arguments=["suites", "-n", "2"]), environment(PYTEST_ADDOPTS="--concord-seed=123")),
        "its seed 123 was drawn at random, but its arguments say --concord-seed 123",
    ),
    "nothing-drawn": (
        only_the_drawn(arguments=["suites", "-n", "2"]),
        "its seed 123 was drawn at random, but its arguments do not ask for that",
    ),
    "drawn-and-not-said": (only_the_drawn(seed_drawn=False), "its seed 123 was not drawn, but its arguments say"),
    "no-number": (only_the_drawn(seed="lucky"), "its seed 'lucky' can't have been drawn"),
    "too-large": (only_the_drawn(seed=str(2**40)), f"its seed '{2**40}' can't have been drawn"),
    "not-the-default": (arguments("--concord-seed", "7"), "its seed is default, but its arguments say 7"),
    "thorough": (environment(CONCORD_EXAMPLES="thorough"), "its seed is default, but its arguments say free"),
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
        f"it began on the first day of 1970, but version {VERSION} of results is not older than",
    ),
    "before-concord": (of(RunHeader, started=1.7e9), "it began on 2023-11-14"),
    "never-finished": (change(ONE, finished=0.0), f"tests ran outside the time of the run: {ONE}"),
    "backwards": (backwards, "tests whose results are not in the order in which they ended"),
    "longer-than-the-run": (longest, "its tests took 21600 s in total, but its processes had 2000 s"),
    # unsupported
    "undeclared-that-passed": (
        change(CASE, verdict="passed", reason="", cause=None),
        f"{CASE}: ran, but the profile does not claim reduce",
    ),
    "passed-for-a-cause": (
        change(ONE, cause=TorchLacks("compass")),
        f"{ONE}: is passed but has the cause of an unsupported test: this torch has no compass",
    ),
    "not-run-for-a-cause": (
        change(ONE, verdict="not-run", reason="not now", cause=TorchLacks("compass")),
        f"{ONE}: is not-run but has the cause of an unsupported test: this torch has no compass",
    ),
    "another-reason-than-the-cause": (
        change(CASE, reason="unsupported: torch has no backend 'gloo' here"),
        f"{CASE}: its reason is \"torch has no backend 'gloo' here\", but by its cause it is 'not claimed: reduce (p",
    ),
    "another-cause-than-the-reason": (
        change(CASE, cause=TorchLacks("compass")),
        f"{CASE}: its reason is 'not claimed: reduce (profile made-up)', but by its cause it is 'this torch has no c",
    ),
    "a-reason-beside-the-cause": (
        change(CASE, reason=f"not unsupported: {UNDECLARED}"),
        f"{CASE}: its reason is 'not unsupported: not claimed: reduce (profile made-up)', but by its cause it is 'not",
    ),
    "no-cause": (
        change(CASE, cause=None),
        f"{CASE}: unsupported for a reason that neither its source nor Concord gives: unsupported: not claimed: reduce",
    ),
    "undeclared-as-unsupported": (
        unsupported(CASE, TorchLacks("reduce")),
        f"{CASE}: unsupported for a reason that neither its source nor Concord gives: this torch has no reduce",
    ),
    "unsupported-and-claimed": (
        unsupported(ONE, claimed("feature ddp of dynamo", stack="dynamo", feature="ddp")),
        f"{ONE}: says that feature ddp of dynamo is not claimed, but the profile made-up claims what the test needs",
    ),
    "unsupported-dtype": (
        unsupported(ONE, claimed("all_reduce of float32", collective="all_reduce", dtypes=("float32",))),
        f"{ONE}: says that all_reduce of float32 is not claimed, but the profile made-up claims what the test needs",
    ),
    "unsupported-op": (
        unsupported(ONE, claimed("all_reduce of int8", collective="all_reduce", dtypes=("int8",), op="MAX")),
        f"{ONE}: says that all_reduce of int8 is not claimed, but the profile made-up claims what the test needs",
    ),
    "unsupported-dtype-of-another-name": (
        unsupported(ONE, claimed("all_reduce of int8", collective="reduce", dtypes=("float32",))),
        f"{ONE}: says that all_reduce of int8 is not claimed, but its cause is about float32",
    ),
    "unsupported-by-another-profile": (
        unsupported(CASE, msgspec.structs.replace(UNDECLARED, profile="other")),
        f"{CASE}: says that the profile other does not claim it, but the run's profile is made-up",
    ),
    "unsupported-for-something-else": (
        unsupported(CASE, claimed("gather", collective="gather")),
        f"{CASE}: says that gather is not claimed, but what it needs and is not claimed is reduce",
    ),
    "unsupported-in-other-words": (
        unsupported(CASE, claimed("gather", collective="reduce")),
        f"{CASE}: says that gather is not claimed, but what it needs and is not claimed is reduce",
    ),
    "unsupported-size": (
        unsupported(ONE, SizeNotClaimed("made-up", (1,), 2)),
        "claims worlds of 1 ranks, not of 2, but the profile made-up claims worlds of any number of ranks",
    ),
    "size-not-claimed": (
        both(
            text('device = "cpu"', 'device = "cpu"\nworld_sizes = [2]'),
            of(ProfileText, claims={"world sizes": "2", "ranks on a device": "1"}),
        ),
        "ran on 3 ranks, but the profile does not claim worlds of that size",
    ),
    "unsupported-devices-of-the-host": (
        unsupported(ONE, TooFewDevices(2, 2, "cpu", 1)),
        f"{ONE}: says that it needs more CPU devices, but the host has room for worlds of any size",
    ),
    "unsupported-devices": (
        unsupported(ONE, TooFewDevices(2, 2, "cuda", 1)),
        f"{ONE}: says that it needs cuda devices, but the test runs on cpu",
    ),
    "unsupported-devices-that-are-enough": (
        both(other_devices, unsupported(ON_THREE, TooFewDevices(3, 2, "cuda", 2))),
        f"{ON_THREE}: says that there are too few devices for 3 ranks, but its numbers do not fit: a world of 3 ranks",
    ),
    "unsupported-devices-counted-twice": (
        both(other_devices, unsupported(ON_THREE, TooFewDevices(3, 3, "cuda", 1))),
        "tests of the run contradict each other about the number of cuda devices",
    ),
    "unsupported-devices-that-others-had": (
        both(other_devices, change("replicate/test_a.py::test_one[3", verdict="passed", reason="", cause=None)),
        f"{ON_THREE}: says that there are too few devices for 3 ranks, but another test had 3 ranks",
    ),
    "unsupported-no-device": (
        unsupported(ONE, NoDevice("cpu", "torch sees none")),
        f"{ONE}: says that there is no cpu device, but other tests of the run used one",
    ),
    "unsupported-no-other-device": (
        unsupported(ONE, NoDevice("cuda", "torch sees none")),
        f"{ONE}: says that there is no cuda device, but the test runs on cpu",
    ),
    "unsupported-backend": (
        unsupported(ONE, NoBackend("gloo")),
        f"{ONE}: says that torch has no backend gloo, but other tests of the run used it",
    ),
    "unsupported-other-backend": (
        unsupported(ONE, NoBackend("mpi")),
        f"{ONE}: says that torch has no backend mpi, but the test runs on gloo",
    ),
    "unsupported-subject": (
        unsupported(ONE, NoStack("torch", "dynamo", ())),
        f"{ONE}: says that the subject torch has no dynamo, but torch has every stack",
    ),
    "unsupported-other-subject": (
        unsupported(ONE, NoStack("reference", "dynamo", ())),
        f"{ONE}: says that the subject reference has no dynamo, but the subject of the run is torch",
    ),
    "unsupported-other-stack": (
        both(of_reference, unsupported(ONE, NoStack("reference", "perf", ()))),
        f"{ONE}: says that the subject reference has no perf, but it is a test of dynamo",
    ),
    "unsupported-stack-that-others-had": (
        both(of_reference, unsupported(ONE, NoStack("reference", "dynamo", ("replicate",)))),
        f"{ONE}: says that the subject reference has no dynamo, but the subject implements it or other tests of dynamo",
    ),
    "unsupported-on-the-host": (
        unsupported(ONE, HostLacks("streams of the device")),
        f"{ONE}: says that the host has no streams of the device, but the test needs no such feature",
    ),
    "unsupported-for-memory": (
        unsupported(ONE, TooLittleMemory("a bucket", 2 << 20, 1 << 20)),
        "at most 1.0 MiB fit on each rank here, but only benchmarks have messages of that size",
    ),
    "unsupported-for-memory-that-is-enough": (
        unsupported("suites/perf/test_a.py::test_one[2ranks]", TooLittleMemory("a bucket", 1 << 20, 2 << 20)),
        "at most 2.0 MiB fit on each rank here, but its numbers do not fit",
    ),
    "unsupported-for-no-reason": (
        unsupported(ONE, "it is Monday"),
        f"{ONE}: unsupported for a reason that neither its source nor Concord gives: unsupported: it is Monday",
    ),
    "unsupported-as-another-test-may-be": (
        unsupported(ONE, TorchLacks("compass")),
        f"{ONE}: unsupported for a reason that neither its source nor Concord gives: this torch has no compass",
    ),
    "unsupported-in-the-words-of-a-cause": (
        unsupported("dynamo/test_a.py::test_one[3", "this torch has no compass"),
        "unsupported for a reason that neither its source nor Concord gives: unsupported: this torch has no compass",
    ),
    "no-torch": (of(RunHeader, environment={"python": "3.11.7"}), "its environment has no torch"),
    "whole-of-nothing": (of(RunEnd, whole=["collectives", "moon"]), "it ran all of moon, but it has no test of that"),
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
        ([FAILED], 0, "tests ended badly, but by its exit status none did"),
        ([], 1, "its exit status says that tests ended badly, but none did"),
        ([], 5, "its exit status says that there was no test, but there are tests"),
        (
            [of(RunEnd, whole=[], left_out=[Deselected()])],
            1,
            "its exit status says that tests ended badly, but none did",
        ),
        ([], 77, "its exit status is 77, which pytest does not have"),
        ([], -11, "its exit status is -11, which pytest does not have"),
        ([change(WAIVED, verdict="passed", **LEFT)], 0, "its exit status is 0, but a stale waiver makes a run fail"),
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
        (arguments("-p", "evil"), "made with arguments that may change its verdicts: -p evil"),
        (arguments("-pevil"), "made with arguments that may change its verdicts: -p evil"),
        (arguments("-p", "no:concord-waivers"), "that may change its verdicts: -p no:concord-waivers"),
        (arguments("-c", "mine.ini"), "that may change its verdicts: -c"),
        (arguments("-o", "addopts=-k x"), "that may change its verdicts: -o addopts=-k x"),
        (arguments("--runxfail"), "that may change its verdicts: --runxfail"),
        (arguments("@more"), "that may change its verdicts: the file of arguments @more"),
        (arguments("--reruns", "2"), "that may change its verdicts: --reruns"),
        (arguments("-k"), "its arguments cannot be parsed: argument -k: expected one argument"),
        (environment(PYTEST_ADDOPTS="-p evil"), "that may change its verdicts: -p evil"),
        (environment(PYTEST_ADDOPTS="'"), "its arguments cannot be parsed: No closing quotation"),
        (environment(PYTEST_ADDOPTS="set, not shown"), "change its verdicts: PYTEST_ADDOPTS (set, not shown)"),
        (environment(PYTHONOPTIMIZE="1"), "made by a Python that leaves out assertions (PYTHONOPTIMIZE)"),
        (environment(PYTEST_PLUGINS="evil"), "variables that may change its verdicts: PYTEST_PLUGINS"),
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
            unsupported("dynamo/test_a.py::test_one[3", TorchLacks("compass")),
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
    made[-1].whole, made[-1].left_out = [], [OptionGiven("-k")]


def some_of_dynamo(made: list[Any]) -> None:
    """A file of a stack was requested, and the run says so."""
    made[-1].whole.remove("dynamo")
    made[-1].left_out = [OnlySome(("dynamo",))]


def died_in_setup(made: list[Any]) -> None:
    """The process of a test died before it could tell what the test is."""
    facts: dict[str, Any] = {"requirements": [], "size": 0, "dtype": "", "property_based": False, "world": None}
    change(ONE, verdict="crashed", headline="worker 'gw1' crashed", **facts)(made)


HONEST: dict[str, tuple[Change, dict[str, Any]]] = {
    "failed": (FAILED, {}),
    "interrupted": (interrupted, {"status": 2}),
    "stopped": (stopped, {}),
    "narrowed": (narrowed, {}),
    "died-in-setup": (died_in_setup, {}),
    "crashed": (change(ONE, verdict="crashed", headline="signal 11"), {}),
    "stale-waiver": (change(WAIVED, verdict="passed", tried=[], **LEFT), {"status": 1}),
    "skipped": (change(ONE, verdict="not-run", reason="not now"), {}),
    "smoke": (both(of(RunHeader, effort=0.1), environment(CONCORD_EXAMPLES="smoke")), {}),
    "fault": (both(of(RunHeader, faults=["no_sync"]), arguments("--fault", "no_sync")), {}),
    "harmless": (
        arguments("-q", "-ra", "--tb=short", "--durations", "5", "-p", "no:cacheprovider", "--timeout=60"),
        {},
    ),
    "too-few-devices": (other_devices, {}),
    "skipped-by-itself": (unsupported("dynamo/test_a.py::test_one[3", "no wind"), {}),
    "not-collected": (of(RunEnd, whole=[], left_out=[NotCollected()]), {"status": 1}),
    "worker-died": (of(RunEnd, whole=[], left_out=[MaybeLeftOut()]), {"status": 1}),
    "some": (some_of_dynamo, {}),
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
    says = "report.json: says that L5 is conformant, but checked locally it is not: DYNAMO-ONE-01: 2 failed of 2 tests"
    assert any(problem.startswith(says) for problem in found.problems), found.problems


def test_worlds_that_were_asked_for(path: Path) -> None:
    """A run that was asked for other worlds than its profile's is honest, and no level of it is conformant."""

    def on_another(made: list[Any]) -> None:
        arguments("--world-backend", "mpi")(made)
        for record in made:
            if isinstance(record, TestResult):
                record.world = msgspec.structs.replace(record.world, backend="mpi")

    found = checked(path, on_another, change(CASE, verdict="passed", reason="", cause=None))
    assert (found.problems, found.unchecked) == ((), ())
    assert found.report is not None
    assert found.report.problems[0] == "Run 1 had worlds of mpi on cpu, and its profile is about gloo on cpu."
    assert found.report.conformant == ""
