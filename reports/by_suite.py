"""The check of a run against the local suite, whose facts replace those of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from harness.requirements import LEVELS, stack_of
from harness.results import RequirementText, Run, TestResult, foreign
from harness.suite_facts import TestFacts
from reports.by_profile import Entitled
from reports.checkout import Checkout, swept
from reports.coherence import listed, never_begun
from reports.tried import other_cases

_SAYS_HOW = 4
"""Since this version, results say which plug-ins and files were loaded."""
_TOLD = ("requirements", "size", "dtype", "property_based")
_OF_REQUIREMENTS = ("sentence", "source", "level", "mandatory")


def suite_problems(run: Run, checkout: Checkout) -> Iterator[str]:
    """Find where a run contradicts the local suite; only for runs of the same suite, if its tests were collected."""
    if run.header.concord != checkout.concord:
        yield f"its Concord is {run.header.concord or 'unknown'}, but its suite belongs to Concord {checkout.concord}"
    if run.header.version != checkout.results:
        yield f"its results have version {run.header.version}, but its suite writes version {checkout.results}"
    yield from _whole(run, checkout)
    unknown = [nodeid for nodeid in run.tests if stack_of(nodeid) and checkout.test(nodeid) is None]
    if unknown:
        yield listed("tests that the suite does not have", unknown)
    for test in run.tests.values():
        facts = checkout.test(test.nodeid)
        if facts is not None and not _lost(test):
            yield from (f"{test.nodeid}: {why}" for why in (*_untrue(test, facts), *other_cases(run, test, facts)))
    brought = {name for test in run.tests.values() if not stack_of(test.nodeid) for name in test.requirements}
    for requirement in run.requirements.values():
        real = checkout.requirement(requirement.id)
        if real is None and requirement.id not in brought:
            yield f"the suite has no requirement {requirement.id}"
        elif real is not None:
            yield from _unlike(requirement, real)
    yield from _files(run, checkout)


def _whole(run: Run, checkout: Checkout) -> Iterator[str]:
    for stack in run.end.whole if run.end else ():
        there = set(checkout.of_stack(stack))
        mine = {swept(test) for test in run.tests if stack_of(test) == stack}
        if there - mine:
            yield listed(f"missing tests of {stack}", there - mine)
        strange = {test for test in mine - there if checkout.test(test) is None}  # benchmarks on demand are known
        if strange:
            yield listed(f"tests that {stack} does not have", strange)


def _lost(test: TestResult) -> bool:
    """Whether the run has no facts about the test: it never began, or its process died too early."""
    told = any(getattr(test, name) for name in _TOLD)
    return never_begun(test) or (test.verdict == "crashed" and not told)


def _untrue(test: TestResult, facts: TestFacts) -> Iterator[str]:
    if test.requirements != facts.requirements:
        says, real = (", ".join(each) or "nothing" for each in (test.requirements, facts.requirements))
        yield f"says that it proves {says}, but in the suite it proves {real}"
    if test.size != facts.size:
        yield f"says that it is on {test.size} ranks, but in the suite it is on {facts.size}"
    if test.dtype != facts.dtype:
        yield f"says that its dtype is {test.dtype or 'none'}, but in the suite it is {facts.dtype or 'none'}"
    if test.property_based != facts.property_based:
        said = "draws from the seed" if facts.property_based else "does not draw from the seed"
        yield f"its property_based is wrong: in the suite it {said}"


def _unlike(told: RequirementText, real: RequirementText) -> Iterator[str]:
    for what in _OF_REQUIREMENTS:
        if getattr(told, what) != getattr(real, what):
            says, suite = getattr(told, what), getattr(real, what)
            yield f"the {what} of requirement {told.id} is {says!r}, but in the suite {suite!r}"


def _files(run: Run, checkout: Checkout) -> Iterator[str]:
    files: Mapping[str, str] = getattr(run.end, "files", {}) if run.end else {}
    for name, digest in files.items():
        here = checkout.files.get(name)
        if here is None:
            yield f"{name}: the run loaded it, but the suite has no such file"
        elif here != digest:
            yield f"{name}: the run loaded a version that differs from the suite's"
    if files:
        tests = {test.nodeid.partition("::")[0] for test in run.tests.values() if test.stack and not _lost(test)}
        unread = [name for name in tests if name.startswith("suites/") and name not in files]
        if unread:
            yield listed("tests ran whose files the run never loaded", unread)


def other_worlds(run: Run, by: Entitled, checkout: Checkout) -> Iterator[str]:
    """Find tests that ran on a backend or device other than the one that the test, or else the profile, names."""
    elsewhere: dict[str, list[str]] = {}
    for test in run.tests.values():
        world, facts = test.world, checkout.test(test.nodeid)
        if world is not None and facts is not None:
            real = (facts.backend or by.profile.backend, facts.device or by.profile.device)
            if (world.backend, world.device) != real:
                what = (
                    f"tests ran on {world.backend} on {world.device}, but the profile is about {real[0]} on {real[1]}"
                )
                elsewhere.setdefault(what, []).append(test.nodeid)
    yield from (listed(what, tests) for what, tests in elsewhere.items())


def how_made(run: Run, checkout: Checkout | None) -> Iterator[str]:
    """Find foreign plug-ins of a run, and facts about loaded code that are missing."""
    if run.header.version < _SAYS_HOW:
        return  # reported as another version
    plugins = {**run.header.plugins, **(run.end.plugins if run.end is not None else {})}
    strange = foreign(plugins, checkout.files.values() if checkout is not None else ())
    if strange:
        yield listed("made with foreign code, the plug-ins", (f"{name} ({where})" for name, where in strange.items()))
    if not plugins:
        yield "it does not say which plug-ins were loaded"
    if run.end is not None and not run.end.files and run.tests:
        yield "it does not say which files of the suite were loaded"


def with_suite_of(run: Run, checkout: Checkout | None) -> Run:
    """Return the run with the suite's facts about tests, requirements and whole stacks instead of its own.

    A requirement that the suite does not have is kept only if a test from outside the suite proves it.
    """
    if checkout is None or checkout.facts is None or run.header.suite_hash != checkout.suite_hash:
        return run
    tests = {nodeid: _restated(test, checkout) for nodeid, test in run.tests.items()}
    proven = {name for test in tests.values() for name in test.requirements}
    requirements = {
        name: real for name in sorted(proven) if (real := checkout.requirement(name) or run.requirements.get(name))
    }
    end = run.end
    if end is not None:
        mine: dict[str, set[str]] = {stack: set() for stack in LEVELS.values()}
        for nodeid in run.collected:
            mine.setdefault(stack_of(nodeid), set()).add(swept(nodeid))
        whole = [stack for stack in end.whole if _has_all(mine.get(stack, set()), stack, checkout)]
        end = msgspec.structs.replace(end, whole=whole)
    return msgspec.structs.replace(run, tests=tests, requirements=requirements, end=end)


def _has_all(mine: set[str], stack: str, checkout: Checkout) -> bool:
    """Whether these are the tests of a stack, or more of them that the suite has on demand."""
    there = set(checkout.of_stack(stack))
    return there <= mine and all(checkout.test(nodeid) is not None for nodeid in mine - there)


def _restated(test: TestResult, checkout: Checkout) -> TestResult:
    facts = checkout.test(test.nodeid)
    stack = stack_of(test.nodeid)
    if facts is None:
        return msgspec.structs.replace(test, stack=stack)
    return msgspec.structs.replace(
        test,
        stack=stack,
        requirements=facts.requirements,
        size=facts.size,
        dtype=facts.dtype,
        property_based=facts.property_based,
    )
