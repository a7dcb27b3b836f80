"""The check of properties that draw their worlds from the sizes that fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.profiles import Profile
from harness.profiles.model import EVERYTHING
from harness.results import Cause, GivenWorld, NoFittingSize, SizeNotClaimed, TestResult
from harness.suite_facts import TestFacts
from reports.arguments import Asked
from reports.coherence import _world
from reports.unsupported import _Judge

NODEID = "suites/replicate/test_programs.py::test_exact[worlds]"
FACTS = TestFacts(size=4, sizes=[1, 2, 4])


def result(world: GivenWorld | None, verdict: str = "passed", cause: Cause | None = None, size: int = 4) -> TestResult:
    reason = f"unsupported: {cause}" if cause is not None else ""
    return TestResult(nodeid=NODEID, verdict=verdict, world=world, size=size, cause=cause, reason=reason)


def judged(test: TestResult, *others: TestResult, device: str = "cpu", sizes: tuple[int, ...] = ()) -> str:
    profile = Profile("p", "any", device, world_sizes=sizes)
    tests = {str(i): each for i, each in enumerate([test, *others])}
    run: Any = SimpleNamespace(tests=tests, header=SimpleNamespace(subject="torch"))
    judge = _Judge(run, SimpleNamespace(profile=profile, claims=EVERYTHING), Asked())  # type: ignore[arg-type]
    return judge.why_not(test, FACTS) if test.cause is not None else judge.should_not_run(test, FACTS)


def ranks(size: int, device: str = "cpu") -> TestResult:
    """Another test, which ran on so many ranks."""
    return TestResult(nodeid="x", verdict="passed", world=GivenWorld(size, "any", device), size=size)


@pytest.mark.parametrize(
    ("test", "how"),
    [
        (result(GivenWorld(4, "any", "cpu")), {}),
        (result(GivenWorld(2, "any", "cpu")), {"sizes": (1, 2)}),
        (result(GivenWorld(2, "any", "gpu")), {"device": "gpu"}),
        (result(GivenWorld(4, "any", "cpu", (1, 2, 4))), {}),
        (result(GivenWorld(4, "any", "cpu", (1, 4))), {"sizes": (1, 4, 8)}),
        (result(None, "unsupported", SizeNotClaimed("p", (8,), 1)), {"sizes": (8,)}),
        (result(None, "unsupported", NoFittingSize((4,), (1, 2))), {"sizes": (1, 2)}),
        (result(None, "unsupported", NoFittingSize((4,), (1, 2))), {"device": "gpu"}),
    ],
)
def test_honest(test: TestResult, how: dict[str, Any]) -> None:
    """What fits is what the profile claims, and on an accelerator what there are devices for."""
    assert judged(test, ranks(2, how.get("device", "cpu")), **how) == ""
    assert list(_world(test)) == []


@pytest.mark.parametrize(
    ("test", "how", "says"),
    [
        (result(GivenWorld(2, "any", "cpu")), {}, "at most 2 ranks, but the host has room for 4"),
        (result(GivenWorld(4, "any", "cpu")), {"sizes": (1, 2)}, "ran on 4 ranks, but the profile does not claim"),
        (result(GivenWorld(4, "any", "cpu", (1, 4))), {}, "drew from worlds of 1, 4 ranks, but in the suite"),
        (result(GivenWorld(4, "any", "cpu", (1, 2, 4))), {"sizes": (1, 4)}, "and the profile they are 1, 4"),
        (result(None, "unsupported", NoFittingSize((4,), (1, 2))), {}, "other tests of the run had worlds of 4 ranks"),
        (result(None, "unsupported", NoFittingSize((8,), (1, 2))), {}, "in the suite it has worlds of 1, 2, 4"),
        (result(None, "unsupported", NoFittingSize((2,), (1,))), {"device": "gpu"}, "had worlds of 2 ranks"),
        (result(None, "unsupported", SizeNotClaimed("p", (1, 2), 4)), {"sizes": (1, 2)}, "claims worlds of 1, 2 ranks"),
    ],
)
def test_forged(test: TestResult, how: dict[str, Any], says: str) -> None:
    """Smaller worlds than there are, and sizes that are said to be missing and are not, are contradictions."""
    assert says in judged(test, ranks(2, how.get("device", "cpu")), **how)


@pytest.mark.parametrize("given", [GivenWorld(8, "any", "cpu"), GivenWorld(0, "any", "cpu")])
def test_incoherent(given: GivenWorld) -> None:
    """A property's world is not larger than its largest size, nor empty."""
    assert any("its world has" in line for line in _world(result(given)))


@pytest.mark.parametrize("sizes", [(1, 2), (4, 2), (2, 2, 4), (0, 4), (1, 2, 4, 8)])
def test_incoherent_sizes(sizes: tuple[int, ...]) -> None:
    """The sizes from which a property drew are ascending, and the last is that of its largest world."""
    assert any("its largest world has 4 ranks" in line for line in _world(result(GivenWorld(4, "any", "cpu", sizes))))


def test_other_tests_draw_nothing() -> None:
    """A test with a world of one size drew from no others."""
    nodeid = "suites/x/test_a.py::test_b[4ranks]"
    test = TestResult(nodeid=nodeid, verdict="passed", world=GivenWorld(4, "any", "cpu", (2, 4)), size=4)
    assert list(_world(test)) == ["drew from several worlds, but by its name it has one"]


def test_other_tests_have_their_size() -> None:
    """A test with a world of one size has that one."""
    test = TestResult(
        nodeid="suites/x/test_a.py::test_b[4ranks]", verdict="passed", world=GivenWorld(2, "any", "cpu"), size=4
    )
    assert any("its world has 2 ranks" in line for line in _world(test))
