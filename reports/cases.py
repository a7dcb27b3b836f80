"""The cases of a report: what every test of every run tried, merged by case and world size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.results import NOT_REACHED, PASSED, WRONG, Call, CaseOf, NotClaimed, Run, Setting, TestResult
from harness.results import UNDECLARED as LEFT_OUT
from reports.model import CASE_ORDER, UNDECLARED, CaseReport, TestReport

FEATURE = "feature"
"""The option as which a feature of a stack appears that the profile does not claim."""
_BAD = ("crashed", "hung", "failed", "waived")


def cases_of(runs: Sequence[Run], tests: Sequence[TestReport]) -> list[CaseReport]:
    """Merge the cases of all tests; the worst ending of a case decides its verdict.

    ``tests``: the tests of the report, to which cases refer by their positions.
    """
    found: dict[tuple[CaseOf, int], CaseReport] = {}
    numbers = {test.nodeid: number for number, test in enumerate(tests)}
    for run in runs:
        for test in run.tests.values():
            number = numbers[test.nodeid]
            for case, size, verdict, count in _of_test(test, run.cases):
                report = found.get((case, size))
                if report is None:
                    report = found[case, size] = CaseReport(case=case, size=size, verdict=verdict)
                _add(report, verdict, count, number)
    return sorted(found.values(), key=lambda each: (*each.words, each.size))


def _add(report: CaseReport, verdict: str, count: int, number: int) -> None:
    """Add what a test says of a case; tests with its worst verdict come first."""
    if CASE_ORDER.index(verdict) < CASE_ORDER.index(report.verdict):
        report.verdict = verdict
        report.tests[:] = [number, *(each for each in report.tests if each != number)]
    elif number not in report.tests:
        report.tests.append(number)
    report.count += count if verdict not in (NOT_REACHED, UNDECLARED) else 0


def _of_test(test: TestResult, table: Sequence[CaseOf]) -> Iterator[tuple[CaseOf, int, str, int]]:
    """Yield each case of a test with its world size, its verdict, and how often it was executed."""
    if isinstance(test.cause, NotClaimed):
        yield from ((case, test.size, UNDECLARED, 0) for case in _not_claimed(test.cause))
    for tried in test.tried:
        verdict = _verdict(test, tried.ended)
        for number, count in zip(tried.cases, tried.counts, strict=True):
            yield table[number], tried.size, verdict, count


def _verdict(test: TestResult, ended: str) -> str:
    if ended in (PASSED, NOT_REACHED):
        return ended
    if ended == LEFT_OUT:
        return UNDECLARED
    bad = test.verdict if test.verdict in _BAD else "failed"
    return "failed" if ended == WRONG and bad != "waived" else bad


def _not_claimed(cause: NotClaimed) -> Iterator[CaseOf]:
    """Yield what a test that did not run is about, as far as its cause says."""
    if cause.collective:
        for dtype in cause.dtypes or ("",):
            yield Call(cause.collective, cause.op, dtype, "", "", "", "")
    elif cause.stack and cause.feature:
        yield Setting(cause.stack, FEATURE, cause.feature)
