"""The cases that tests executed, in the results of a real session: each ended as it did, and no other is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from sessions import Folder

from harness.results import GROUPS, Call, CaseOf, Run, Setting, TestResult
from reports.by_profile import entitled
from reports.tried import case_problems, other_claims

pytestmark = pytest.mark.slow

TESTS = """
    import os
    import signal

    import pytest
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from harness.oracles.collectives import Case
    from harness.stacks import collectives
    from harness.stacks.collectives import assert_right

    CASES = [Case("all_gather"), Case("broadcast", dtype=torch.int32), Case("all_reduce", "MAX"), Case("all_to_all")]

    def damaged(how, on=(0, 1)):
        def install(rank):
            if rank.index in on:
                execute = collectives._execute
                def other(case, *rest):
                    return how() if case.collective == "all_reduce" else execute(case, *rest)
                collectives._execute = other
        return install

    def test_right(world):
        assert_right(world, [*CASES, *CASES])

    def test_wrong(world):
        world.run(damaged(lambda: "it is wrong"))
        assert_right(world, CASES)

    def test_hangs(world):
        world.run(damaged(lambda: 1 / 0, on=(1,)))  # and goes on to the next case
        assert_right(world, CASES)

    def test_crashes(world):
        world.run(damaged(lambda: os.kill(os.getpid(), signal.SIGSEGV), on=(1,)))
        assert_right(world, CASES)

    def test_crashes_alone(world):
        collectives._PORTION = 1  # each case apart
        try:
            world.run(damaged(lambda: os.kill(os.getpid(), signal.SIGSEGV), on=(1,)))
            assert_right(world, CASES)
        finally:
            collectives._PORTION = 20_000_000

    def test_ends_between(world):
        assert_right(world, CASES[:1])
        assert False
        assert_right(world, CASES[1:])

    def test_undeclared(world):
        assert_right(world, [Case("all_reduce"), Case("all_reduce", dtype=torch.int8)])

    def test_nothing_declared(world):
        assert_right(world, [Case("all_reduce", dtype=torch.int8)])

    def test_tries_nothing(world):
        world.run(lambda rank: None)

    @pytest.mark.world(3)
    def test_groups(world):
        groups = [None, (2, 1, 0), (0, 2), (1,)]
        assert_right(world, [Case("broadcast", group=group) for group in groups])

    @settings(database=None)
    @given(dtype=st.sampled_from([torch.float32, torch.int32]))
    def test_drawn(world, dtype):
        assert_right(world, [Case("broadcast", dtype=dtype)])
"""

PROFILE = """
    name = "mine"
    backend = "gloo"
    device = "cpu"

    [collectives]
    dtypes = ["float32", "int32"]
"""

PROGRAMS = """
    import os

    import pytest

    from harness.programs import assert_law, assert_same_as_alone
    from harness.specs.program import Layout, Linear, Model, Program

    def program(**options):
        layout = Layout("replicate", 2, options=tuple(options.items()))
        return Program(Model((4,), (Linear(2), Linear(2))), layout)

    @pytest.mark.world(2)
    def test_same(world):
        assert_same_as_alone(lambda size: world, program(static_graph=True))

    @pytest.mark.world(2)
    def test_law(world):
        assert_law(lambda size: world, program(), "permuted")

    @pytest.mark.world(2)
    def test_dies(world):
        world.run(lambda rank: setattr(__import__("torch").optim.SGD, "step", lambda *rest: os._exit(3)))
        assert_same_as_alone(lambda size: world, program())

    @pytest.mark.world(2)
    def test_different(world):
        def install(rank):
            import torch
            step = torch.optim.SGD.step
            def twice(self, *rest):
                step(self, *rest)
                return step(self, *rest)
            torch.optim.SGD.step = twice
        world.run(install)
        assert_same_as_alone(lambda size: world, program())
"""


@pytest.fixture(scope="module")
def run(make_folder: Callable[[dict[str, str]], Folder]) -> Run:
    """A session of both files in workers, under a profile that claims two dtypes."""
    files = {
        "suites/collectives/test_it.py": TESTS,
        "suites/replicate/test_programs.py": PROGRAMS,
        "mine.toml": PROFILE,
    }
    return make_folder(files).run("--concord-results", "out", "--profile", "./mine.toml", "-n", "1").results


def result(run: Run, name: str) -> TestResult:
    """The result of a test."""
    (test,) = (test for nodeid, test in run.tests.items() if nodeid.endswith(f"::{name}") or f"::{name}[" in nodeid)
    return test


def tried(run: Run, name: str) -> dict[str, Counter[CaseOf]]:
    """The cases of a test by their ending, with their counts."""
    found: dict[str, Counter[CaseOf]] = {}
    for each in result(run, name).tried:
        for number, count in zip(each.cases, each.counts, strict=True):
            found.setdefault(each.ended, Counter())[run.cases[number]] += count
    return found


RIGHT_FIRST = {"passed": ["all_gather", "broadcast"]}


@pytest.mark.parametrize(
    ("name", "verdict", "ended"),
    [
        ("test_right", "passed", {"passed": 2 * ["all_gather", "broadcast", "all_reduce", "all_to_all"]}),
        ("test_wrong", "failed", {"passed": ["all_gather", "broadcast", "all_to_all"], "wrong": ["all_reduce"]}),
        ("test_hangs", "hung", RIGHT_FIRST | {"stopped": ["all_reduce"], "not-reached": ["all_to_all"]}),
        ("test_crashes_alone", "crashed", RIGHT_FIRST | {"stopped": ["all_reduce"], "not-reached": ["all_to_all"]}),
        ("test_crashes", "crashed", RIGHT_FIRST | {"stopped": ["all_reduce"], "not-reached": ["all_to_all"]}),
        ("test_ends_between", "failed", {"passed": ["all_gather"]}),
        ("test_undeclared", "passed", {"passed": ["all_reduce"], "undeclared": ["all_reduce"]}),
        ("test_nothing_declared", "unsupported", {"undeclared": ["all_reduce"]}),
        ("test_tries_nothing", "passed", {}),
        ("test_drawn", "passed", {"passed": 2 * ["broadcast"]}),
    ],
)
def test_endings(run: Run, name: str, verdict: str, ended: dict[str, list[str]]) -> None:
    """Each case of a test ended as it did: before, in and after the case in which ranks were wrong, hung or died."""
    assert result(run, name).verdict == verdict
    assert {
        each: Counter(case.collective for case in cases.elements() if isinstance(case, Call))
        for each, cases in tried(run, name).items()
    } == {each: Counter(names) for each, names in ended.items()}


def test_groups(run: Run) -> None:
    """A case has its dtype, layout, kind of group and form; groups differ by how many ranks they have."""
    kinds = [Call("broadcast", "", "float32", "contiguous", "", group, "sync") for group in GROUPS]
    assert tried(run, "test_groups") == {"passed": Counter(kinds)}
    assert [each.size for each in result(run, "test_groups").tried] == [3]


def test_undeclared(run: Run) -> None:
    """Cases that the profile does not claim are apart, with their dtype."""
    found = tried(run, "test_undeclared")
    assert [case.dtype for case in found["undeclared"] if isinstance(case, Call)] == ["int8"]
    assert [case.dtype for case in found["passed"] if isinstance(case, Call)] == ["float32"]


@pytest.mark.parametrize(
    ("name", "ended", "count", "static"),
    [
        ("test_same", "passed", 1, "yes"),
        ("test_law", "passed", 2, "no"),
        ("test_different", "wrong", 1, "no"),
        ("test_dies", "stopped", 1, "no"),
    ],
)
def test_programs(run: Run, name: str, ended: str, count: int, static: str) -> None:
    """A training run is a case for every option of its stack, and a law is two training runs."""
    found = tried(run, name)
    assert list(found) == [ended]
    assert found[ended][Setting("replicate", "static_graph", static)] == count
    assert found[ended][Setting("replicate", "dtype", "float64")] == count
    assert {case.option for case in found[ended] if isinstance(case, Setting)} > {"hook", "mesh", "bucket_cap_mb"}


def test_consistent(run: Run) -> None:
    """The checks of a bundle find nothing wrong with these cases."""
    by, problems = entitled(run)
    assert by is not None
    assert [*problems, *case_problems(run), *other_claims(run, by)] == []
