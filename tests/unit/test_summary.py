"""Verdicts of tests, from what pytest says of their phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import results
from harness.plugin.summary import Summary, counts_by_stack, verdict_of
from harness.results import VERDICTS, GivenWorld, TestResult, TorchLacks

PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}


def result(verdict: str, nodeid: str = "a", stack: str = "") -> TestResult:
    return TestResult(nodeid=nodeid, verdict=verdict, stack=stack)


class TestVerdictOf:
    @pytest.mark.parametrize(
        ("outcomes", "properties", "reason", "expected"),
        [
            (PASSED, {}, "", "passed"),
            ({**PASSED, "call": "failed"}, {}, "", "failed"),
            ({**PASSED, "call": "failed"}, {"verdict": "hung"}, "", "hung"),
            ({**PASSED, "call": "failed"}, {"verdict": "crashed"}, "", "crashed"),
            ({"setup": "failed", "teardown": "passed"}, {}, "", "failed"),
            ({**PASSED, "teardown": "failed"}, {}, "", "failed"),
            ({**PASSED, "teardown": "failed"}, {"verdict": "crashed"}, "", "crashed"),
            ({"setup": "skipped", "teardown": "passed"}, {}, "unsupported: float8", "unsupported"),
            ({"setup": "skipped", "teardown": "passed"}, {}, "no time", "not-run"),
            ({"setup": "skipped", "teardown": "passed"}, {}, "is unsupported: x", "not-run"),
            ({**PASSED, "call": "skipped"}, {}, "", "not-run"),
            ({**PASSED, "call": "skipped"}, {"waived": "1"}, "", "waived"),
            ({**PASSED, "call": "failed"}, {"waived": "1"}, "", "failed"),
            ({"setup": "passed", "teardown": "passed"}, {}, "", "not-run"),
            ({}, {}, "", "not-run"),
        ],
    )
    def test_phases(
        self, outcomes: Mapping[str, str], properties: Mapping[str, str], reason: str, expected: str
    ) -> None:
        """A verdict follows the worst phase; only a test whose body ran can have passed."""
        assert verdict_of(outcomes, properties, reason, lost=False) == expected

    @pytest.mark.parametrize("outcomes", [PASSED, {}, {"setup": "passed"}], ids=str)
    def test_lost_worker(self, outcomes: Mapping[str, str]) -> None:
        """A test whose worker died has crashed, whatever was known of it before."""
        assert verdict_of(outcomes, {"waived": "1"}, "unsupported: x", lost=True) == "crashed"


class TestCountsByStack:
    def test_counts(self) -> None:
        """Tests are counted by stack and verdict."""
        tests = [result("passed", stack="a"), result("passed", stack="a"), result("hung", stack="b")]
        assert counts_by_stack(tests, others=False) == {"a": {"passed": 2}, "b": {"hung": 1}}

    @pytest.mark.parametrize(("others", "expected"), [(True, {"(other)": {"passed": 1}}), (False, {})], ids=str)
    def test_other_tests(self, others: bool, expected: dict[str, dict[str, int]]) -> None:
        """Tests of no stack are counted where someone wants them."""
        assert counts_by_stack([result("passed")], others=others) == expected

    def test_nothing(self) -> None:
        """No tests, no counts."""
        assert counts_by_stack([], others=True) == {}


def report(when: str, outcome: str = "passed", **other: Any) -> Any:
    values = {
        "nodeid": "suites/collectives/test_x.py::test_a",
        "when": when,
        "outcome": outcome,
        "duration": 0.5,
        "user_properties": [],
        "longrepr": None,
        "sections": [],
        "failed": outcome == "failed",
        "skipped": outcome == "skipped",
    }
    values |= other
    return SimpleNamespace(longreprtext=str(values["longrepr"] or ""), **values)


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    config = SimpleNamespace(
        rootpath=tmp_path,
        getoption={"subject": "reference", "fault": []}.get,
        getini=lambda name: "out",
        stash=pytest.Stash(),
        invocation_params=SimpleNamespace(args=("-x",)),
    )
    profiles = SimpleNamespace(described=lambda: ("cpu-gloo", "0" * 64), settled=None)
    seeds = SimpleNamespace(seed="7", drawn=True, challenge=None)
    loaded = SimpleNamespace(plugins=dict, files=dict)
    return Summary(config, profiles, seeds, loaded)  # type: ignore[arg-type]


def finished(summary: Summary, *reports: Any) -> TestResult:
    for each in reports:
        summary.pytest_runtest_logreport(each)
    assert summary.writer is not None
    summary.writer.close()
    (test,) = results.read(summary.writer.path).tests.values()
    return test


class TestSummary:
    def test_passed(self, summary: Summary) -> None:
        """A test's phases become one result on disk, with the stack and the time of all three."""
        test = finished(summary, report("setup"), report("call"), report("teardown"))
        assert (test.verdict, test.stack, test.seconds) == ("passed", "collectives", 1.5)

    def test_properties(self, summary: Summary) -> None:
        """What the plug-in noted on a test is in its result."""
        notes = [("concord.requirements", "A-B-01,A-B-02"), ("other", "x")]
        facts = {"world": {"ranks": 2, "backend": "any", "device": "cpu", "sizes": [1, 2]}}
        setup = report("setup", user_properties=notes, concord_facts=facts)
        test = finished(summary, setup, report("call"), report("teardown"))
        assert (test.world, test.requirements) == (GivenWorld(2, "any", "cpu", (1, 2)), ["A-B-01", "A-B-02"])

    def test_headline(self, summary: Summary) -> None:
        """The headline of a failure is the first line of its message."""
        longrepr = SimpleNamespace(reprcrash=SimpleNamespace(message="first\nsecond"))
        test = finished(summary, report("setup"), report("call", "failed", longrepr=longrepr), report("teardown"))
        assert (test.verdict, test.headline) == ("failed", "first")

    def test_evidence(self, summary: Summary) -> None:
        """What each rank said is in the result of a failure."""
        ranks = [{"rank": 0, "kind": "died", "what": "killed"}]
        test = finished(summary, report("setup"), report("call", "failed", concord_ranks=ranks), report("teardown"))
        assert [(r.rank, r.what) for r in test.ranks] == [(0, "killed")]

    def test_evidence_of_a_waived_failure(self, summary: Summary) -> None:
        """A waived failure keeps what its ranks said, and its headline."""
        notes = [("concord.waived", "p.toml:3"), ("concord.verdict", "crashed"), ("concord.headline", "rank 0 died")]
        ranks = [{"rank": 0, "kind": "died"}]
        call = report("call", "skipped", concord_ranks=ranks, user_properties=notes, wasxfail="known")
        test = finished(summary, report("setup"), call, report("teardown"))
        assert (test.verdict, test.headline, [r.kind for r in test.ranks]) == ("waived", "rank 0 died", ["died"])

    def test_profile(self, summary: Summary) -> None:
        """The first line names the profile that the run goes by."""
        finished(summary, report("setup"), report("call"), report("teardown"))
        assert summary.writer is not None
        header = results.read(summary.writer.path).header
        assert (header.profile, header.profile_hash) == ("cpu-gloo", "0" * 64)

    def test_skipped(self, summary: Summary) -> None:
        """A skip has its reason."""
        longrepr = ("x.py", 3, "Skipped: unsupported: float8")
        test = finished(summary, report("setup", "skipped", longrepr=longrepr), report("teardown"))
        assert (test.verdict, test.reason, test.cause) == ("unsupported", "unsupported: float8", None)

    def test_skipped_for_a_cause(self, summary: Summary) -> None:
        """A skip that carries its cause has it in the results, whatever its text, and the reason is the cause's."""
        longrepr = ("x.py", 3, "Skipped: no float8")
        skip = report("call", "skipped", longrepr=longrepr, concord_cause={"cause": "torch-lacks", "what": "float8"})
        test = finished(summary, report("setup"), skip, report("teardown"))
        assert (test.verdict, test.cause) == ("unsupported", TorchLacks("float8"))
        assert test.reason == "unsupported: this torch has no float8"

    def test_failed_after_a_cause(self, summary: Summary) -> None:
        """A test that fails after its skip is failed, and has no cause."""
        cause = {"cause": "torch-lacks", "what": "float8"}
        skip = report("call", "skipped", longrepr=("x.py", 3, "Skipped: unsupported: x"), concord_cause=cause)
        test = finished(summary, report("setup"), skip, report("teardown", "failed", longrepr="no"))
        assert (test.verdict, test.cause) == ("failed", None)

    def test_lost_worker(self, summary: Summary) -> None:
        """The report of a worker that died ends the test at once, as crashed."""
        test = finished(summary, report("setup"), report("???", "failed", longrepr="worker 'gw0' crashed"))
        assert (test.verdict, test.headline) == ("crashed", "worker 'gw0' crashed")

    @pytest.mark.parametrize("text", ["\ud800", "\x1b[31m", "x" * 1_000_000, "{0}%s"], ids=lambda t: ascii(t[:9]))
    def test_hostile_message(self, summary: Summary, text: str) -> None:
        """Whatever a failure says, its verdict is on disk."""
        test = finished(summary, report("setup"), report("call", "failed", longrepr=text), report("teardown"))
        assert test.verdict == "failed"


def test_every_verdict_has_a_meaning() -> None:
    """No verdict comes out that is not in the list."""
    assert {"passed", "failed", "crashed", "hung", "flaky", "unsupported", "waived", "not-run"} == set(VERDICTS)
