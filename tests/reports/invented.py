"""Results of runs that never were, as the plug-in writes them: whole, consistent, and small."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from harness.results import (
    BAD,
    LEVELS,
    Collected,
    ProfileText,
    RankEvidence,
    Reproducer,
    RequirementText,
    RunEnd,
    RunHeader,
    TestResult,
    WaiverEntry,
    merged,
)

STARTED = 1.79e9  # 2026-09-21
PROFILE = """name = "made-up"
backend = "gloo"
device = "cpu"

[[waiver]]
tests = ["suites/replicate/test_a.py::test_two[*]"]
reason = "known to be wrong"
link = "https://example.com/issues/1"
expires = 2027-06-30
verdicts = ["failed"]
"""
FILE = "profiles/made-up.toml"
WAIVER = f"{FILE}:5"
SUITE = "5" * 64
SECONDS = 2.0

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
                        world=f"{size} ranks (gloo on cpu)",
                        seconds=SECONDS,
                        size=size,
                        dtype=dtype,
                        property_based=name == "two",
                        finished=STARTED + 10 + SECONDS * len(found),
                    )
                )
    for test in found:
        if "replicate/test_a.py::test_two[2" in test.nodeid:
            test.verdict, test.waiver, test.bare = "waived", WAIVER, "failed"
            test.reason, test.headline = "known to be wrong", "rank 0 of 2 failed first: AssertionError: 1 is not 2"
            test.ranks = evidence()
            test.reproducer = Reproducer(file="repro_a.py", command="torchrun repro_a.py", text="print('no')\n")
        if "collectives/test_a.py::test_one[3" in test.nodeid:
            test.verdict, test.reason = "unsupported", "unsupported: not claimed: worlds of 3 ranks"
    return found


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
    requirements = {
        each: RequirementText(id=each, sentence=f"What {each} says.", source="torch.nn", level=level)
        for level, stack in LEVELS.items()
        for each in (requirement(stack, "one"), requirement(stack, "two"))
        if stack in stacks
    }
    waiver = WaiverEntry(
        place=WAIVER,
        tests=["suites/replicate/test_a.py::test_two[*]"],
        reason="known to be wrong",
        link="https://example.com/issues/1",
        expires="2027-06-30",
        verdicts=["failed"],
    )
    header = RunHeader(
        started=STARTED + later,
        arguments=["suites", "-n", "2"],
        environment={"torch": "2.13.0", "python": "3.11.7", "cpu": "A processor"},
        profile="made-up",
        profile_hash=hashlib.sha256(profile.encode()).hexdigest(),
        concord="0.1.0",
        suite_hash=SUITE,
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
    )
    bad = any(t.verdict in BAD for t in results)
    end = RunEnd(STARTED + later + 100, int(bad), whole=stacks, environment={"package backend": "1.0"})
    return [header, Collected([t.nodeid for t in results]), text, *requirements.values(), *results, end]


def written(found: Sequence[Any], *, honest: bool = True) -> bytes:
    """Records as a results file; ``honest``: with the counts and the digest that belong to them."""
    lines: list[bytes] = []
    digest = hashlib.sha256()
    for record in found:
        if isinstance(record, RunEnd) and honest:
            attempts: dict[str, list[TestResult]] = {}
            for r in found:
                if isinstance(r, TestResult):
                    attempts.setdefault(r.nodeid, []).append(r)
            verdicts = [merged(several).verdict for several in attempts.values()]
            record.counts = {v: verdicts.count(v) for v in sorted(set(verdicts))}
            record.digest = digest.hexdigest()
        lines.append(msgspec.json.encode(record) + b"\n")
        digest.update(lines[-1])
    return b"".join(lines)


def runs(*changes: Change) -> list[tuple[str, bytes]]:
    """Two runs of all levels, one with a random seed; each change is made to the records of both."""
    found = []
    for name, made in (
        ("first", records()),
        ("second", records("123", drawn=True, later=1000)),
    ):
        for change in changes:
            change(made)
        found.append((name, written(made)))
    return found


def tried(nodeid: str, *verdicts: str, exit_status: int = 1) -> Change:
    """Makes several attempts of the results of tests whose name has this in it."""

    def apply(found: list[Any]) -> None:
        found[-1].exit_status = exit_status
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
