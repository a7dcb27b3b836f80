"""The check of what tests say they executed, cases and collectives: against each other, the profile, the suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from harness.profiles.vocabulary import COLLECTIVES, REDUCING
from harness.results import (
    ENDINGS,
    GROUPS,
    NOT_REACHED,
    STOPPED,
    UNDECLARED,
    WRONG,
    Call,
    CaseOf,
    Issued,
    Run,
    TestResult,
    Tried,
)
from harness.suite_facts import TestFacts
from reports.by_profile import Entitled
from reports.text import plural

_SAYS_CASES = 9
"""Since this version, results say which cases tests executed."""
_SAYS_COUNTS = 10
"""Since this version, results say how many collectives ranks issued."""
_SHOWN = 100
"""Characters of a word that a message repeats."""


def case_problems(run: Run) -> Iterator[str]:
    """Find contradictions within a run: cases of no test, and cases that a test cannot have had."""
    if run.cases and run.header.version < _SAYS_CASES:
        yield f"version {run.header.version} of results has no cases"
    if run.header.version < _SAYS_COUNTS and any(test.issued is not None for test in run.records()):
        yield f"version {run.header.version} of results does not count collectives"
    if twice := [case for case, count in Counter(run.cases).items() if count > 1]:
        yield f"its table has a case twice: {shown(twice[0])}"
    records = list(run.records())
    used = {number for test in records for tried in test.tried for number in tried.cases}
    if idle := [case for number, case in enumerate(run.cases) if number not in used]:
        more = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        yield f"no test tried the case {shown(idle[0])}{more}"
    for case in run.cases:
        yield from (f"the case {shown(case)}: {why}" for why in _words(case))
    for test in records:
        yield from (f"{test.nodeid}: {why}" for why in _of_test(test))


def shown(case: CaseOf) -> str:
    """Return a case in words."""
    if isinstance(case, Call):
        words = [case.collective, case.op, case.dtype, case.layout, case.out_layout, case.group, case.form]
    else:
        words = [case.stack, f"{case.option}={case.value}"]
    return " ".join(word[:_SHOWN] for word in words if word)


def _words(case: CaseOf) -> Iterator[str]:
    if not isinstance(case, Call):
        return
    if case.collective not in COLLECTIVES:
        yield "there is no such collective"
    elif bool(case.op) != (case.collective in REDUCING):
        yield f"{case.collective} {'reduces' if case.collective in REDUCING else 'does not reduce'}"
    if case.group not in GROUPS:
        yield f"{case.group[:_SHOWN]!r} is no kind of group"


def _of_test(test: TestResult) -> Iterator[str]:
    if test.issued is not None and not _sizes(test):
        yield "has collectives of ranks, but it had no world"
    seen = Counter((tried.size, tried.ended) for tried in test.tried)
    if any(count > 1 for count in seen.values()):
        yield "says twice which of its cases ended in one way"
    for tried in test.tried:
        if tried.ended not in ENDINGS:
            yield f"{tried.ended[:_SHOWN]!r} is no way in which a case ends"
        if sorted({*tried.cases}) != tried.cases or not tried.cases:
            yield "the numbers of its cases are not ascending"
        if 0 in tried.counts:
            yield "tried a case 0 times"
        yield from _possible(test, tried)


def _possible(test: TestResult, tried: Tried) -> Iterator[str]:
    """Say why a test of this verdict cannot have had such cases."""
    what = plural(len(tried.cases), "case")
    if test.verdict == "passed" and tried.ended in (WRONG, STOPPED, NOT_REACHED):
        yield f"is passed, but {what} of it: {tried.ended}"
    if test.verdict in ("unsupported", "not-run") and tried.ended in (WRONG, STOPPED):
        yield f"is {test.verdict}, but {what} of it: {tried.ended}"
    sizes = _sizes(test)
    if tried.size not in sizes:
        had = f"it had {', '.join(map(str, sizes))}" if sizes else "it had no world"
        yield f"tried {what} on {plural(tried.size, 'rank')}, but {had}"


def _sizes(test: TestResult) -> tuple[int, ...]:
    """Return the sizes of the worlds that a test had."""
    return () if test.world is None else test.world.sizes or (test.world.ranks,)


def other_claims(run: Run, by: Entitled) -> Iterator[str]:
    """Find cases that were executed although the profile does not claim them, or left out although it does."""
    claimed = [not isinstance(c, Call) or by.claims.has(c.collective, c.dtype, c.op) for c in run.cases]
    for test in run.records():
        for tried in test.tried:
            wrong = [number for number in tried.cases if claimed[number] == (tried.ended == UNDECLARED)]
            if wrong:
                said = (
                    "was left out, but the profile claims it" if claimed[wrong[0]] else "is not claimed, but was tried"
                )
                yield f"{test.nodeid}: the case {shown(run.cases[wrong[0]])} {said}"


def other_cases(run: Run, test: TestResult, facts: TestFacts) -> Iterator[str]:
    """Find cases of a test that are not about what the local suite says that the test is about."""
    cases = [run.cases[number] for tried in test.tried for number in tried.cases]
    about = [case for case in cases if isinstance(case, Call)]
    needs = facts.needs
    if about and needs.collective and all(case.collective != needs.collective for case in about):
        yield f"is about {needs.collective}, but tried {shown(about[0])}"
    for case in about:
        if (needs.dtype and case.dtype != needs.dtype) or (needs.op and case.op and case.op != needs.op):
            yield f"is about {' '.join(filter(None, (needs.op, needs.dtype)))}, but tried {shown(case)}"
            break


def same_cases(one: TestResult, run: Run, other: TestResult, again: Run) -> bool:
    """Return whether two results of a test, each of a run, have the same cases, as often and with the same endings.

    Older results do not say it, and then this is not known to be otherwise.
    """
    older = min(run.header.version, again.header.version) < _SAYS_CASES
    return older or _resolved(one, run) == _resolved(other, again)


def _resolved(test: TestResult, run: Run) -> dict[tuple[int, str, CaseOf], int]:
    return {
        (tried.size, tried.ended, run.cases[number]): count
        for tried in test.tried
        for number, count in zip(tried.cases, tried.counts, strict=True)
    }


def other_counts(one: TestResult, run: Run, other: TestResult, again: Run) -> str:
    """Say how two results of a test, each of a run, differ in the number of collectives; empty if they do not.

    Older results do not say it, and then this is not known to be otherwise.
    """
    if min(run.header.version, again.header.version) < _SAYS_COUNTS or one.issued == other.issued:
        return ""
    there, here = one.issued or Issued(), other.issued or Issued()
    pairs = [
        (name, there.by_name.get(name, 0), here.by_name.get(name, 0)) for name in {**there.by_name, **here.by_name}
    ]
    pairs.append(("on groups", there.on_groups, here.on_groups))
    differing = [f"{name[:_SHOWN]}: {old:,} there, {new:,} here" for name, old, new in pairs if old != new]
    return f"its ranks issued other collectives ({'; '.join(differing[:3]) or 'not counted in one of them'})"
