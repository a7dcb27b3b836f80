"""The stances of the compiler, which say when compiled code with collectives is compiled anew, used, or left out."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks.collectives import functional

SOURCE = "torch.compiler.set_stance"


class Backend:
    """A backend that counts the graphs that it is given, and how often they run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return graph(*arguments)

        return run

    @property
    def counts(self) -> tuple[int, int]:
        """How many graphs, and how many runs."""
        return self.graphs, self.runs


def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum over ranks."""
    x = x * y.numel()
    dist.all_reduce(x)
    return x + 1


def check(function: Callable[..., torch.Tensor], rank: Rank, sizes: tuple[int, ...], alike: bool) -> None:
    """Call with sizes that change on all ranks, or on the last one alone."""
    for size in sizes:
        mine = size if alike or rank.index == rank.size - 1 else 2
        others = size if alike else 2
        x = torch.full((2,), 1.0 + rank.index, device=rank.device)
        right = 1 + sum((1.0 + i) * (size if i == rank.size - 1 else others) for i in range(rank.size))
        found = function(x, torch.ones(mine, device=rank.device)).tolist()
        assert found == [right] * 2, (size, found, right)


STANCES: dict[str, tuple[int, int]] = {
    "default": (2, 4),
    "force_eager": (0, 0),
    "eager_on_recompile": (0, 2),
    "fail_on_recompile": (0, 2),
}
"""Of each stance, how many graphs and runs are added by calls with sizes 2, 3, 2 and 4 after one with 2."""


@requirement(
    "DYN-STANCE-51",
    "Each stance of the compiler compiles code with collectives anew, uses it, or runs it uncompiled, as documented.",
    source=SOURCE,
)
@requirement(
    "DYN-STANCE-52",
    "In each stance of the compiler, code with collectives has the right sums, also if one rank alone has a new size.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_stances(world: World) -> None:
    """Set each stance by a context, by a decorator and for good, and return to the default, which compiles again."""

    def body(rank: Rank) -> None:
        def decorated(stance: str, call: Callable[[], None]) -> None:
            torch.compiler.set_stance(stance)(call)()

        def within(stance: str, call: Callable[[], None]) -> None:
            with torch.compiler.set_stance(stance):
                call()

        def for_good(stance: str, call: Callable[[], None]) -> None:
            torch.compiler.set_stance(stance)
            try:
                call()
            finally:
                torch.compiler.set_stance("default")

        ways = (within, decorated, for_good)
        for number, (stance, (graphs, runs)) in enumerate(STANCES.items()):
            for alike in (True, False):
                torch.compiler.reset()
                backend = Backend()
                function = torch.compile(summed, backend=backend, dynamic=False, fullgraph=True)
                sized = alike or rank.index == rank.size - 1
                way = ways[(number + alike) % 3]
                what = (stance, way.__name__, alike)

                def calls(function: Any = function, stance: str = stance, alike: bool = alike) -> None:
                    if stance == "fail_on_recompile":
                        check(function, rank, (2,), alike)
                        with pytest.raises(RuntimeError, match=stance):
                            function(torch.ones(2, device=rank.device), torch.ones(3, device=rank.device))
                        check(function, rank, (2,), alike)
                    else:
                        check(function, rank, (2, 3, 2, 4), alike)

                check(function, rank, (2,), alike)
                assert backend.counts == (1, 1), what
                way(stance, calls)
                of_same_size = {"force_eager": (0, 0), "fail_on_recompile": (0, 2)}.get(stance, (0, 4))
                more, again = (graphs, runs) if sized else of_same_size
                assert backend.counts == (1 + more, 1 + again), what
                check(function, rank, (5, 2), alike)
                assert backend.counts == (1 + more + sized, 3 + again), what

    world.run(body)


@requirement(
    "DYN-STANCE-53",
    "With the stance eager_then_compile, the first call of code with collectives is not compiled, and later ones are.",
    source=SOURCE,
)
@requirement(
    "DYN-STANCE-55",
    "With skip_guard_eval_unsafe, code with collectives that was compiled for some sizes is used for each of them.",
    source=f"{SOURCE}: skip_guard_eval_unsafe",
)
@requirement(
    "DYN-STANCE-54",
    "With force_backend, code with collectives is compiled by that backend alone, until the stance ends.",
    source=f"{SOURCE}: force_backend",
)
@pytest.mark.world(2)
def test_later_and_elsewhere(world: World) -> None:
    """Call three times under the stance, three times with another backend, and then with few guards."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        backend, other = Backend(), Backend()
        function = torch.compile(summed, backend=backend, dynamic=False, fullgraph=True)
        with torch.compiler.set_stance("eager_then_compile"):
            check(function, rank, (2,), True)
            assert backend.counts == (0, 0)
            check(function, rank, (2, 2), True)
            assert backend.counts == (1, 2)
        torch.compiler.reset()
        function = torch.compile(summed, backend=backend, dynamic=False, fullgraph=True)
        with torch.compiler.set_stance(force_backend=other):
            check(function, rank, (2, 3, 2), True)
        assert backend.counts == (1, 2)
        assert other.counts == (2, 3)
        check(function, rank, (4, 3), True)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            check(function, rank, (3, 4, 3), True)
        assert backend.counts == (3, 7)
        assert other.counts == (2, 3)

    world.run(body)


@requirement(
    "DYN-STANCE-2500",
    "torch.compiler.disable with recursive=False leaves the function that it was given to be compiled elsewhere.",
    source="torch.compiler.disable: recursive",
)
@requirement(
    "DYN-STANCE-2501",
    "After torch.compiler.reset, code with collectives that had reached the limit of recompilations is compiled again.",
    source="torch.compiler.reset; torch/_dynamo/config.py: recompile_limit",
)
@pytest.mark.world(2)
def test_compiled_again(world: World) -> None:
    """Compile a function that was disabled, and one after a reset that had too many kinds of arguments."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        backend, x = Backend(), torch.ones(2, device=rank.device)
        disabled: Any = torch.compiler.disable(lambda x: summed(x.clone(), x), recursive=False)
        disabled(x)
        assert backend.counts == (0, 0)

        def scaled(x: torch.Tensor, k: float | str) -> torch.Tensor:
            return summed(x.clone(), x) * len(str(k))

        again = torch.compiler.disable(scaled, recursive=False)
        again(x, 1)
        function = torch.compile(scaled, backend=backend, dynamic=False)
        for k in range(20):
            found = function(x, "a" * (k + 1))
            assert found.tolist() == [(k + 1) * 5.0] * 2
        limit = backend.graphs
        assert 1 < limit < 20
        torch.compiler.reset()
        function(x, "again")
        assert backend.graphs == limit + 1

    world.run(body)


@requirement(
    "DYN-STANCE-2502",
    "torch.compiler.allow_in_graph says nothing of functions that are made after the one that it was given is gone.",
    source="torch.compiler.allow_in_graph",
)
@pytest.mark.world(2)
def test_allowed_function_is_gone(world: World) -> None:
    """Make many functions where allowed ones lay, and compile one of them, which notes that it is called."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        called: list[int] = []

        def make(n: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def noted(x: torch.Tensor) -> torch.Tensor:
                called.append(n)
                return x + n

            return noted

        allowed = [torch.compiler.allow_in_graph(make(n)) for n in range(200)]
        places = {id(function) for function in allowed}
        del allowed
        gc.collect()
        made = [make(n) for n in range(2000)]
        again = next((function for function in made if id(function) in places), made[0])
        function = torch.compile(lambda x: summed(again(x), x), backend="eager")
        x = torch.ones(2, device=rank.device)
        function(x)
        function(x)
        assert len(called) == 2

    world.run(body)


@requirement(
    "DYN-STANCE-55",
    "With skip_guard_eval_unsafe, code with collectives that was compiled for some sizes is used for each of them.",
    source=f"{SOURCE}: skip_guard_eval_unsafe",
)
@pytest.mark.parametrize("way", ["context", "decorator"])
@pytest.mark.world(2)
def test_few_guards(world: World, way: str) -> None:
    """Call code that was compiled for one number with another number, which its few guards do not notice."""

    def step(x: torch.Tensor, number: int) -> torch.Tensor:
        x = x * 1
        dist.all_reduce(x)
        return x + number

    def body(rank: Rank) -> tuple[int, int]:
        torch.compiler.reset()
        backend = Backend()
        function = torch.compile(step, backend=backend, dynamic=False, fullgraph=True)
        x = torch.ones(2, device=rank.device)
        function(x, 1)
        stance = torch.compiler.set_stance(skip_guard_eval_unsafe=True)
        if way == "decorator":
            stance(function)(x, 2)
        else:
            with stance:
                function(x, 2)
        return backend.counts

    assert world.run(body) == [(1, 2)] * world.size


class Doubled(torch.nn.Module):
    """Doubles the sum over ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n] to float[n]."""
        y = x * 2
        dist.all_reduce(y)
        return y


class Halved(torch.nn.Module):
    """Halves the sum over ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n] to float[n]."""
        y = x / 2
        dist.all_reduce(y)
        return y


ALIKE: dict[str, Callable[[], list[Any]]] = {
    "modules": lambda: [Doubled(), Halved()],
    "lambdas": lambda: [
        lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD),
        lambda x: functional.all_reduce(x * 3, "sum", dist.group.WORLD),
    ],
}
"""Functions whose names are alike, and that call no function of Python in common."""


@requirement(
    "DYN-STANCE-5000",
    "With the stance eager_then_compile, the first call of each function is not compiled, whatever ran before.",
    source=f"{SOURCE}: eager_then_compile",
)
@pytest.mark.world(2)
def test_first_calls(world: World) -> None:
    """Call functions of one name in turn with three sizes; from the second on, each has one graph for all."""

    def body(rank: Rank) -> None:
        for kind, make in ALIKE.items():
            torch.compiler.reset()
            functions = make()
            backends = [Backend() for _ in functions]
            calls = [torch.compile(f, backend=backend) for f, backend in zip(functions, backends, strict=True)]
            with torch.compiler.set_stance("eager_then_compile"):
                for number, size in enumerate((3, 4, 5)):
                    for function, call in zip(functions, calls, strict=True):
                        x = torch.full((size,), rank.index + 1.0, device=rank.device)
                        assert call(x).tolist() == function(x).tolist(), kind
                    assert [backend.counts for backend in backends] == [(min(number, 1), number)] * 2, (kind, number)

    world.run(body)


STANCES_LEFT = ["default", "force_eager", "fail_on_recompile"]


def one_more(x: torch.Tensor) -> torch.Tensor:
    """Add one."""
    return x + 1


def ran(rank: Rank) -> str:
    """Say what the stance lets new compiled code do, of which each call has some of its own."""
    backend, new = Backend(), types.FunctionType(one_more.__code__.replace(), globals())
    try:
        assert torch.compile(new, backend=backend)(torch.ones(2, device=rank.device)).tolist() == [2.0, 2.0]
    except RuntimeError:
        return "fail_on_recompile"
    return "default" if backend.runs else "force_eager"


@requirement(
    "DYN-STANCE-9404",
    "A stance holds in its block or decorated function, and afterwards the one before it, also after an error.",
    source=f"{SOURCE}: 'context manager', decorator",
)
@pytest.mark.parametrize("way", ["block", "decorator"])
@pytest.mark.parametrize("error", [False, True], ids=["ended", "by an error"])
@pytest.mark.world(2)
def test_stances_within_stances(world: World, error: bool, way: str) -> None:
    """Nest one stance in itself, or in another one within itself; compile new code in the innermost and after each."""

    def body(rank: Rank) -> None:
        def called(call: Callable[[], None]) -> None:
            call()

        decorated = {stance: torch.compiler.set_stance(stance)(called) for stance in STANCES_LEFT}  # type: ignore[arg-type]

        def within(stance: Any, call: Callable[[], None]) -> None:
            if way == "decorator":
                decorated[stance](call)
            else:
                with torch.compiler.set_stance(stance):
                    call()

        def enter(stances: tuple[str, ...], *entered: str) -> None:
            def inside() -> None:
                if len(stances) == 1:
                    assert ran(rank) == stances[0], entered
                enter(stances[1:], *entered, stances[0])
                if error:
                    raise KeyError

            if stances:
                with pytest.raises(KeyError) if error else nullcontext():
                    within(stances[0], inside)
                assert ran(rank) == entered[-1], (entered, stances)

        for one, other in itertools.product(STANCES_LEFT, repeat=2):
            enter((one, other, one) if one != other else (one, one), "default")

    world.run(body)


@requirement(
    "DYN-STANCE-9405",
    "A stance object that is entered, be it again, holds in its block, and afterwards the stance before the block.",
    source=f"{SOURCE}: 'context manager'",
)
@pytest.mark.parametrize("around", STANCES_LEFT)
@pytest.mark.world(2)
def test_stances_made_before(world: World, around: Any) -> None:
    """Make each object in the default stance, and enter it twice within each stance."""

    def body(rank: Rank) -> None:
        for stance in STANCES_LEFT:
            torch.compiler.set_stance("default")
            block = torch.compiler.set_stance(stance)  # type: ignore[arg-type]
            torch.compiler.set_stance("default")
            for _ in range(2):
                with torch.compiler.set_stance(around):
                    with block:
                        assert ran(rank) == stance
                    assert ran(rank) == around, f"after {stance}"
                assert ran(rank) == "default"

    world.run(body)
