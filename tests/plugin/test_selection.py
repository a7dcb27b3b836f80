"""pytest's options that choose and show tests work on tests of worlds as on any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

TESTS = """
    import pytest

    def body(rank, right):
        assert right

    def test_first(world):
        world.run(body, True)

    def test_second(world):
        world.run(body, False)

    @pytest.mark.world(1, 3)
    def test_third(world):
        world.run(body, True)
"""


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    return make_folder({"test_it.py": TESTS})


@pytest.fixture(scope="module")
def stopped(folder: Folder) -> Session:
    return folder.run("-x", "--durations=3", "-vv", "--concord-results", "out")


def test_exitfirst(stopped: Session) -> None:
    """-x ends the session with the first failure; what was not reached is not-run, and the run is complete."""
    assert stopped.counts == {"passed": 1, "failed": 1}
    assert [t.verdict for t in stopped.results.tests.values()] == ["passed", "failed", "not-run", "not-run"]
    assert (stopped.results.complete, stopped.results.exit_status) == (True, 1)


def test_durations(stopped: Session) -> None:
    """--durations lists set-up, call and teardown of tests with worlds."""
    _, _, listed = stopped.out.partition("slowest 3 durations")
    assert "s setup    test_it.py::test_first[2ranks]" in listed


def test_last_failed(stopped: Session, folder: Folder) -> None:
    """--lf runs again what failed, with --setup-show naming the fixture and its world."""
    again = folder.run("--lf", "--setup-show")
    assert again.counts == {"failed": 1}
    assert "SETUP    F world[2 ranks]" in again.out.replace("'", "")
    assert "TEARDOWN F world[2 ranks]" in again.out.replace("'", "")


def test_keyword(folder: Folder) -> None:
    """-k takes the id of a size."""
    session = folder.run("-k", "third and 3ranks", "--collect-only", "-q")
    assert session.out.splitlines()[0] == "test_it.py::test_third[3ranks]"
    assert session.out.splitlines()[1] == ""


def test_collect_only(folder: Folder) -> None:
    """--collect-only lists a test for each size, two ranks where none is given, and imports no torch."""
    folder.write(
        "conftest.py",
        """
        import sys

        def pytest_unconfigure():
            print("torch" if "torch" in sys.modules else "no torch")
        """,
    )
    session = folder.run("--collect-only", "-q", fresh=True)
    assert session.out.splitlines()[:4] == [
        "test_it.py::test_first[2ranks]",
        "test_it.py::test_second[2ranks]",
        "test_it.py::test_third[1rank]",
        "test_it.py::test_third[3ranks]",
    ]
    assert session.out.splitlines()[-1] == "no torch"


COMBINED = """
    import pytest

    @pytest.mark.each_choice
    @pytest.mark.parametrize("op", ["sum", "max", "min"])
    @pytest.mark.world(1, 2)
    def test_op(world, op):
        world.run(lambda rank: rank.size)

    @pytest.mark.parametrize("letter", "ab")
    @pytest.mark.parametrize("digit", "12")
    def test_unmarked(letter, digit):
        pass
"""


@pytest.mark.parametrize(
    ("options", "expected", "left"),
    [
        ((), ["1rank-sum", "2ranks-max", "1rank-min"], 3),
        (("-n", "2"), ["1rank-sum", "2ranks-max", "1rank-min"], 3),
        (("--thorough",), [f"{size}-{op}" for size in ("1rank", "2ranks") for op in ("sum", "max", "min")], 0),
        (("-k", "2ranks or unmarked"), ["2ranks-sum", "2ranks-max", "2ranks-min"], 0),
        (("-k", "2ranks and max"), ["2ranks-max"], 0),
        (("test_it.py::test_op[2ranks-sum]",), ["2ranks-sum"], 0),
        (("test_it.py::test_op",), ["1rank-sum", "2ranks-max", "1rank-min"], 3),
    ],
    ids=["default", "workers", "thorough", "of-a-size", "of-one", "named", "function"],
)
def test_each_choice(
    make_folder: Callable[[dict[str, str]], Folder], options: tuple[str, ...], expected: list[str], left: int
) -> None:
    """Each value of each parameter is tested once, unless all combinations or one by name are asked for."""
    named = any("::" in option for option in options)
    session = make_folder({"test_it.py": COMBINED}).run(*options, "--concord-results", "out")
    ran = [test for test in session.results.tests if "test_op" in test]
    assert {test.partition("[")[2].rstrip("]") for test in ran} == set(expected)
    assert session.counts["passed"] == len(expected) + (0 if named or "and" in str(options) else 4)
    said = f"{left} more combinations of parameters are tested with --thorough"
    assert (said in session.out) is (left > 0)
