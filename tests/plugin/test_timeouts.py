"""pytest-timeout around ranks: the evidence is kept, nothing is left, and the session goes on where it can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

pytestmark = pytest.mark.slow

TESTS = """
    import time

    import pytest

    def test_before_it(world):
        assert world.run(lambda rank: rank.index) == [0, 1]

    @pytest.mark.timeout(5, func_only=True)
    def test_takes_too_long(world):
        def body(rank):
            print("before it slept")
            time.sleep(600)
        world.run(body)

    def test_after_it(world):
        assert world.run(lambda rank: rank.index) == [0, 1]
"""


def test_method_signal(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """With the signal method the test fails, its report says what the ranks did, and the next test passes."""
    session = make_folder({"test_it.py": TESTS}).run("-o", "timeout_method=signal", "--concord-results", "out")
    assert session.counts == {"failed": 1, "passed": 2}
    shown = session.section("test_takes_too_long[2ranks]")
    assert "Timeout (>5.0s)" in shown
    assert "rank 1: stopped by the harness while running, in body at " in shown
    assert "time.sleep(600)" in shown
    assert "before it slept" in shown
    assert session.results.tests["test_it.py::test_takes_too_long[2ranks]"].verdict == "hung"
    assert session.results.tests["test_it.py::test_after_it[2ranks]"].verdict == "passed"


def test_method_thread(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """With the thread method the session ends at once, and its ranks with it; the results stay readable."""
    folder = make_folder({"test_it.py": TESTS})
    session = folder.run("-o", "timeout_method=thread", "--concord-results", "out")
    assert session.code == 1
    assert "Timeout" in session.out + session.err
    assert not session.results.complete
    assert [t.verdict for t in session.results.tests.values()] == ["passed", "not-run", "not-run"]
