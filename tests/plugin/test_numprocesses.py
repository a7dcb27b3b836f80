"""``-n``: how many workers there are, what they run first, and what becomes of a test whose worker dies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

from harness.devices import cores, inventory

pytestmark = pytest.mark.slow

WORKERS = """
    import os
    import sys

    def test_workers():
        print("workers:", os.environ.get("PYTEST_XDIST_WORKER_COUNT", "none"))
        print("torch" if "torch" in sys.modules else "no torch")
"""

CORES = str(cores())


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (["-n", "gpus"], {"PYTEST_XDIST_AUTO_NUM_WORKERS": "3"}, str(len(inventory().devices))),
        (["-n", "auto"], {"PYTEST_XDIST_AUTO_NUM_WORKERS": "3"}, "3"),
        (["-n", "auto"], {}, CORES),
        (["-n", "1"], {}, "1"),
        (["-n", "0"], {}, "none"),
        ([], {}, "none"),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, list) else None,
)
def test_count(
    make_folder: Callable[[dict[str, str]], Folder], arguments: list[str], env: dict[str, str], expected: str
) -> None:
    """gpus is the number of worlds that can run side by side; auto and numbers are pytest-xdist's own."""
    session = make_folder({"test_it.py": WORKERS}).run(*arguments, "-rP", env=env, fresh=True)
    assert session.counts == {"passed": 1}
    assert f"workers: {expected}" in session.out
    assert ("concord: " in session.out) == ("gpus" in arguments)
    assert "\nno torch" in session.out or "gpus" in arguments


WORLDS = """
    import os
    import pytest

    def order(name):
        with open(f"order-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.txt", "a") as file:
            file.write(name + "\\n")

    def test_without():
        order("without")

    @pytest.mark.world(1)
    def test_one(world):
        order("one")
        world.run(lambda rank: None)

    @pytest.mark.world(4)
    def test_four(world):
        order("four")
        world.run(lambda rank: print("hello from", rank.index))

    @pytest.mark.world(2)
    def test_two(world):
        order("two")
        def body(rank):
            assert rank.index == 0
        world.run(body)

    @pytest.mark.world(3)
    def test_three(world):
        order("three")
        world.run(lambda rank: None)
"""


@pytest.fixture(scope="module")
def distributed(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    arguments = ("-n", "2", "--junitxml=junit.xml", "--concord-results", "out")
    return make_folder({"suites/tensor/test_it.py": WORLDS}).run(*arguments, "--rootdir=.", "suites")


def test_largest_worlds_first(distributed: Session) -> None:
    """Under -n every worker runs its largest worlds first, and tests without a world last."""
    sizes = {"without": 0, "one": 1, "two": 2, "three": 3, "four": 4}
    seen = [path.read_text().split() for path in distributed.folder.glob("order-*.txt")]
    assert sorted(name for names in seen for name in names) == sorted(sizes)
    for names in seen:
        assert [sizes[n] for n in names] == sorted((sizes[n] for n in names), reverse=True)


def test_results_of_workers(distributed: Session) -> None:
    """Verdicts, evidence of ranks and the table by stack arrive from workers as they do from a session without -n."""
    run = distributed.results
    assert run.complete
    assert run.counts()["passed"] == 4
    failed = run.tests["suites/tensor/test_it.py::test_two[2ranks]"]
    assert (failed.verdict, failed.stack) == ("failed", "tensor")
    assert failed.headline == "rank 1 of 2 failed first: AssertionError: assert 1 == 0"
    assert [(r.rank, r.kind, r.first) for r in failed.ranks] == [(0, "returned", False), (1, "raised", True)]
    distributed.lines.fnmatch_lines(["stack *passed*failed*", "tensor *4*1*"])


def test_report_of_a_worker_s_failure(distributed: Session) -> None:
    """The failure is shown in full, and JUnit XML has its properties."""
    assert "E   rank 1 of 2 failed first: AssertionError: assert 1 == 0" in distributed.out
    assert "traceback of rank 1" in distributed.out
    found = {p.get("name"): p.get("value") for p in distributed.junit("test_two[2ranks]").iter("property")}
    assert found["concord.verdict"] == "failed"


@pytest.mark.nightly
def test_file_order_without_workers(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Without -n tests run in the order of the file."""
    session = make_folder({"test_it.py": WORLDS}).run("-n", "0")
    assert (session.folder / "order-alone.txt").read_text().split() == ["without", "one", "four", "two", "three"]


def test_worker_that_is_killed(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A test whose worker dies has crashed; its ranks are gone, and another worker does the rest."""
    tests = """
        import os
        import signal

        def test_kills_its_worker(world):
            world.run(lambda rank: None)
            os.kill(os.getpid(), signal.SIGKILL)

        def test_survives(world):
            world.run(lambda rank: None)
    """
    session = make_folder({"test_it.py": tests}).run("-n", "1", "--concord-results", "out")
    verdicts = {name.split("::")[1]: t.verdict for name, t in session.results.tests.items()}
    assert verdicts == {"test_kills_its_worker[2ranks]": "crashed", "test_survives[2ranks]": "passed"}
    assert session.results.complete
    assert session.code == 1
