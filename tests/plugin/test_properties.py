"""Hypothesis and worlds: one draw for all ranks, and a failure that shrinks whatever it does to the ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

TESTS = """
    import json
    import os
    import signal

    import pytest
    import torch
    import torch.distributed as dist
    from hypothesis import given, settings, strategies as st

    def note(name, *values):
        with open(f"{name}.jsonl", "a") as file:
            file.write(json.dumps(values) + "\\n")

    @settings(max_examples=20, database=None)
    @given(values=st.lists(st.integers(0, 100), max_size=5))
    def test_healthy(world, values):
        seen = world.run(lambda rank: (values, os.getpid()))
        note("healthy", values, [s[0] for s in seen], [s[1] for s in seen], world.started)

    @settings(max_examples=30, derandomize=True)
    @given(value=st.integers(0, 30))
    def test_assertion(world, value):
        def body(rank):
            tensor = torch.tensor(value)
            dist.all_reduce(tensor)
            assert tensor < 20
        try:
            world.run(body)
        finally:
            note("assertion", value, world.started)

    @settings(max_examples=15, derandomize=True)
    @given(value=st.integers(0, 8))
    def test_hang(world, value):
        def body(rank):
            if value < 3 or rank.index == 0:
                dist.barrier()
        world.run(body)

    @settings(max_examples=15, derandomize=True)
    @given(value=st.integers(0, 8))
    def test_killed(world, value):
        def body(rank):
            if value >= 3 and rank.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        world.run(body)

    @settings(max_examples=30, derandomize=True)
    @given(value=st.integers(0, 30))
    def test_two_defects(world, value):
        def body(rank):
            if value > 20:
                raise KeyError("one defect")
            assert value < 7, "another"
        world.run(body)

    @pytest.mark.world(1, 2)
    @settings(max_examples=30)
    @given(value=st.integers(0, 1000))
    def test_sizes(world, value):
        note(f"sizes-{world.size}", value)
        world.run(lambda rank: None)
        assert value < 500 or world.size == 2
"""


@pytest.fixture(scope="module")
def session(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    return make_folder({"test_it.py": TESTS}).run("--concord-results", "out", "-p", "no:cacheprovider")


def notes(session: Session, name: str) -> list[list[object]]:
    """What a test noted of its examples, in their order."""
    return [json.loads(line) for line in (session.folder / f"{name}.jsonl").read_text().splitlines()]


def test_all_ranks_see_one_draw(session: Session) -> None:
    """The controller draws an example once; every rank gets this very example."""
    examples = notes(session, "healthy")
    assert len(examples) >= 10
    for drawn, seen, _, _ in examples:
        assert seen == [drawn, drawn]


def test_one_world_for_all_examples(session: Session) -> None:
    """As long as examples pass, one world serves them all."""
    assert len({tuple(pids) for _, _, pids, _ in notes(session, "healthy")}) == 1  # type: ignore[arg-type]
    assert {started for *_, started in notes(session, "healthy")} == {1}


def test_failed_example_replaces_the_world(session: Session) -> None:
    """After a failed example the next one runs on fresh ranks; after a good one it does not."""
    examples = notes(session, "assertion")
    for (value, started), (_, then) in itertools.pairwise(examples):
        assert then == started + (value * 2 >= 20)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("test", "minimal", "verdict", "headline"),
    [
        ("test_assertion", "value=10", "failed", "failed first: AssertionError: assert tensor(20) < 20"),
        ("test_hang", "value=3", "hung", "deadlock: "),
        ("test_killed", "value=3", "crashed", "rank 1 of 2 failed first: killed by SIGKILL"),
    ],
)
def test_failure_shrinks(session: Session, test: str, minimal: str, verdict: str, headline: str) -> None:
    """Shrinking ends with the smallest example, also where each failing example hangs the ranks or kills one."""
    shown = session.section(f"{test}[2ranks]")
    assert f"{minimal}," in shown
    found = session.results.tests[f"test_it.py::{test}[2ranks]"]
    assert found.verdict == verdict
    assert headline in found.headline


def test_two_defects_are_told_apart(session: Session) -> None:
    """Failures at different places on the ranks are different defects, each with its own smallest example."""
    shown = session.section("test_two_defects[2ranks]")
    assert "value=7," in shown
    assert "value=21," in shown


def test_no_complaint_about_the_fixture(session: Session) -> None:
    """A world that lives longer than an example is meant to: no health check speaks up."""
    assert "HealthCheck" not in session.out
    assert "FailedHealthCheck" not in session.out


def test_no_lines_of_the_harness_are_named(session: Session) -> None:
    """Hypothesis does not explain a failure by the lines that the controller ran: the test's lines ran elsewhere."""
    assert "These lines were always and only run by failing" not in session.out


def test_each_world_size_has_examples_of_its_own(session: Session) -> None:
    """What failed at one world size is not replayed at another."""
    assert session.results.tests["test_it.py::test_sizes[1rank]"].verdict == "failed"
    assert session.results.tests["test_it.py::test_sizes[2ranks]"].verdict == "passed"
    keys = [path for path in (session.folder / ".hypothesis" / "examples").iterdir() if path.is_dir()]
    again = make_second_run(session)
    assert keys
    assert notes(again, "sizes-1")[0] == [500]
    assert notes(again, "sizes-2")[0] != [500]


def make_second_run(session: Session) -> Session:
    """Run the sizes once more, with the database that the first session left."""
    for size in (1, 2):
        (session.folder / f"sizes-{size}.jsonl").unlink()
    return Folder(session.folder).run("-k", "test_sizes", "-p", "no:cacheprovider")
