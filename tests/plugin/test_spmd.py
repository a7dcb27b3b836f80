"""``@spmd``: a whole test body on each rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

TESTS = """
    import pytest
    import torch
    import torch.distributed as dist
    from hypothesis import given, settings, strategies as st

    from harness import spmd

    def total(rank, value):
        tensor = torch.tensor(float(value))
        dist.all_reduce(tensor)
        return tensor.item()

    @spmd
    def test_bare(rank):
        assert rank.size == 2
        assert total(rank, 1) == 2

    @spmd()
    def test_empty(rank):
        assert rank.size == 2

    @spmd(1, 3, timeout=30)
    def test_sizes(rank):
        assert total(rank, 1) == rank.size

    @pytest.mark.parametrize("factor", [2, 5])
    @spmd(2)
    def test_parametrized(rank, factor):
        assert total(rank, factor) == 2 * factor

    @pytest.fixture
    def weights():
        return {"w": torch.arange(3.0)}

    @spmd
    def test_fixture(rank, weights, tmp_path):
        assert weights["w"].tolist() == [0, 1, 2]
        (tmp_path / str(rank.index)).write_text("here")
        dist.barrier()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]

    @settings(max_examples=5)
    @given(value=st.integers(0, 9))
    @spmd
    def test_property(rank, value):
        assert total(rank, value) == 2 * value

    class TestGroup:
        base = 4

        @pytest.mark.parametrize("factor", [3])
        @spmd(2)
        def test_method(self, rank, factor):
            assert total(rank, factor + self.base) == 14

    @spmd
    def test_fails_on_one(rank):
        \"\"\"Its docstring.\"\"\"
        value = rank.index + 40
        assert value == 40

    def test_keeps_what_it_was():
        assert test_fails_on_one.__name__ == "test_fails_on_one"
        assert test_fails_on_one.__doc__ == "Its docstring."

    @pytest.fixture
    def lock():
        import threading
        return threading.Lock()

    @spmd
    def test_fixture_that_cannot_travel(rank, lock):
        pass
"""

PASSING = [
    "test_bare[2ranks]",
    "test_empty[2ranks]",
    "test_sizes[1rank]",
    "test_sizes[3ranks]",
    "test_parametrized[2ranks-2]",
    "test_parametrized[2ranks-5]",
    "test_fixture[2ranks]",
    "test_property[2ranks]",
    "TestGroup::test_method[2ranks-3]",
    "test_keeps_what_it_was",
]


@pytest.fixture(scope="module")
def session(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    return make_folder({"test_it.py": TESTS}).run("--concord-results", "out")


@pytest.mark.parametrize("test", PASSING)
def test_body_runs_on_every_rank(session: Session, test: str) -> None:
    """The body runs on all ranks; sizes, options, parameters, fixtures and drawn values work as in any test."""
    assert session.results.tests[f"test_it.py::{test}"].verdict == "passed"


def test_failure_points_into_the_body(session: Session) -> None:
    """A failure shows the body's own lines and none of the harness."""
    shown = session.section("test_fails_on_one[2ranks]")
    assert "E   rank 1 of 2 failed first: AssertionError: assert 41 == 40" in shown
    assert "    assert value == 40" in shown
    assert "harness/" not in shown


def test_argument_that_cannot_travel(session: Session) -> None:
    """A fixture that can't be pickled is an error which says which test, and why."""
    found = session.results.tests["test_it.py::test_fixture_that_cannot_travel[2ranks]"]
    assert found.verdict == "failed"
    assert "test_fixture_that_cannot_travel, or an argument of it, can't be sent to the ranks" in found.headline


@pytest.mark.parametrize("parameters", ["world", "", "x, rank", "self", "self, x, rank"])
def test_first_parameter_must_be_the_rank(parameters: str) -> None:
    """Anything else as the first parameter is refused where the test is defined, by name."""
    from harness import spmd

    namespace: dict[str, object] = {}
    exec(f"def test_it({parameters}): pass", namespace)
    with pytest.raises(TypeError, match="@spmd: the first parameter of test_it must be called rank"):
        spmd(namespace["test_it"])
