"""Tests that are run again: whatever runs them again, and whatever it reports, no failed attempt is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

from harness.results import Run
from reports.build import build
from reports.junit import junit

pytestmark = pytest.mark.slow

TESTS = """
    import os
    from pathlib import Path

    import pytest

    def attempt(name):
        with open(Path(__file__).with_name(name), "a") as file:
            file.write("x")
        return Path(file.name).stat().st_size

    def test_right_at_last():
        number = attempt("at_last")
        assert number == 3, f"attempt {number} fails"

    def test_never_right():
        raise ValueError("never right")

    def test_right():
        pass

    @pytest.mark.xfail(reason="known", strict=True)
    def test_known():
        raise ValueError("known")

    @pytest.fixture
    def shaky():
        assert attempt("shaky") > 1, "the set-up fails"

    def test_whose_setup_fails(shaky):
        pass

    @pytest.fixture
    def leaves_badly():
        yield
        assert attempt("leaves") > 1, "the teardown fails"

    def test_whose_teardown_fails(leaves_badly):
        pass
"""

WITH_RANKS = """
    import os
    import signal
    from pathlib import Path

    import torch.distributed as dist

    def test_dies_once(world):
        first = not Path(__file__).with_name("died").exists()
        Path(__file__).with_name("died").touch()
        def body(rank):
            if first and rank.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            assert not first
        world.run(body)

    def test_ends_its_worker():
        marker = Path(__file__).with_name("ended")
        if not marker.exists():
            marker.touch()
            os._exit(3)
"""

SILENT = """
    import pytest
    from _pytest.runner import runtestprotocol

    def pytest_runtest_protocol(item, nextitem):
        for number in range(3):
            item._initrequest()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            if not any(report.failed for report in reports):
                break
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        return True
"""
"""Tells of the last attempt only."""

CALLS_ONLY = """
    import pytest

    @pytest.hookimpl(tryfirst=True, wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        for number in range(2):
            if call.when != "call" or not report.failed:
                break
            item.ihook.pytest_runtest_teardown(item=item, nextitem=None)
            if number == 0:
                report.outcome = "again"
                item.ihook.pytest_runtest_logreport(report=report)
            item._initrequest()
            item.ihook.pytest_runtest_setup(item=item)
            call = pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_call(item=item), when="call")
            again = pytest.TestReport.from_item_and_call(item, call)
            report.outcome, report.longrepr = again.outcome, again.longrepr
        return report

    def pytest_report_teststatus(report):
        if report.outcome == "again":
            return "again", "A", "AGAIN"
"""
"""Runs it again while the first report is made, and tells of the first failure under an outcome of its own."""

KEEPS_FAILURES_BACK = """
    from _pytest import runner

    def pytest_runtest_protocol(item, nextitem):
        for number in range(3):
            item._initrequest()
            failed = False
            for when in ("setup", "call", "teardown"):
                if when == "call" and failed:
                    continue
                more = {"nextitem": nextitem} if when == "teardown" else {}
                report = runner.call_and_report(item, when, log=False, **more)
                failed |= report.failed
                if not report.failed or number == 2:
                    item.ihook.pytest_runtest_logreport(report=report)
            if not failed:
                break
        return True
"""
"""Tells of every attempt, and not of what failed."""

CALLS_THE_FUNCTION = """
    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        try:
            return (yield)
        except AssertionError:
            pass
        for number in range(2):
            try:
                return item.runtest()
            except AssertionError:
                if number == 1:
                    raise
"""
"""Calls the test's function again and again, in one phase."""

TURNS_INTO_PASSES = """
    import pytest

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        if report.failed:
            report.outcome, report.longrepr = "passed", None
        return report
"""
"""Runs nothing again, and says of every failure that it is none."""

FILE = "suites/collectives/test_it.py"


def came_to(run: Run) -> dict[str, str]:
    return {nodeid.partition("::")[2].partition("[")[0]: test.verdict for nodeid, test in run.tests.items()}


def attempts(run: Run, name: str) -> list[tuple[str, str]]:
    """Verdict and headline of each attempt at a test."""
    (found,) = ([each for each in run.records() if each.nodeid.partition("::")[2].partition("[")[0] == name],)
    return [(each.verdict, each.headline) for each in found]


AT_LAST = [
    ("failed", "AssertionError: attempt 1 fails"),
    ("failed", "AssertionError: attempt 2 fails"),
    ("passed", ""),
]


@pytest.fixture(scope="module", params=[(), ("-n", "2")], ids=["alone", "workers"])
def rerun(request: pytest.FixtureRequest, make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    return make_folder({FILE: TESTS}).run("--reruns", "2", "--concord-results", "out", *request.param)


def test_pytest_rerunfailures(rerun: Session) -> None:
    """A test that failed in any attempt is flaky or failed; what never failed is as ever."""
    assert came_to(rerun.results) == {
        "test_right_at_last": "flaky",
        "test_never_right": "failed",
        "test_right": "passed",
        "test_known": "waived",
        "test_whose_setup_fails": "flaky",
        "test_whose_teardown_fails": "flaky",
    }


def test_every_attempt_is_kept(rerun: Session) -> None:
    """Each attempt has its verdict, its headline and its text, in order."""
    run = rerun.results
    said = [(verdict, line.removesuffix("\n").split("\n")[0]) for verdict, line in attempts(run, "test_right_at_last")]
    assert said == AT_LAST
    assert [verdict for verdict, _ in attempts(run, "test_never_right")] == ["failed"] * 3
    assert ["the set-up fails" in line for _, line in attempts(run, "test_whose_setup_fails")] == [True, False]
    assert ["the teardown fails" in line for _, line in attempts(run, "test_whose_teardown_fails")] == [True, False]
    assert attempts(run, "test_right") == [("passed", "")]
    (flaky,) = (test for nodeid, test in run.tests.items() if "at_last" in nodeid)
    assert "attempt 1 fails" in flaky.text


def test_terminal_and_exit_status(rerun: Session) -> None:
    """The table counts flaky tests, a line names each with its attempts, and the session fails."""
    assert (rerun.code, rerun.results.exit_status) == (1, 1)
    rerun.lines.fnmatch_lines([f"FLAKY {FILE}::test_right_at_last (failed, failed, passed): *attempt 1 fails*"])


def test_reports_have_every_attempt(rerun: Session) -> None:
    """A report says of a flaky test that it is no pass, and has the evidence of each attempt."""
    (path,) = rerun.folder.glob("out/*/results.jsonl")
    made = build([("run", path.read_bytes())])
    (flaky,) = (test for test in made.tests if "at_last" in test.nodeid)
    assert (flaky.verdict, [each.verdict for each in flaky.attempts]) == ("flaky", ["failed", "failed", "passed"])
    assert "attempt 2 fails" in flaky.attempts[1].text
    assert b'message="AssertionError: attempt 1 fails' in junit(made)


@pytest.mark.parametrize("code", [0, 1], ids=["kept", "not-kept"])
def test_exit_status_of_a_session_with_nothing_but_flaky_tests(
    make_folder: Callable[[dict[str, str]], Folder], code: int
) -> None:
    """A flaky test fails a session that keeps results; the sessions of others, who keep none, end as they did."""
    folder = make_folder({"test_it.py": TESTS})
    kept = ("--concord-results", "out") if code else ()
    session = folder.run("--reruns", "2", "-k", "at_last", "-p", "no:cacheprovider", *kept)
    assert session.code == code


@pytest.mark.parametrize(
    ("plugin", "workers"),
    [
        pytest.param(SILENT, ("-n", "1"), id="silent"),
        pytest.param(CALLS_ONLY, (), id="calls-only"),
        pytest.param(KEEPS_FAILURES_BACK, (), id="keeps-failures-back"),
        pytest.param(CALLS_THE_FUNCTION, (), id="calls-the-function"),
    ],
)
def test_other_plugins(make_folder: Callable[[dict[str, str]], Folder], plugin: str, workers: tuple[str, ...]) -> None:
    """Whatever runs a test again, and whatever it says of that, each attempt is in the results with its evidence."""
    folder = make_folder({FILE: TESTS, "conftest.py": plugin})
    run = folder.run("-k", "right", "--concord-results", "out", *workers).results
    assert came_to(run) == {"test_right_at_last": "flaky", "test_never_right": "failed", "test_right": "passed"}
    said = [(verdict, line.split("\n")[0]) for verdict, line in attempts(run, "test_right_at_last")]
    assert said == AT_LAST


def test_failure_that_is_called_a_pass(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A plug-in that changes a failed report into a passed one does not change what the test comes to."""
    folder = make_folder({FILE: TESTS, "conftest.py": TURNS_INTO_PASSES})
    run = folder.run("-k", "right or teardown or known", "--concord-results", "out").results
    assert came_to(run) == {
        "test_right_at_last": "failed",
        "test_never_right": "failed",
        "test_right": "passed",
        "test_known": "waived",
        "test_whose_teardown_fails": "failed",
    }
    assert attempts(run, "test_never_right") == [("failed", "ValueError: never right")]


@pytest.mark.nightly
def test_ranks_and_workers_that_die(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """An attempt that lost a rank, or the process that ran it, is kept as crashed, the ranks' evidence with it."""
    folder = make_folder({FILE: WITH_RANKS})
    session = folder.run("--reruns", "1", "-n", "1", "--concord-results", "out")
    run = session.results
    assert came_to(run) == {"test_dies_once": "flaky", "test_ends_its_worker": "flaky"}
    died = attempts(run, "test_dies_once")
    assert [verdict for verdict, _ in died] == ["crashed", "passed"]
    assert "killed by SIGKILL" in died[0][1]
    assert [verdict for verdict, _ in attempts(run, "test_ends_its_worker")] == ["crashed", "passed"]
    (test,) = (test for nodeid, test in run.tests.items() if "dies_once" in nodeid)
    assert [rank.kind for rank in test.ranks] != []


DIFFERENTLY = """
    import os
    import signal
    from pathlib import Path

    def test_differently(world):
        first = not Path(__file__).with_name("died").exists()
        Path(__file__).with_name("died").touch()
        def body(rank):
            if first:
                os.kill(os.getpid(), signal.SIGKILL)
            assert False, "this time it is wrong"
        world.run(body)
"""


def test_evidence_of_one_attempt_is_none_of_the_next(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """What was noted on a test when its ranks died is gone when it is run again."""
    folder = make_folder({FILE: DIFFERENTLY})
    run = folder.run("--reruns", "1", "--concord-results", "out").results
    (first, second) = attempts(run, "test_differently")
    assert (first[0], second[0]) == ("crashed", "failed")
    assert "this time it is wrong" in second[1]
    assert came_to(run) == {"test_differently": "crashed"}
