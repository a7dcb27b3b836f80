"""The results file and the table of verdicts: complete as far as the run came, whatever ended it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import Folder, Session

from harness.results import VERDICTS, Deselected, LeftOut, NoBackend, NoStack, NotCollected, TorchLacks, read

pytestmark = pytest.mark.slow

TESTS = """
    import os
    import signal

    import pytest
    import torch.distributed as dist

    from harness import requirement, unsupported
    from harness.results import TorchLacks

    @requirement("COLL-BARRIER-01", "A barrier returns on every rank.", source="torch.distributed.barrier")
    def test_passes(world):
        world.run(lambda rank: dist.barrier())

    def test_fails(world):
        def body(rank):
            print("printed by", rank.index)
            dist.barrier()
            assert rank.index == 0
        world.run(body)

    def test_hangs(world):
        def body(rank):
            if rank.index == 0:
                dist.barrier()
        world.run(body)

    def test_crashes(world):
        def body(rank):
            if rank.index == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            dist.barrier()
        world.run(body)

    def test_leaves(world):
        def body(rank):
            if rank.index == 1:
                os._exit(3)
            dist.barrier()
        world.run(body)

    @pytest.mark.world(2, backend="no_such_backend")
    def test_unsupported(world):
        world.run(lambda rank: None)

    def test_lacks(world):
        unsupported(TorchLacks("compass"))

    def test_of_somebody_else(world):
        pytest.skip("unsupported: no wind")

    @pytest.mark.skip(reason="not now")
    def test_skipped(world):
        world.run(lambda rank: None)
"""

OTHER = """
    def test_of_no_stack():
        pass
"""


@pytest.fixture(scope="module")
def session(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    folder = make_folder({"suites/collectives/test_it.py": TESTS, "tests/test_other.py": OTHER})
    return folder.run("--concord-results", "out")


@pytest.mark.parametrize(
    ("test", "verdict", "headline"),
    [
        ("test_passes", "passed", ""),
        ("test_fails", "failed", "rank 1 of 2 failed first: AssertionError: assert 1 == 0"),
        ("test_hangs", "hung", "deadlock: rank 0 waits in barrier()"),
        ("test_crashes", "crashed", "rank 1 of 2 failed first: killed by SIGSEGV"),
        ("test_leaves", "crashed", "rank 1 of 2 failed first: exited with code 3 before it had a result"),
        ("test_unsupported", "unsupported", ""),
        ("test_lacks", "unsupported", ""),
        ("test_of_somebody_else", "unsupported", ""),
        ("test_skipped", "not-run", ""),
    ],
)
def test_verdict(session: Session, test: str, verdict: str, headline: str) -> None:
    """Each test has one verdict, a headline if it is a bad one, and the stack of its folder."""
    found = session.results.tests[f"suites/collectives/test_it.py::{test}[2ranks]"]
    assert (found.verdict, found.stack) == (verdict, "collectives")
    assert found.headline.startswith(headline)
    assert bool(found.headline) == bool(headline)


def test_reason_of_a_skip(session: Session) -> None:
    """A test that did not run says why."""
    tests = session.results.tests
    assert tests["suites/collectives/test_it.py::test_skipped[2ranks]"].reason == "not now"
    assert "no_such_backend" in tests["suites/collectives/test_it.py::test_unsupported[2ranks]"].reason


def test_cause_of_a_skip(session: Session) -> None:
    """A skip of Concord's has its cause as data; a plain one has only the reason that its author wrote."""
    tests = {name.split("::")[-1]: test for name, test in session.results.tests.items()}
    assert tests["test_unsupported[2ranks]"].cause == NoBackend("no_such_backend")
    assert tests["test_lacks[2ranks]"].cause == TorchLacks("compass")
    assert tests["test_lacks[2ranks]"].reason == "unsupported: this torch has no compass"
    assert (tests["test_of_somebody_else[2ranks]"].cause, tests["test_skipped[2ranks]"].cause) == (None, None)
    assert tests["test_of_somebody_else[2ranks]"].reason == "unsupported: no wind"


LACKING = """
    from harness import unsupported
    from harness.results import NoStack

    def test_lacks():
        unsupported(NoStack("mine", "dynamo", ("replicate", "collectives")))
"""
NOT_COLLECTED = {"suites/collectives/test_broken.py": "import no_such_module\n"}
DESELECTING = {
    "conftest.py": """
    def pytest_collection_modifyitems(config, items):
        config.hook.pytest_deselected(items=items[1:])
        del items[1:]
    """
}


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
@pytest.mark.parametrize(
    ("more", "left_out"),
    [({}, []), (NOT_COLLECTED, [NotCollected()]), (DESELECTING, [Deselected()])],
    ids=["whole", "not-collected", "deselected"],
)
def test_left_out(
    make_folder: Callable[[dict[str, str]], Folder],
    workers: tuple[str, ...],
    more: dict[str, str],
    left_out: list[LeftOut],
) -> None:
    """The last record says as data what was left out, and a cause is the same from a worker as from this process."""
    folder = make_folder({"suites/collectives/test_it.py": LACKING, **more})
    run = folder.run("suites", "--concord-results", "out", "--continue-on-collection-errors", *workers).results
    assert run.end is not None
    assert (run.end.left_out, run.end.whole) == (left_out, [] if left_out else ["collectives"])
    cause = run.tests["suites/collectives/test_it.py::test_lacks"].cause
    assert cause == NoStack("mine", "dynamo", ("replicate", "collectives"))


def test_evidence_of_ranks(session: Session) -> None:
    """A bad verdict carries what each rank said: how it ended, its traceback, output and collectives."""
    ranks = session.results.tests["suites/collectives/test_it.py::test_fails[2ranks]"].ranks
    assert [(r.rank, r.kind, r.first) for r in ranks] == [(0, "returned", False), (1, "raised", True)]
    assert "assert rank.index == 0" in ranks[1].text
    assert [r.output for r in ranks] == ["printed by 0\n", "printed by 1\n"]
    assert all("barrier" in r.collectives[-1] for r in ranks)


def test_one_record_a_line(session: Session) -> None:
    """The file is JSON lines: the run, what was collected, a line for each test as it ended, the end."""
    (path,) = session.folder.glob("out/*/results.jsonl")
    kinds = [json.loads(line)["record"] for line in path.read_text().splitlines()]
    assert kinds == ["run", "collected", "requirement", *["test"] * 10, "end"]


def test_run_is_described(session: Session) -> None:
    """The first line has the arguments and the versions; the last one the exit status."""
    run = session.results
    assert run.header.arguments == ["--concord-results", "out"]
    assert "python" in run.header.environment
    assert (run.complete, run.exit_status) == (True, 1)


def test_table_by_stack(session: Session) -> None:
    """The terminal shows how many tests of each stack came to each verdict, and what crashed or hung."""
    _, _, table = session.out.partition("verdicts by stack")
    lines = [line.split() for line in table.split("\n")[1:4]]
    assert lines[0] == ["stack", *VERDICTS]
    assert lines[1] == ["collectives", "1", "1", "2", "1", ".", "3", ".", "1"]
    assert lines[2] == ["(other)", "1", *["."] * 7]
    pytest.LineMatcher(table.split("\n")).fnmatch_lines(
        [
            "HUNG suites/collectives/test_it.py::test_hangs[[]2ranks]: deadlock: *",
            "CRASHED suites/collectives/test_it.py::test_crashes[[]2ranks]: rank 1 of 2 *",
            "results: out/*/results.jsonl",
        ]
    )


def test_no_table_without_stacks(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """In a project that has no stacks, one line has the verdicts; places are named by their path from the root."""
    session = make_folder({"test_it.py": TESTS}).run("-k", "passes or fails or hangs")
    session.lines.fnmatch_lines(
        [
            "verdicts: 1 passed, 1 failed, 1 hung",
            "HUNG test_it.py::test_hangs[[]2ranks]: deadlock: rank 0 waits in barrier()*default group at test_it.py:*",
        ]
    )
    assert "verdicts by stack" not in session.out


ENDS_THE_CONTROLLER = """
    import os
    import signal

    def test_before(world):
        world.run(lambda rank: None)

    def test_ends_the_controller(world):
        controller = os.getpid()
        def body(rank):
            if rank.index == 1:
                os.kill(controller, signal.{signal})
            signal.pause()
        world.run(body)

    def test_never_reached(world):
        world.run(lambda rank: None)
"""


def test_controller_that_is_killed(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """If the controller is killed, what ended before is there, the rest is not-run, and no rank outlives it."""
    session = make_folder({"test_it.py": ENDS_THE_CONTROLLER.format(signal="SIGKILL")}).run("--concord-results", "out")
    assert session.code == -signal.SIGKILL
    run = session.results
    assert not run.complete
    assert [t.verdict for t in run.tests.values()] == ["passed", "not-run", "not-run"]


def test_session_that_is_interrupted(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Ctrl-C ends the ranks at once and the session in order, with pytest's code for it as the run's exit status."""
    session = make_folder({"test_it.py": ENDS_THE_CONTROLLER.format(signal="SIGINT")}).run("--concord-results", "out")
    assert session.code == pytest.ExitCode.INTERRUPTED
    run = session.results
    assert (run.complete, run.exit_status) == (True, pytest.ExitCode.INTERRUPTED)
    assert [t.verdict for t in run.tests.values()] == ["passed", "not-run", "not-run"]


SEVERAL = """
    import os
    import signal

    import pytest

    @pytest.mark.world(1, 2, 3)
    def test_ends(worlds):
        controller = os.getpid()
        worlds(1).run(lambda rank: None)
        worlds(3).run(lambda rank: None)
        def body(rank):
            if rank.index == 1:
                os.kill(controller, signal.SIGINT)
            signal.pause()
        worlds(2).run(body)
"""


def test_session_that_is_interrupted_with_several_worlds(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Ctrl-C ends worlds that have nothing to do as well, before what their ranks were started from."""
    session = make_folder({"test_it.py": SEVERAL}).run("--concord-results", "out")
    assert session.code == pytest.ExitCode.INTERRUPTED
    assert [t.verdict for t in session.results.tests.values()] == ["not-run"]
    assert "Error" not in session.out + session.err
    assert session.orphans == ()


DRAWING = """
    import pytest
    from hypothesis import given, strategies as st

    @given(value=st.booleans())
    def test_draws(value):
        pass

    @pytest.mark.parametrize("value", [False, True])
    def test_draws_nothing(value):
        pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_what_draws_from_the_seed(make_folder: Callable[[dict[str, str]], Folder], workers: tuple[str, ...]) -> None:
    """Tests of suites that draw are marked, so that another seed need not have the rest again; the file says which."""
    files = {"suites/collectives/test_it.py": DRAWING, "tests/test_other.py": DRAWING}
    whole = make_folder(files).run("--concord-results", "out", *workers).results.tests
    assert [nodeid for nodeid, test in whole.items() if test.property_based] == [
        "suites/collectives/test_it.py::test_draws"
    ]
    asked = ("-m", "property_based", "--concord-seed", "random")
    part = make_folder(files).run(*asked, "--concord-results", "out", *workers).results
    assert list(part.tests) == ["suites/collectives/test_it.py::test_draws"]
    assert part.header.seed_drawn


def test_no_file_unless_asked(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Without the option and the ini setting nothing is written."""
    folder = make_folder({"test_it.py": "def test_nothing(): pass\n"})
    folder.run("-p", "no:cacheprovider")
    assert not list(folder.path.rglob("*.jsonl"))


def test_ini_setting(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """The ini setting names a folder under the root directory, wherever pytest was started."""
    folder = make_folder({"test_it.py": "def test_nothing(): pass\n", "below/readme.txt": ""})
    folder.write("pytest.ini", "[pytest]\nconcord_results = kept\n")
    Folder.run(_inside(folder, "below"), "..", "-p", "no:cacheprovider")
    assert len(list(folder.path.glob("kept/*/results.jsonl"))) == 1


def _inside(folder: Folder, name: str) -> Folder:
    inner = object.__new__(Folder)
    inner.path = Path(folder.path, name)
    return inner


WITH_CASES = """
    import importlib
    import os
    import sys

    import pytest
    from hypothesis import given, settings
    from hypothesis import strategies as st

    if os.environ.get("LOAD"):
        sys.path.insert(0, os.getcwd())
        importlib.import_module(os.environ["LOAD"])

    class Thing:
        def __init__(self, number):
            self.number = number

    @settings(max_examples=200)
    @given(number=st.integers(), thing=st.builds(Thing, st.integers()))
    def test_draws(tmp_path_factory, number, thing):
        pass

    @settings(max_examples=20)
    @given(number=st.integers())
    def test_fails(number):
        assert number < 10

    @pytest.mark.parametrize("name", ["a", "b"])
    @settings(max_examples=5)
    @given(number=st.integers())
    def test_parametrized(name, number):
        pass

    def test_plain():
        pass
"""


def test_cases(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """The same seed has the same cases in another process, another seed has others, and a failure has none."""
    folder = make_folder({"suites/collectives/test_it.py": WITH_CASES})
    found = []
    for number, seed in enumerate(("default", "default", "5", "5", "6")):
        out = f"out{number}"
        folder.run(
            *("suites", "--concord-results", out, "--concord-seed", seed, "--profile", "none"),
            env={"PYTHONHASHSEED": str(number)},
        )
        (path,) = (folder.path / out).glob("*/results.jsonl")
        tests = read(path).tests.values()
        found.append({test.nodeid.partition("::")[2]: test.cases for test in tests})
    default, again, five, five_again, six = found
    assert (default, five) == (again, five_again)
    assert default["test_draws"] is not None
    assert (default["test_fails"], default["test_plain"]) == (None, None)
    counts = {name: cases.count for name, cases in default.items() if cases is not None}
    assert counts == {"test_draws": 200, "test_parametrized[a]": 5, "test_parametrized[b]": 5}
    folder.write("magic.py", f"NUMBERS = {[7**n for n in range(5, 300)]}")
    folder.run(
        *("suites", "--concord-results", "loaded", "--concord-seed", "5", "--profile", "none"), env={"LOAD": "magic"}
    )
    (path,) = (folder.path / "loaded").glob("*/results.jsonl")
    loaded = {test.nodeid.partition("::")[2]: test.cases for test in read(path).tests.values()}
    assert loaded == five  # what else is loaded changes no case
    digests = {each["test_draws"].digest for each in (default, five, six) if each["test_draws"] is not None}
    assert len(digests) == 3
