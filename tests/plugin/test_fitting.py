"""A property has worlds of those of its sizes that the machine and the profile allow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

from harness.profiles import NEVER_RUN
from harness.results import GivenWorld

pytestmark = pytest.mark.slow

TESTS = """
import pytest
from hypothesis import given, settings
from harness import programs
from harness.programs.laws import assert_law

DRAWN = set()

@pytest.mark.world(1, 2, 4)
@given(program=programs.programs("replicate", (1, 2, 4), most_steps=1))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_property(worlds, program):
    DRAWN.add(program.layout.world)
    worlds(program.layout.world).run(lambda rank: rank.size)

def test_drawn():
    print("drawn:", sorted(DRAWN))

@pytest.mark.world(1, 2, 4)
@given(program=programs.programs("replicate", (4,), most_steps=1))
@settings(max_examples=2, deadline=None)
def test_four(worlds, program):
    worlds(4).run(lambda rank: rank.size)

@pytest.mark.world(1, 2, 4)
@pytest.mark.parametrize("law", ["never-saved", "flattened"])
@given(program=programs.programs("replicate_fsdp", (1, 2), most_steps=1, smooth=False, any_world=True))
@settings(max_examples=1, deadline=None, derandomize=True)
def test_law(worlds, law, program):
    assert_law(worlds, program, law)

@pytest.mark.world(1, timeout=2)
def test_patience(world):
    print("seconds:", world.spec.timeout)
    world.run(lambda rank: None)

@pytest.mark.world(4, 8)
@given(program=programs.programs("replicate", (4, 8), most_steps=1))
def test_none(worlds, program):
    raise AssertionError("never run")
"""
PROFILE = """
name = "small"
backend = "gloo"
device = "cpu"
world_sizes = [1, 2]
timeout = 120
never_run = true
"""


@pytest.fixture(scope="module")
def session(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    folder = make_folder({"test_fitting.py": TESTS, "small.toml": PROFILE})
    return folder.run("--profile", "./small.toml", "--concord-results", "out", "-s", "-n0")


def result(session: Session, test: str) -> tuple[str, GivenWorld | None, str]:
    found = session.results.tests[f"test_fitting.py::{test}"]
    return found.verdict, found.world, found.reason


def test_sizes_that_fit_are_drawn(session: Session) -> None:
    """Of 1, 2 and 4 ranks, worlds of 1 and 2 are drawn, and the result names both, and the larger as its world."""
    assert result(session, "test_property[worlds]") == ("passed", GivenWorld(2, "gloo", "cpu", (1, 2)), "")
    assert "drawn: [1, 2]" in session.out


def test_sizes_that_do_not_fit(session: Session) -> None:
    """A property whose programs need more ranks is unsupported, and says how many, and so is one with no size left."""
    needs = "unsupported: a world of 4 ranks is needed, and the test can have worlds of 1, 2 here"
    assert result(session, "test_four[worlds]")[::2] == ("unsupported", needs)
    claims = "unsupported: profile small claims worlds of 1, 2 ranks, not of 4"
    assert result(session, "test_none[worlds]")[::2] == ("unsupported", claims)


def test_timeouts_of_tests_grow_with_the_profile_s(session: Session) -> None:
    """On a backend that has twice the usual time, a test that allows 2 s allows 4 s."""
    assert result(session, "test_patience[1rank]")[0] == "passed"
    assert "seconds: 4.0" in session.out


def test_laws(session: Session) -> None:
    """A law that needs more ranks than there are is unsupported; others hold."""
    verdicts = {name: result(session, f"test_law[worlds-{name}]")[0] for name in ("never-saved", "flattened")}
    assert verdicts == {"never-saved": "passed", "flattened": "unsupported"}, session.out


def test_a_profile_that_was_never_run(session: Session) -> None:
    """The summary says that nobody has run the profile before, and the results have it as data."""
    assert f"profile small: {NEVER_RUN}" in session.out
    assert session.results.profile is not None
    assert session.results.profile.never_run
