"""What a failure on ranks looks like under pytest's own options: styles of traceback, locals, output, assertions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

TESTS = """
    import sys

    import pytest
    import torch
    import torch.distributed as dist

    from checks import assert_in_module

    def test_fails(world):
        def body(rank):
            print("about to compare", rank.index)
            print("to stderr", rank.index, file=sys.stderr)
            dist.barrier()
            expected = {"index": 0}
            observed = {"index": rank.index}
            assert observed == expected, "ranks differ"
        world.run(body)

    @pytest.fixture
    def compare(assert_in_conftest):
        return assert_in_conftest

    def test_fails_in_conftest(world, compare):
        world.run(lambda rank: compare([1, 2, rank.index], [1, 2, 0]))

    def test_fails_in_module(world):
        world.run(lambda rank: assert_in_module(rank.index + 5))

    def test_passes(world):
        def body(rank):
            print("all is well on", rank.index)
            print("no newline at the end", end="")
        world.run(body)
"""

CONFTEST = """
    import pytest

    pytest.register_assert_rewrite("checks")

    def equal(left, right):
        assert left == right

    @pytest.fixture
    def assert_in_conftest():
        return equal
"""

CHECKS = """
    def assert_in_module(value):
        assert value % 2 == 1 and value > 9
"""

STYLES = ("short", "long", "native", "line", "no")


@pytest.fixture(scope="module")
def sessions(make_folder: Callable[[dict[str, str]], Folder]) -> dict[str, Session]:
    """A session for each style of traceback, two at a time, and one with ``-s``."""
    found: dict[str, Session] = {}
    arguments = {style: ["-k", "test_fails", f"--tb={style}"] for style in STYLES}
    arguments["short"] = ["--tb=short"]
    arguments["long"] += ["--showlocals"]
    arguments["line"] = ["-k", "test_fails or test_passes", "-s", "--tb=line"]
    names = list(arguments)
    for pair in (names[i : i + 2] for i in range(0, len(names), 2)):
        folders = {
            name: make_folder({"test_it.py": TESTS, "conftest.py": CONFTEST, "checks.py": CHECKS}) for name in pair
        }
        started = {name: folders[name].start(*arguments[name]) for name in pair}
        found.update({name: running.end() for name, running in started.items()})
    return found


def test_no_session_leaves_a_process(sessions: dict[str, Session]) -> None:
    """After the end of a session none of its processes is there."""
    assert {name: session.orphans for name, session in sessions.items()} == dict.fromkeys(sessions, ())


def test_failure_begins_with_what_happened(sessions: dict[str, Session]) -> None:
    """A failure shows the line of the test, who failed first with what, and who else did what."""
    pytest.LineMatcher(sessions["short"].section("test_fails[2ranks]").split("\n")[1:]).fnmatch_lines(
        [
            "test_it.py:*: in test_fails",
            "    world.run(body)",
            "E   rank 1 of 2 failed first: AssertionError: ranks differ*",
            "E     in test_fails.<locals>.body on 2 ranks (gloo on cpu)",
            "E     rank 1: FIRST TO FAIL: AssertionError: ranks differ",
            "E     rank 0: returned",
            "*-- traceback of rank 1 --*",
            "test_it.py:*: in body",
            "    assert observed == expected, *",
            "E   AssertionError: ranks differ",
            "*-- last collectives --*",
            "rank 0: barrier*test_it.py:*",
            "rank 1: barrier*test_it.py:*",
        ],
        consecutive=False,
    )


@pytest.mark.parametrize("style", ["short", "long", "native"])
def test_no_line_of_the_harness_is_shown(sessions: dict[str, Session], style: str) -> None:
    """A user's failure is shown in the user's code alone."""
    assert "harness/" not in sessions[style].section("test_fails[2ranks]")


def test_assertion_shows_values(sessions: dict[str, Session]) -> None:
    """A failed assert on a rank is explained as pytest explains it: with the values, and what differs."""
    shown = sessions["short"].section("test_fails[2ranks]")
    assert "assert {'index': 1} == {'index': 0}" in shown
    assert "Differing items:" in shown


def test_assertion_in_conftest_shows_values(sessions: dict[str, Session]) -> None:
    """So is one in a function that comes from a conftest."""
    shown = sessions["short"].section("test_fails_in_conftest[2ranks]")
    assert "assert [1, 2, 1] == [1, 2, 0]" in shown
    assert "At index 2 diff: 1 != 0" in shown


def test_assertion_in_registered_module_shows_values(sessions: dict[str, Session]) -> None:
    """So is one in a module that the test registered for assertion rewriting."""
    shown = sessions["short"].section("test_fails_in_module[2ranks]")
    assert "assert ((5 % 2) == 1 and 5 > 9)" in shown


def test_each_rank_s_output_is_shown_with_the_failure(sessions: dict[str, Session]) -> None:
    """What the ranks of a failed test printed, to either stream, is shown per rank."""
    shown = sessions["short"].section("test_fails[2ranks]")
    for rank in (0, 1):
        _, _, mine = shown.partition(f"Captured stdout call (rank {rank})")
        assert f"about to compare {rank}\nto stderr {rank}" in mine


def test_output_of_a_passed_test_is_captured(sessions: dict[str, Session]) -> None:
    """What the ranks of a passed test printed is not shown."""
    assert "all is well" not in sessions["short"].out


def test_output_comes_at_once_without_capturing(sessions: dict[str, Session]) -> None:
    """With -s each line of a rank comes with its rank, also the last one without an end."""
    lines = sessions["line"].out.split("\n")
    assert any(line.endswith("[rank 1] all is well on 1") for line in lines)
    assert "[rank 0] no newline at the end" in lines
    assert "[rank 1] no newline at the end" in lines
    assert any(line.endswith("[rank 0] about to compare 0") for line in lines)
    assert "[rank 1] to stderr 1" in lines


def test_style_long(sessions: dict[str, Session]) -> None:
    """--tb=long shows the whole function on the rank with the failing line marked."""
    shown = sessions["long"].section("test_fails[2ranks]")
    assert '    def body(rank):\n        print("about to compare", rank.index)' in shown
    assert '>       assert observed == expected, "ranks differ"' in shown


def test_showlocals(sessions: dict[str, Session]) -> None:
    """--showlocals shows the locals of the rank's frames."""
    shown = sessions["long"].section("test_fails[2ranks]")
    assert "observed   = {'index': 1}" in shown
    assert "expected   = {'index': 0}" in shown


def test_style_native(sessions: dict[str, Session]) -> None:
    """--tb=native shows the rank's traceback as Python does."""
    shown = sessions["native"].section("test_fails[2ranks]")
    assert "Traceback (most recent call last):" in shown
    assert ", in body\n" in shown


def test_style_line(sessions: dict[str, Session]) -> None:
    """--tb=line shows one line: the place on the rank and the headline."""
    sessions["line"].lines.re_match_lines(
        [r".*test_it\.py:\d+: rank 1 of 2 failed first: AssertionError: ranks differ.*"]
    )


def test_style_no(sessions: dict[str, Session]) -> None:
    """--tb=no shows no traceback, and the summary still says which test failed, and how."""
    assert "traceback of rank" not in sessions["no"].out
    sessions["no"].lines.fnmatch_lines(
        ["FAILED test_it.py::test_fails[[]2ranks] - rank 1 of 2 failed first: AssertionError: ranks differ*"]
    )


@pytest.mark.parametrize("style", STYLES)
def test_count_does_not_depend_on_the_style(sessions: dict[str, Session], style: str) -> None:
    """However a failure is shown, it is one."""
    assert sessions[style].counts["failed"] == 3
    assert sessions[style].code == 1


CHANGED = """
    from pathlib import Path

    def test_fails(world):
        def body(rank):
            raise ValueError("too soon")
        Path(__file__).write_text("")
        world.run(body)

    def test_passes(world):
        world.run(lambda rank: None)
"""


def test_a_file_that_was_changed(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """If the file of a failing test is another one by now, its lines are left out, and the session goes on."""
    session = make_folder({"test_it.py": CHANGED}).start().end()
    assert (session.counts["failed"], session.counts["passed"], session.code) == (1, 1, 1)
    assert "of 2 failed first: ValueError: too soon" in session.section("test_fails[2ranks]")
