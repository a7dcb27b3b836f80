"""The ``world`` fixture: which world a test gets, and what counts as a test of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

from harness.results import GivenWorld, TestResult

pytestmark = pytest.mark.slow

TESTS = """
    import os
    import time

    import pytest
    import torch
    from harness import requirement

    def about(rank):
        return rank.index, rank.size, rank.backend, rank.device.type

    def test_default(world):
        assert world.spec.timeout == 33
        assert world.run(about) == [(0, 2, "gloo", "cpu"), (1, 2, "gloo", "cpu")]

    @pytest.mark.world(3, 1)
    def test_sizes(world):
        assert world.run(lambda rank: (rank.index, rank.size)) == [(i, world.size) for i in range(world.size)]

    @pytest.mark.world(2, backend="gloo", device="cpu")
    def test_backend_and_device(world):
        assert (world.spec.backend, world.spec.device) == ("gloo", "cpu")
        assert world.run(about)[1] == (1, 2, "gloo", "cpu")

    @pytest.mark.world(2, env={"COLOUR": "green"})
    def test_env(world):
        assert world.run(lambda rank: os.environ["COLOUR"]) == ["green", "green"]
        assert "COLOUR" not in os.environ

    @pytest.mark.world(3, env={"COLOUR": "green"})
    class TestClosestMarkWins:
        @pytest.mark.world(1)
        def test_in_class(self, world):
            assert world.run(lambda rank: (rank.size, os.environ["COLOUR"])) == [(1, "green")]

    pids = []

    proves = requirement("ANY-KEPT-01", "Nothing is kept.", source="torch")

    @pytest.mark.world(2, warm=True)
    @pytest.mark.parametrize("turn", [1, pytest.param(2, marks=proves)])
    def test_warm(world, turn):
        assert world.run(lambda rank: os.getpid()) == world.pids
        pids.append(world.pids)
        assert pids[0] == world.pids

    fresh_pids = []

    @pytest.mark.parametrize("turn", [1, 2])
    def test_fresh(world, turn):
        world.run(about)
        assert not set(world.pids) & set(fresh_pids)
        fresh_pids.extend(world.pids)

    @pytest.mark.world(2, timeout=2)
    def test_timeout(world):
        world.run(lambda rank: time.sleep(600))

    def test_runs_nothing(world):
        pass

    def test_rank_skips_itself(world):
        def body(rank):
            pytest.skip("not today")
        world.run(body)

    def test_skips_before_any_run(world):
        pytest.skip("not today")

    @pytest.mark.world(5, backend="no_such_backend")
    def test_unknown_backend(world):
        world.run(about)

    @pytest.mark.world(5, device="no_such_device")
    def test_unknown_device(world):
        world.run(about)

    @pytest.mark.world(2, imports=["no_such_module"])
    def test_ranks_do_not_come_up(world):
        world.run(about)

    @pytest.mark.xfail(reason="known")
    def test_expected_to_fail(world):
        def body(rank):
            assert rank.index == 7
        world.run(body)

    def test_after_all_that(world):
        world.run(about)

    def keep(rank):
        if rank.index:
            torch.kept = torch.ones(3)

    @proves
    def test_keeps(world):
        world.run(keep)

    @proves
    @pytest.mark.world(2, keeps="it is wanted")
    def test_means_to_keep(world):
        world.run(keep)

    def test_proves_nothing(world):
        world.run(keep)
"""

NOTES_WHAT_IS_STARTED = """
    from harness.worlds.local import LocalLauncher

    spawn = LocalLauncher.spawn

    def noted(self, setups):
        with open("started.txt", "a") as file:
            file.write(f"{len(setups)} ranks\\n")
        return spawn(self, setups)

    LocalLauncher.spawn = noted
"""


@pytest.fixture(scope="module")
def session(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    folder = make_folder({"test_it.py": TESTS, "conftest.py": NOTES_WHAT_IS_STARTED})
    return folder.run("-ra", "--world-timeout", "33", "--concord-results", "out")


def of(session: Session, test: str) -> TestResult:
    return session.results.tests[f"test_it.py::{test}"]


def test_counts(session: Session) -> None:
    """pytest counts the tests as it counts any other."""
    assert session.counts == {"passed": 13, "failed": 4, "skipped": 3, "errors": 1, "xfailed": 1}
    assert session.code == 1


@pytest.mark.parametrize(
    "test",
    [
        "test_default[2ranks]",
        "test_sizes[3ranks]",
        "test_sizes[1rank]",
        "test_backend_and_device[2ranks]",
        "test_env[2ranks]",
        "TestClosestMarkWins::test_in_class[1rank]",
        "test_warm[2ranks-1]",
        "test_warm[2ranks-2]",
        "test_fresh[2ranks-1]",
        "test_fresh[2ranks-2]",
        "test_after_all_that[2ranks]",
        "test_means_to_keep[2ranks]",
        "test_proves_nothing[2ranks]",
    ],
)
def test_a_test_gets_the_world_that_its_mark_says(session: Session, test: str) -> None:
    """Sizes are parameters with an id; without a mark there are two ranks; the mark is obeyed."""
    assert of(session, test).verdict == "passed"


def test_order_of_sizes_is_the_mark_s(session: Session) -> None:
    """Sizes run in the order in which they are given."""
    tests = [t for t in session.results.tests if "test_sizes" in t]
    assert tests == ["test_it.py::test_sizes[3ranks]", "test_it.py::test_sizes[1rank]"]


def test_run_that_takes_too_long(session: Session) -> None:
    """Ranks that still work when the mark's timeout is over make the verdict hung."""
    found = of(session, "test_timeout[2ranks]")
    assert found.verdict == "hung"
    assert found.headline.startswith("not finished after 2 s: rank 0 was running")


def test_world_that_is_not_used(session: Session) -> None:
    """A test that has a world and runs nothing on it has tested nothing, and fails."""
    found = of(session, "test_runs_nothing[2ranks]")
    assert (found.verdict, found.headline) == (
        "failed",
        "Failed: no rank ran anything: the test has a world and never called world.run",
    )


def test_rank_that_keeps_something(session: Session) -> None:
    """A test that proves a requirement fails if a rank keeps a tensor of it, unless its mark says why."""
    found = of(session, "test_keeps[2ranks]")
    assert found.verdict == "failed"
    assert "rank 1 of 2 failed first" in found.headline
    assert "1 tensor: Tensor float32[3], held by the entry 'kept' of a dict" in found.headline


def test_rank_that_skips_itself(session: Session) -> None:
    """A skip on a rank is a failure: the other ranks may be waiting for it."""
    found = of(session, "test_rank_skips_itself[2ranks]")
    assert found.verdict == "failed"
    assert "skipped by itself (not today); decide about a skip before any rank starts" in found.headline


def test_skip_in_the_controller(session: Session) -> None:
    """A test may skip itself as long as no rank runs; nobody looked, so the verdict is not-run."""
    found = of(session, "test_skips_before_any_run[2ranks]")
    assert (found.verdict, found.reason) == ("not-run", "not today")


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("test_unknown_backend[5ranks]", "torch has no backend 'no_such_backend' here"),
        ("test_unknown_device[5ranks]", "no no_such_device device"),
    ],
)
def test_world_that_this_machine_cannot_have(session: Session, test: str, reason: str) -> None:
    """A world that can't be had is unsupported, with the reason; its test is skipped."""
    found = of(session, test)
    assert found.verdict == "unsupported"
    assert reason in found.reason


def test_unsupported_is_decided_before_ranks_start(session: Session) -> None:
    """No rank is ever started for a world that turns out to be unsupported."""
    started = (session.folder / "started.txt").read_text().split("\n")
    assert "2 ranks" in started
    assert "5 ranks" not in started


def test_ranks_that_do_not_come_up(session: Session) -> None:
    """If ranks can't join their group, the test is an error in set-up that says why."""
    found = of(session, "test_ranks_do_not_come_up[2ranks]")
    assert found.verdict == "failed"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in found.headline


def test_expected_failure(session: Session) -> None:
    """A failure that a test declares as known is waived: it neither passed nor was it left out."""
    found = of(session, "test_expected_to_fail[2ranks]")
    assert (found.verdict, found.reason) == ("waived", "known")


def test_world_is_in_the_result(session: Session) -> None:
    """A result names the world of its test, also that of a test which could not have it."""
    assert of(session, "test_default[2ranks]").world == GivenWorld(2, "gloo", "cpu")
    assert of(session, "test_unknown_backend[5ranks]").world == GivenWorld(5, "no_such_backend", "cpu")
