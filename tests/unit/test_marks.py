"""What ``@pytest.mark.world`` may ask for, and what ``@spmd`` makes of a test."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from harness.plugin.marks import WorldMark, WorldRequest, read_marks, spmd

world = pytest.mark.world


def read(*marks: pytest.MarkDecorator) -> WorldMark:
    return read_marks([mark.mark for mark in marks], "test_x.py::test_a")


class TestWorldMark:
    def test_default(self) -> None:
        """Without a word, a world has two ranks, and the run's options decide the rest."""
        assert read() == WorldMark(sizes=(2,), backend=None, device=None, warm=None, timeout=None)

    def test_sizes(self) -> None:
        """Sizes stay in the order in which they were given."""
        assert read(world(4, 1, 2)).sizes == (4, 1, 2)

    @pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True, [2, 3]], ids=repr)
    def test_bad_size(self, size: Any) -> None:
        """A size is a whole number from 1."""
        with pytest.raises(
            pytest.UsageError, match=r"test_x\.py::test_a: @pytest\.mark\.world: a world size is a whole"
        ):
            read(world(size))

    def test_size_twice(self) -> None:
        """A size given twice would make two equal tests."""
        with pytest.raises(pytest.UsageError, match="given twice"):
            read(world(2, 3, 2))

    def test_no_sizes(self) -> None:
        """A mark of no sizes makes no test."""
        with pytest.raises(ValueError, match="no world size"):
            WorldMark(sizes=())

    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), "10", [], True - 1], ids=repr)
    def test_bad_timeout(self, timeout: Any) -> None:
        """A time limit is a number of seconds above 0."""
        with pytest.raises(pytest.UsageError, match="a number of seconds above 0"):
            read(world(2, timeout=timeout))

    @pytest.mark.parametrize(
        "argument",
        [{"backend": 3}, {"device": 0}, {"warm": "yes"}, {"exclusive": 1}, {"record": None}],
        ids=str,
    )
    def test_bad_kind(self, argument: dict[str, Any]) -> None:
        """An argument of the wrong kind is refused by name."""
        with pytest.raises(pytest.UsageError, match=f"{next(iter(argument))}="):
            read(world(2, **argument))

    def test_unknown_argument(self) -> None:
        """An argument that there is not is refused with those that there are."""
        with pytest.raises(pytest.UsageError, match=r"no argument 'size'; it has .*backend, .*timeout"):
            read(world(2, size=3))

    def test_env(self) -> None:
        """An environment is the same whatever order it is written in."""
        assert read(world(2, env={"B": "2", "A": "1"})) == read(world(2, env={"A": "1", "B": "2"}))

    @pytest.mark.parametrize("env", [{"A": 1}, {1: "A"}, "A=1", ["A"], 5, None], ids=repr)
    def test_bad_env(self, env: Any) -> None:
        """An environment has names and values that are text."""
        with pytest.raises(pytest.UsageError, match="env"):
            read(world(2, env=env))

    def test_imports(self) -> None:
        """Modules to import are kept in their order."""
        assert read(world(2, imports=["b", "a"])).imports == ("b", "a")

    @pytest.mark.parametrize("imports", ["torch", [3], 3, None], ids=repr)
    def test_bad_imports(self, imports: Any) -> None:
        """Modules are a list of names; one name is not taken for its letters."""
        with pytest.raises(pytest.UsageError, match="imports"):
            read(world(2, imports=imports))

    def test_hashable(self) -> None:
        """What a mark asks for can be a key: equal worlds may be shared."""
        mark = world(2, env={"A": "1"}, imports=["a"])
        assert len({read(mark), read(mark)}) == 1

    def test_request(self) -> None:
        """One size of a mark keeps what else the mark says."""
        assert WorldRequest(3, read(world(3, 4, timeout=5))).mark.timeout == 5


class TestSeveralMarks:
    def test_closest_wins(self) -> None:
        """The mark on the test wins over that on its class or module, argument by argument."""
        found = read(world(3, timeout=5), world(2, timeout=9, backend="nccl"))
        assert (found.sizes, found.timeout, found.backend) == ((3,), 5, "nccl")

    def test_sizes_from_afar(self) -> None:
        """A mark without sizes leaves them to the next one."""
        assert read(world(timeout=5), world(4)).sizes == (4,)

    def test_sizes_are_not_added_up(self) -> None:
        """Sizes of a closer mark replace those of a further one."""
        assert read(world(1), world(2, 3)).sizes == (1,)


class FakeWorld:
    """Notes what it was asked to run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append((fn, args, kwargs))


class TestSpmd:
    def test_signature(self) -> None:
        """pytest sees the world in place of the rank, and the other parameters as they are."""

        @spmd
        def test(rank: Any, tmp_path: Any, size: int = 3) -> None: ...

        assert list(inspect.signature(test).parameters) == ["world", "tmp_path", "size"]

    def test_name_and_text(self) -> None:
        """The test keeps its name and what it says of itself."""

        @spmd(3)
        def test_something(rank: Any) -> None:
            """What it expects."""

        assert (test_something.__name__, test_something.__doc__) == ("test_something", "What it expects.")

    def test_runs_the_body(self) -> None:
        """Called with a world, it runs the body there, with the other arguments."""

        def body(rank: Any, x: int) -> None: ...

        fake = FakeWorld()
        spmd(body)(world=fake, x=5)
        assert fake.calls == [(body, (), {"x": 5})]

    def test_arguments_of_the_mark(self) -> None:
        """Its arguments are those of the mark."""

        @spmd(2, 3, timeout=10)
        def test(rank: Any) -> None: ...

        (mark,) = test.pytestmark
        assert (mark.name, mark.args, mark.kwargs) == ("world", (2, 3), {"timeout": 10})

    @pytest.mark.parametrize("decorate", [spmd, spmd()], ids=["spmd", "spmd()"])
    def test_alone(self, decorate: Any) -> None:
        """Without arguments it leaves the mark to others."""

        def test(rank: Any) -> None: ...

        assert not hasattr(decorate(test), "pytestmark")

    def test_keeps_marks(self) -> None:
        """Marks that are on the body already stay on the test."""

        @spmd(2)
        @pytest.mark.slow
        def test(rank: Any) -> None: ...

        assert {mark.name for mark in test.pytestmark} == {"slow", "world"}

    @pytest.mark.parametrize(
        "body", [lambda: None, lambda world: None, lambda x, rank: None], ids=["none", "other", "later"]
    )
    def test_first_parameter(self, body: Any) -> None:
        """A body whose first parameter is not the rank is refused at once."""
        with pytest.raises(TypeError, match="must be called rank"):
            spmd(body)

    def test_one_size_is_no_body(self) -> None:
        """A single size is not taken for the body."""

        @spmd(4)
        def test(rank: Any) -> None: ...

        assert test.pytestmark[0].args == (4,)
