"""Attempts at a test, counted where tests run, so that no plug-in that reruns failed tests can hide one.

Such plug-ins report failed attempts under outcomes of their own, or report only some of them, or none. But each has to
call pytest's hooks to run a test. So phases are counted where they run, and a failure that no report has mentioned goes
along with the test's next report.
"""

from __future__ import annotations

import unittest
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from harness.plugin import facts
from harness.plugin.rank_reports import evidence_of, ranks_failed, timed_out
from harness.plugin.worlds import request_of
from harness.redaction import current

_PHASES = ("setup", "call", "teardown")
_OF_ONE_ATTEMPT = (
    "concord.verdict",
    "concord.headline",
    "concord.first_rank",
    "concord.waived",
    "concord.owner",
    "concord.defect",
)
"""Properties noted on a test when it fails. The next attempt must not inherit them."""
_OF_THE_SESSION = (KeyboardInterrupt, pytest.exit.Exception)
_SKIPPING = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)


def ended_badly(report: Any) -> bool:
    """Return whether a report is of a failed phase. Plug-ins that rerun tests have outcomes of their own for one."""
    return report.outcome not in ("passed", "skipped")


@dataclass
class _Bad:
    """A failed phase that no report has mentioned."""

    attempt: int
    when: str
    item: pytest.Item
    source: pytest.ExceptionInfo[BaseException] | pytest.TestReport | None
    """What says why it failed. It is dropped after that, because an exception holds the frames of the test."""
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        """Attempt and phase, in the order in which they run."""
        return self.attempt, _PHASES.index(self.when)

    def settle(self) -> None:
        """Record why it failed, as plain data for :class:`harness.plugin.summary.Told`."""
        if self.source is not None:
            if isinstance(self.source, pytest.TestReport):
                evidence = _by_report(self.source)
            else:
                evidence = _by_exception(self.item, self.source)
            self.said = {"attempt": self.attempt, "when": self.when, **current().record(evidence)}
            self.source = None


@dataclass
class _Seen:
    """What a test has done so far in this process."""

    attempt: int = 1
    begun: set[str] = field(default_factory=set)
    """The phases of this attempt that have begun."""
    bad: list[_Bad] = field(default_factory=list)


class Attempts:
    """Counts attempts where tests run. Reports carry the number, and the failures that no other report mentioned."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def forget(self, nodeid: str) -> None:
        """Count the next run of a test as its first."""
        self._seen.pop(nodeid, None)

    def _begin(self, item: pytest.Item, what: str) -> _Seen:
        seen = self._seen.setdefault(item.nodeid, _Seen())
        if seen.begun and (what == "setup" or (what in seen.begun and what != "teardown")):
            for bad in seen.bad:
                bad.settle()
            item.user_properties[:] = [p for p in item.user_properties if p[0] not in _OF_ONE_ATTEMPT]
            seen.attempt += 1
            seen.begun.clear()
        seen.begun.add(what)
        return seen

    def _watched(self, item: pytest.Item, what: str, when: str) -> Generator[None, Any, Any]:
        seen = self._begin(item, what)
        try:
            return (yield)
        except (*_OF_THE_SESSION, *_SKIPPING):
            raise
        except BaseException as e:
            last = seen.bad[-1].source if seen.bad else None
            if not (isinstance(last, pytest.ExceptionInfo) and last.value is e):
                seen.bad.append(_Bad(seen.attempt, when, item, pytest.ExceptionInfo.from_exception(e)))
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._watched(item, "setup", "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._watched(item, "call", "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        return (yield from self._watched(pyfuncitem, "function", "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._watched(item, "teardown", "teardown"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        seen = self._seen.setdefault(item.nodeid, _Seen())
        before = seen.attempt
        report = yield
        report.concord_attempt = seen.attempt
        if seen.attempt != before:  # made from an earlier attempt, and returned as the report of this one
            report.user_properties = [p for p in report.user_properties if p[0] not in _OF_ONE_ATTEMPT]
            report.__dict__.update(concord_ranks=[], concord_reproducer=None, concord_cause=None, concord_reused=True)
        elif hasattr(report, "wasxfail"):
            seen.bad = [bad for bad in seen.bad if (bad.attempt, bad.when) != (seen.attempt, report.when)]
        elif ended_badly(report):
            for bad in seen.bad:
                if (bad.attempt, bad.when) == (seen.attempt, report.when):
                    bad.source = report
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        seen = self._seen.get(report.nodeid)
        if seen is None or report.when not in _PHASES:
            return  # the test ran in another process, which has added what it knows
        if not hasattr(report, "concord_attempt"):
            report.concord_attempt = seen.attempt
        at = report.concord_attempt, _PHASES.index(report.when)
        if ended_badly(report) and not hasattr(report, "concord_reused"):
            seen.bad = [bad for bad in seen.bad if bad.place != at]
        unsaid = [bad for bad in seen.bad if bad.place <= at]
        seen.bad = [bad for bad in seen.bad if bad.place > at]
        for bad in unsaid:
            bad.settle()
        report.concord_unsaid = [bad.said for bad in unsaid]


def _by_report(report: Any) -> dict[str, Any]:
    properties = {str(key): str(value) for key, value in report.user_properties}
    return {
        "verdict": properties.get("concord.verdict", "failed"),
        "headline": properties.get("concord.headline") or facts.message_of(report),
        "text": facts.text_of(report),
        "ranks": getattr(report, "concord_ranks", []),
        "reproducer": getattr(report, "concord_reproducer", None),
    }


def _by_exception(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    ranks = ranks_failed(error.value)
    reproducer = facts.reproducer_in(error.value)
    try:
        text = str(item.repr_failure(error))
    except Exception as e:  # the repr of an exception may raise anything, and the test has failed all the same
        text = f"{error.typename}, which can't be shown: {type(e).__name__}"
    if ranks is not None:
        verdict = ranks.verdict
    else:
        verdict = "hung" if request_of(item) is not None and timed_out(error.value) else "failed"
    return {
        "verdict": verdict,
        "headline": ranks.headline if ranks is not None else error.exconly(tryshort=True),
        "text": text[-facts.LONGEST_TEXT :],
        "ranks": evidence_of(ranks) if ranks is not None else [],
        "reproducer": msgspec.to_builtins(reproducer) if reproducer is not None else None,
    }
