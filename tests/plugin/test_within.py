"""``--within``: which tests run, in which order, what happens when the time is over, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

from harness.results import OptionGiven

pytestmark = pytest.mark.slow

TESTS = """
    import pytest
    from harness import requirement

    @requirement("X-ONE-01", "One is one.", source="arithmetic")
    @pytest.mark.parametrize("number", [1, 2])
    def test_one(number):
        pass

    @requirement("X-TWO-01", "Two is two.", source="arithmetic")
    def test_two():
        pass

    @requirement("X-TWO-02", "Three is three.", source="arithmetic")
    def test_three():
        pass

    def test_of_nothing():
        pass
"""
DURATIONS = """
    {"machine": "", "torch": "", "seconds": {"test_it.py": {"test_one[1]": 100.0, "test_one[2]": 300.0,
    "test_two": 200.0, "test_three": 3000.0}}}
"""
NOTICED = """
    {"results": [{"defect": {"name": "a"}, "test": "test_it.py::test_one[2]"},
                 {"defect": {"name": "b"}, "test": "test_it.py::test_one[2]"},
                 {"defect": {"name": "c"}, "test": "test_it.py::test_three"}]}
"""
AT_ONCE = "import harness.plugin.within\n\nharness.plugin.within.STARTING = 0.0\n"
FILES = {"test_it.py": TESTS, "fixtures/durations.json": DURATIONS, "fixtures/faults/noticed.json": NOTICED}


@pytest.fixture
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    return make_folder({**FILES, "conftest.py": AT_ONCE})


@pytest.mark.parametrize("workers", ["0", "2"])
def test_chosen(folder: Folder, workers: str) -> None:
    """What asks the most in the time runs, and tests that prove no requirement; two workers have twice the time."""
    time = {"0": "620s", "2": "310s"}[workers]
    session = folder.run("--within", time, "-n", workers, "--concord-results", "out")
    assert session.counts["passed"] == 4, session.out
    assert (
        f"--within {time}: 3 of 4 tests, which ask 2 of 3 requirements and are known to notice 2 of 3 faults and "
        f"mutants; expected to take {'10m00s' if workers == '0' else '5m00s'} with {max(1, int(workers))} at a time"
    ) in session.out
    end = session.results.end
    assert end is not None
    assert end.left_out == [OptionGiven("--within")]


def test_order(folder: Folder) -> None:
    """The most valuable test runs first, after those that prove no requirement."""
    session = folder.run("--within", "620s", "-v")
    ran = [line.split()[0].rpartition("::")[2] for line in session.out.splitlines() if " PASSED" in line]
    assert ran == ["test_of_nothing", "test_one[2]", "test_two", "test_one[1]"]


def test_time_over(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A test whose turn comes when the time is over is not run, and the results say why."""
    slow = TESTS.replace("pass", "__import__('time').sleep(1.5)")
    durations = '{"machine": "", "torch": "", "seconds": {"test_it.py": {"test_two": 0.1}}}'
    folder = make_folder({**FILES, "test_it.py": slow, "fixtures/durations.json": durations, "conftest.py": AT_ONCE})
    session = folder.run("--within", "4s", "--concord-results", "out")
    tests = list(session.results.tests.values())
    verdicts = [test.verdict for test in tests]
    assert verdicts == sorted(verdicts, key=["passed", "not-run"].index), session.out
    assert (verdicts[0], verdicts[-1]) == ("passed", "not-run"), session.out
    assert tests[-1].reason == "--within 4s: the time was over before its turn"


@pytest.mark.parametrize("time", ["5", "soon", "0m", "-3s"])
def test_no_time(folder: Folder, time: str) -> None:
    """A time without a unit, or that is none, ends the run at once with what it takes."""
    session = folder.run(f"--within={time}")
    assert session.code == 4
    assert f"--within='{time}': a time above 0 with its units, as in 90s, 30m, 8h or 1h30m" in session.out + session.err


def test_too_soon(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A time in which nothing ends is refused."""
    session = make_folder(FILES).run("--within", "20s")
    assert session.code == 4
    assert "--within 20s: no test ends so soon; Concord takes 25 s to start" in session.out + session.err
