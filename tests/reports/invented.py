"""Results of runs that never were, as the plug-in writes them: whole, consistent, and small."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from harness.profiles.needs import Needs
from harness.requirements import LEVELS
from harness.results import (
    BAD,
    VERSION,
    Call,
    CaseOf,
    Cases,
    Collected,
    GivenWorld,
    NotClaimed,
    ProfileText,
    RankEvidence,
    Reproducer,
    RequirementText,
    RunEnd,
    RunHeader,
    Setting,
    TestResult,
    TorchLacks,
    Tried,
    WaiverEntry,
    merged,
)
from harness.suite_facts import SuiteFacts, TestFacts
from reports.checkout import Checkout
from reports.minimums import Minimum, Minimums

STARTED = 1.8e9  # 2027-01-15
PROFILE = """name = "made-up"
backend = "gloo"
device = "cpu"
about = "made up"

[[waiver]]
tests = ["suites/replicate/test_a.py::test_two[2*]"]
reason = "known to be wrong"
link = "https://example.com/issues/1"
expires = 2027-06-30
verdicts = ["failed"]

[[collectives.except]]
collectives = ["reduce"]
reason = "not there yet"
"""
FILE = "profiles/made-up.toml"
WAIVER = f"{FILE}:6"
UNDECLARED = NotClaimed(what="reduce", profile="made-up", collective="reduce")
"""Why the undeclared test did not run."""
SUITE = "5" * 64
SECONDS = 2.0
CONCORD = "0.1.0"
PLUGINS = {"harness.plugin": f"concord-harness {CONCORD}", "xdist": "pytest-xdist 3.8.0"}
ENVIRONMENT = {
    "torch": "2.13.0",
    "python": "3.11.7",
    "cpu": "A processor",
    "machine": "x86_64",
    "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
}

FILES = {f"suites/{stack}/test_a.py": f"{i}" * 64 for i, stack in enumerate(LEVELS.values())}
FILES["harness/results.py"] = "a" * 64

CASES: list[CaseOf] = [
    Call("all_reduce", "SUM", "float32", "contiguous", "", "world", "sync"),
    Call("all_reduce", "MAX", "int32", "contiguous", "", "some", "async"),
    Call("broadcast", "", "float32", "column", "", "world", "sync"),
    Call("reduce", "SUM", "float32", "contiguous", "", "world", "sync"),
    Setting("replicate", "dtype", "float32"),
    Setting("replicate", "static_graph", "yes"),
]
"""The cases that tests tried."""
TRIED = {
    "suites/collectives/test_a.py::test_one[2ranks]": [
        Tried(2, "passed", [0, 1, 2], [3, 1, 2]),
        Tried(2, "undeclared", [3], [1]),
    ],
    "suites/collectives/test_a.py::test_two[3ranks-float32]": [Tried(3, "passed", [0], [5])],
    "suites/replicate/test_a.py::test_one[2ranks]": [Tried(2, "passed", [4, 5], [2, 1])],
    "suites/replicate/test_a.py::test_two[2ranks-float32]": [
        Tried(2, "passed", [4], [1]),
        Tried(2, "wrong", [5], [1]),
    ],
}
"""What tests tried, by their number in :data:`CASES`."""

LEAST = Minimum(world_sizes=(2, 3), unsupported=1.0, drawn=1, examples=1.0, waived=0.5)
MINIMUMS = Minimums(version=1, levels=dict.fromkeys(LEVELS, LEAST))
"""What the levels of this suite take at the least: no more than it has."""

Change = Callable[[list[Any]], None]


def evidence(text: str = "AssertionError: 1 is not 2") -> list[RankEvidence]:
    """What two ranks say of a failure."""
    return [
        RankEvidence(
            rank=rank,
            kind="raised",
            what=text,
            first=rank == 0,
            text=f"test_a.py:7: in body\nE   {text}",
            stack="train at test_a.py:7",
            collectives=["all_reduce(float32[4]) #1 on group 0: ended at test_a.py:6"],
            output=f"printed by {rank}\n",
        )
        for rank in range(2)
    ]


def every_test(stacks: Sequence[str] = tuple(LEVELS.values())) -> list[TestResult]:
    """Two tests for each requirement, two requirements for each stack, of which one's tests draw from the seed.

    One test is waived, one is undeclared.
    """
    found = []
    for stack in stacks:
        for name, dtype in (("one", ""), ("two", "float32")):
            for size in (2, 3):
                parameters = f"{size}ranks" + (f"-{dtype}" if dtype else "")
                found.append(
                    TestResult(
                        nodeid=f"suites/{stack}/test_a.py::test_{name}[{parameters}]",
                        verdict="passed",
                        stack=stack,
                        requirements=[requirement(stack, name)],
                        world=GivenWorld(size, "gloo", "cpu"),
                        seconds=SECONDS,
                        size=size,
                        dtype=dtype,
                        property_based=name == "two",
                        finished=STARTED + 10 + SECONDS * len(found),
                        tried=TRIED.get(f"suites/{stack}/test_a.py::test_{name}[{parameters}]", []),
                    )
                )
    for test in found:
        if "replicate/test_a.py::test_two[2" in test.nodeid:
            test.verdict, test.waiver, test.bare = "waived", WAIVER, "failed"
            test.reason, test.headline = "known to be wrong", "rank 0 of 2 failed first: AssertionError: 1 is not 2"
            test.ranks = evidence()
            test.reproducer = Reproducer(file="repro_a.py", command="torchrun repro_a.py", text="print('no')\n")
        if "collectives/test_a.py::test_one[3" in test.nodeid:
            test.verdict, test.cause = "unsupported", UNDECLARED
            test.reason = f"unsupported: {UNDECLARED}"
    return found


def of_stack(stack: str) -> str:
    """The level of a stack."""
    return next(level for level, name in LEVELS.items() if name == stack)


def sentences() -> list[RequirementText]:
    """Every requirement."""
    return [
        RequirementText(id=each, sentence=f"What {each} says.", source="torch.nn", level=level)
        for level, stack in LEVELS.items()
        for each in (requirement(stack, "one"), requirement(stack, "two"))
    ]


def checkout() -> Checkout:
    """The suite that these tests are of."""
    tests = {
        test.nodeid: TestFacts(
            requirements=test.requirements,
            size=test.size,
            dtype=test.dtype,
            property_based=test.property_based,
            needs=Needs(test.stack, "reduce" if "collectives/test_a.py::test_one[3" in test.nodeid else ""),
            causes=[TorchLacks("compass")] if "dynamo/test_a.py::test_one[3" in test.nodeid else [],
            skips=["unsupported: no wind"] if "dynamo/test_a.py::test_one[3" in test.nodeid else [],
        )
        for test in every_test()
    }
    facts = SuiteFacts(tests=tests, requirements={text.id: text for text in sentences()})
    return Checkout(SUITE, CONCORD, VERSION, facts, FILES, {FILE: PROFILE})


def requirement(stack: str, name: str) -> str:
    """The id of a requirement."""
    return f"{stack.upper().replace('_', '')}-{name.upper()}-01"


def records(
    seed: str = "default",
    *,
    drawn: bool = False,
    of: Iterable[TestResult] | None = None,
    profile: str = PROFILE,
    later: float = 0.0,
) -> list[Any]:
    """The records of a run that came to its end."""
    results = [msgspec.structs.replace(t, finished=t.finished + later) for t in (every_test() if of is None else of)]
    stacks = list(dict.fromkeys(t.stack for t in results if t.stack))
    requirements = {text.id: text for text in sentences() if any(text.level == of_stack(s) for s in stacks)}
    waiver = WaiverEntry(
        place=WAIVER,
        tests=["suites/replicate/test_a.py::test_two[2*]"],
        reason="known to be wrong",
        link="https://example.com/issues/1",
        expires="2027-06-30",
        verdicts=["failed"],
        owner="made-up",
    )
    given = [] if seed == "default" else ["--concord-seed", "random" if drawn else seed]
    header = RunHeader(
        started=STARTED + later,
        arguments=["suites", "-n", "2", *given],
        environment=dict(ENVIRONMENT),
        profile="made-up",
        profile_hash=hashlib.sha256(profile.encode()).hexdigest(),
        concord=CONCORD,
        suite_hash=SUITE,
        plugins=dict(PLUGINS),
        seed=seed,
        seed_drawn=drawn,
    )
    text = ProfileText(
        name="made-up",
        file=FILE,
        texts={FILE: profile},
        backend="gloo",
        device="cpu",
        waivers=[waiver],
        about="made up",
        claims={"world sizes": "any", "ranks on a device": "1"},
    )
    bad = any(t.verdict in BAD for t in results)
    end = RunEnd(
        STARTED + later + 100,
        int(bad),
        whole=stacks,
        environment={"package backend": "1.0"},
        plugins=dict(PLUGINS),
        files=dict(FILES),
    )
    return [
        header,
        Collected([t.nodeid for t in results]),
        text,
        *requirements.values(),
        *_table(results),
        *results,
        end,
    ]


def older(found: list[Any], version: int) -> None:
    """Makes the records of a run those of an older version, before which tests did not say what they tried."""
    found[0].version = version
    for record in [record for record in found if isinstance(record, Cases)]:
        found.remove(record)
    for record in found:
        if isinstance(record, TestResult):
            record.tried = []


def _table(results: Sequence[TestResult]) -> list[Cases]:
    """The cases of some results, which get the numbers that they have in the file."""
    used = sorted({number for test in results for tried in test.tried for number in tried.cases})
    for test in results:
        test.tried = [
            msgspec.structs.replace(tried, cases=[used.index(number) for number in tried.cases]) for tried in test.tried
        ]
    return [Cases([CASES[number] for number in used])] if used else []


def written(found: Sequence[Any], *, honest: bool = True, status: int | None = None) -> bytes:
    """Records as a results file; ``honest``: with the counts, exit status and digest that belong to them.

    ``status``: another exit status.
    """
    lines: list[bytes] = []
    digest = hashlib.sha256()
    for record in found:
        if isinstance(record, RunEnd) and honest:
            attempts: dict[str, list[TestResult]] = {}
            for r in found:
                if isinstance(r, TestResult):
                    attempts.setdefault(r.nodeid, []).append(r)
            verdicts = [merged(several).verdict for several in attempts.values()]
            verdicts += ["not-run" for r in found if isinstance(r, Collected) for n in r.tests if n not in attempts]
            record.counts = {v: verdicts.count(v) for v in sorted(set(verdicts))}
            record.exit_status = int(any(v in BAD for v in verdicts)) if status is None else status
            record.digest = digest.hexdigest()
        lines.append(msgspec.json.encode(record) + b"\n")
        digest.update(lines[-1])
    return b"".join(lines)


def runs(*changes: Change, status: int | None = None) -> list[tuple[str, bytes]]:
    """Two runs of all levels, one with a random seed; each change is made to the records of both.

    ``status``: an exit status other than the one that belongs to them.
    """
    found = []
    for name, made in (
        ("first", records()),
        ("second", records("123", drawn=True, later=1000)),
    ):
        for change in changes:
            change(made)
        found.append((name, written(made, status=status)))
    return found


def tried(nodeid: str, *verdicts: str) -> Change:
    """Makes several attempts of the results of tests whose name has this in it."""

    def apply(found: list[Any]) -> None:
        for result in [r for r in found if isinstance(r, TestResult) and nodeid in r.nodeid]:
            at = found.index(result)
            found[at : at + 1] = [
                msgspec.structs.replace(
                    result,
                    verdict=verdict,
                    attempt=number,
                    headline="" if verdict == "passed" else f"wrong in attempt {number}",
                )
                for number, verdict in enumerate(verdicts, 1)
            ]

    return apply


def change(nodeid: str, **fields: Any) -> Change:
    """Changes the results of tests whose name has this in it."""

    def apply(found: list[Any]) -> None:
        hit = [r for r in found if isinstance(r, TestResult) and nodeid in r.nodeid]
        assert hit
        for result in hit:
            for key, value in fields.items():
                setattr(result, key, value)

    return apply
