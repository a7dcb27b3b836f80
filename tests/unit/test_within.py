"""Which tests ``--within`` chooses: no more than fit, and those that ask the most for their time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plugin import within
from harness.thorough.within import BETWEEN, FILE, Durations, choose, in_order

NAMES = st.sets(st.sampled_from("abcdefgh"), max_size=4)
TESTS = st.lists(st.tuples(st.floats(0.01, 5.0), NAMES, NAMES), min_size=1, max_size=12)


@given(TESTS, st.floats(0.0, 20.0))
def test_no_more_than_fit(tests: list[tuple[float, set[str], set[str]]], budget: float) -> None:
    """The time is not exceeded, no test is there twice, and none is left out that would still fit."""
    expected = {str(i): seconds for i, (seconds, _, _) in enumerate(tests)}
    requirements = {str(i): ids for i, (_, ids, _) in enumerate(tests)}
    notices = {str(i): names for i, (_, _, names) in enumerate(tests)}
    chosen = choose(expected, requirements, notices, budget)
    spent = sum(expected[nodeid] + BETWEEN for nodeid in chosen.nodeids)
    assert spent == pytest.approx(chosen.seconds)
    assert spent <= budget + 1e-9
    assert len(set(chosen.nodeids)) == len(chosen.nodeids)
    left = set(expected) - set(chosen.nodeids)
    assert all(spent + expected[nodeid] + BETWEEN > budget - 1e-9 for nodeid in left)
    assert chosen.asked == len(set().union(*(requirements[nodeid] for nodeid in chosen.nodeids)))
    assert chosen.noticed == len(set().union(*(notices[nodeid] for nodeid in chosen.nodeids)))


def test_most_for_its_time() -> None:
    """Short tests come before a long one that asks as much, and what is left of the time goes to the shortest."""
    expected = {"long": 4.0, "one": 1.0, "again": 0.5, "two": 1.0}
    requirements = {"long": ["A", "B"], "one": ["A"], "again": ["A"], "two": ["B"]}
    notices = {"one": ["x", "y", "v"], "two": ["z"]}
    for budget, right in ((0.4, []), (1.2, ["one"]), (1.6, ["one", "again"]), (2.2, ["one", "two"])):
        assert choose(expected, requirements, notices, budget).nodeids == right, budget
    chosen = choose(expected, requirements, notices, 2.6)
    assert (chosen.nodeids, chosen.asked, chosen.noticed) == (["one", "two", "again"], 2, 4)


@given(st.lists(st.integers(0, 99), unique=True, min_size=1))
def test_order(ranks: list[int]) -> None:
    """Every chosen test is there once; the most valuable eighth comes first, in the order of the suites."""
    collected = [str(i) for i in range(100)]
    chosen = [str(rank) for rank in ranks]
    found = in_order(collected, chosen)
    assert sorted(found) == sorted(chosen)
    first = [nodeid for i, nodeid in enumerate(chosen) if i * 8 < len(chosen)]
    assert found[: len(first)] == sorted(first, key=int)


def test_new_tests() -> None:
    """A test that is new takes as long as half of its file's, or as half of the files'; without any, no time."""
    known = Durations("", "", {"a.py": {"x": 1.0, "y": 3.0, "z": 2.0}, "b.py": {"x": 6.0}})
    assert known.of(["a.py::x", "a.py::new", "c.py::new"]) == {"a.py::x": 1.0, "a.py::new": 2.0, "c.py::new": 4.0}
    assert Durations("", "", {}).of(["a.py::x"]) == {"a.py::x": 0.0}


@pytest.mark.parametrize("content", ["", "[1]", '{"machine": "m", "torch": "t", "seconds": {"a.py": {"x": "long"}}}'])
def test_garbage(tmp_path: Path, content: str) -> None:
    """A file that is not one of durations is named in the error."""
    (tmp_path / "fixtures").mkdir()
    (tmp_path / FILE).write_text(content)
    with pytest.raises(pytest.UsageError, match=r"--within: .*durations\.json can't be read"):
        within._kept(tmp_path)


def test_kept() -> None:
    """The files that Concord has name its own tests."""
    root = Path(__file__).parents[2]
    durations, notices = within._kept(root)
    assert {file for file in durations.seconds if not (root / file).is_file()} == set()
    assert sum(map(len, durations.seconds.values())) > 4000
    assert len(notices) > 1000
    assert msgspec.json.encode(durations)
