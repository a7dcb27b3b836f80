"""Sizes that users tell the compiler of: ranges, hints, static sizes and unknown ones, of tensors that are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import compiling, dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

SOURCE = "torch/_dynamo/decorators.py: mark_dynamic"


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, and add the sizes."""
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + x.shape[0] + x.shape[1]


def paired(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over ranks, and add the sum of another one."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) * x.shape[0] + y.sum()


def square(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks what needs four rows."""
    rows = torch.ones(4, 1, device=x.device)
    return functional.all_reduce(x + rows.expand(4, x.shape[1]), "sum", dist.group.WORLD)


def fixed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks what needs four rows and four columns."""
    return functional.all_reduce(x + torch.ones(4, 4, device=x.device), "sum", dist.group.WORLD)


def drawn(rank: Rank, *shape: int) -> torch.Tensor:
    """Return a tensor of small numbers, other ones on each rank."""
    return dyadic(*shape, key=(rank.index, shape), dtype=torch.float32).to(rank.device)


def check(function: Any, code: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    """Compare the result of compiled code with that of uncompiled code."""
    plain = [x.detach().clone() for x in given]
    assert_same(code(*plain) + 0, function(*given) + 0, f"{[tuple(x.shape) for x in given]}")


@requirement(
    "DYN-SIZE-5560",
    "Code is compiled once for the sizes in the range that mark_dynamic was given, and again for sizes outside of it.",
    source=f"{SOURCE}: min, max",
)
@requirement(
    "DYN-SIZE-5561",
    "Compiled code raises an error if a dimension that mark_dynamic has marked can have one size only, unless "
    "maybe_mark_dynamic has.",
    source=f"{SOURCE}: 'if the dimension is fully constrained'; torch._dynamo.maybe_mark_dynamic",
)
@requirement(
    "DYN-SIZE-5562",
    "For each size in specialize_on, graphs of marked dimensions are compiled once more, which calls of that size use.",
    source=f"{SOURCE}: specialize_on, 'one Dynamo trace and two backend compilations'",
)
@pytest.mark.world(2)
def test_dynamic(world: World) -> None:
    """Call with sizes within the range and outside, with rows that must be four, and with specialized sizes."""

    def body(rank: Rank) -> None:
        function, counter = dynamo.compiled(summed, backend="eager")
        for step, (rows, graphs) in enumerate([(5, 1), (3, 1), (8, 1), (4, 1), (9, 2), (12, 2), (7, 2)]):
            x = drawn(rank, rows, 3)
            if step == 0:
                dynamo.marked("dynamic", x, 0, min=3, max=8)
            check(function, summed, x)
            assert counter.graphs == graphs, f"{rows} rows"
        function, _ = dynamo.compiled(square, backend="eager")
        with pytest.raises(Exception, match=r"(?s)[Mm]ark.*dynamic"):
            function(dynamo.marked("dynamic", drawn(rank, 4, 3), 0))
        check(function, square, dynamo.marked("maybe-dynamic", drawn(rank, 4, 3), (0, 1)))
        with dynamo.settings(allow_ignore_mark_dynamic=True):
            function, counter = dynamo.compiled(square, backend="eager")
            for columns in (3, 5):
                check(function, square, dynamo.marked("dynamic", drawn(rank, 4, columns), (0, 1)))
            assert counter.graphs == 1
        ran = list[int]()

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            number = len(made)
            made.append(number)

            def run(*arguments: Any) -> Any:
                ran.append(number)
                return graph(*arguments)

            return run

        made = list[int]()
        torch.compiler.reset()
        special: Any = torch.compile(summed, backend=backend, fullgraph=True)
        for step, rows in enumerate((6, 8, 16, 8, 7, 16)):
            x = drawn(rank, rows, 3)
            if step == 0:
                dynamo.marked("dynamic", x, 0, specialize_on=[lambda n: n == 8, lambda n: n == 16])
            check(special, summed, x)
        assert len(made) == 3
        general, eight, sixteen = ran[:3]
        assert ran == [general, eight, sixteen, eight, general, sixteen]
        assert len({general, eight, sixteen}) == 3

    world.run(body)


@requirement(
    "DYN-SIZE-5563",
    "With dynamic=True, code is compiled for each size of the dimensions that mark_static has marked, or of all if it "
    "was given none.",
    source="torch._dynamo.mark_static: 'prevent us from attempting to compile it dynamically when dynamic=True'",
)
@requirement(
    "DYN-SIZE-5564",
    "A dimension that both mark_static and mark_dynamic have marked is dynamic, in whatever order.",
    source="torch._dynamo.mark_static: 'lower precedence than mark_dynamic'",
)
@requirement(
    "DYN-SIZE-5565",
    "mark_static within compiled code has it compiled for each size, and mark_dynamic there raises an error.",
    source=f"torch._dynamo.mark_static: 'this can be done inside a graph'; {SOURCE}: 'attempts to trace this function'",
)
@pytest.mark.world(2)
def test_static(world: World) -> None:
    """Mark one dimension, all, or none; mark in the code; and mark a dimension in both ways."""

    def body(rank: Rank) -> None:
        shapes = [(4, 6), (5, 6), (5, 7), (4, 7)]
        for dims, graphs in ((0, 2), ((0, 1), 4), (None, 4)):
            function, counter = dynamo.compiled(summed, backend="eager", dynamic=True)
            for shape in shapes:
                check(function, summed, dynamo.marked("static", drawn(rank, *shape), dims))
            assert counter.graphs == graphs, f"dimensions {dims}"
        for order in (("static", "dynamic"), ("dynamic", "static")):
            function, counter = dynamo.compiled(summed, backend="eager")
            for shape in ((4, 6), (5, 6), (7, 6)):
                x = drawn(rank, *shape)
                for mark in order:
                    dynamo.marked(mark, x, 0)
                check(function, summed, x)
            assert counter.graphs == 1, order

        def within(x: torch.Tensor) -> torch.Tensor:
            y = functional.all_gather_tensor(x, 0, dist.group.WORLD) * 1
            return dynamo.marked("static", y, 0) * 2

        function, counter = dynamo.compiled(within, backend="eager", dynamic=True)
        for shape in ((4, 6), (5, 6), (5, 7), (5, 8)):
            check(function, lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD) * 2, drawn(rank, *shape))
        assert counter.graphs == 2
        function, _ = dynamo.compiled(lambda x: summed(dynamo.marked("dynamic", x, 0)), backend="eager")
        with pytest.raises(Exception, match="forbidden"):
            function(drawn(rank, 4, 6))

    world.run(body)


@requirement(
    "DYN-SIZE-5566",
    "Code is compiled once for all sizes that mark_unbacked has marked, zero and one included.",
    source="torch/_dynamo/decorators.py: mark_unbacked",
)
@requirement(
    "DYN-SIZE-5567",
    "Code for marked sizes raises an error on the ranks whose sizes differ with one shape_id, or are out of range.",
    source="torch._dynamo.decorators.mark_unbacked: shape_id, min, max",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, unknown sizes have no bounds")
@pytest.mark.world(2, timeout=120)
def test_unbacked(world: World) -> None:
    """Mark dimensions at once and one by one; call with sizes that are right on all ranks, or wrong on the last one."""

    def body(rank: Rank) -> None:
        for backend in ("eager", "aot_eager"):
            function, counter = dynamo.compiled(summed, backend=backend)
            for step, shape in enumerate(((4, 3), (0, 3), (1, 5), (7, 1), (4, 3))):
                x = drawn(rank, *shape)
                if step == 0:
                    compiling.unbacked(compiling.unbacked(x, 0), [1])
                check(function, summed, x)
            assert counter.graphs == 1, backend
            function, counter = dynamo.compiled(paired, backend=backend)
            for step, rows in enumerate((4, 1, 6)):
                given = [drawn(rank, rows, 3) for _ in range(2)]
                if step == 0:
                    for x in given:
                        compiling.unbacked(x, 0, shape_id="rows")
                check(function, paired, *given)
            assert counter.graphs == 1
            function, _ = dynamo.compiled(paired, backend=backend)
            with pytest.raises((RuntimeError, AssertionError)):
                function(*(compiling.unbacked(drawn(rank, rows, 3), 0, shape_id="rows") for rows in (4, 5)))
            function, counter = dynamo.compiled(summed, backend=backend)
            for step, rows in enumerate((4, 3, 8)):
                x = drawn(rank, rows, 3)
                if step == 0:
                    compiling.unbacked(x, 0, min=3, max=8)
                check(function, summed, x)
            assert counter.graphs == 1
            for rows in (2, 9):
                function, _ = dynamo.compiled(summed, backend=backend)
                with pytest.raises((RuntimeError, AssertionError)):
                    function(compiling.unbacked(drawn(rank, rows, 3), 0, min=3, max=8))

    world.run(body)


@requirement(
    "DYN-SIZE-5568",
    "If a dimension can have one size only, compiled code raises an error if mark_unbacked was given strict=True.",
    source="torch._dynamo.decorators.mark_unbacked: strict",
)
@pytest.mark.parametrize("dims", [0, [0], (0, 1)], ids=["number", "list", "tuple"])
@pytest.mark.world(2)
def test_strict(world: World, dims: Any) -> None:
    """Mark a dimension by its number, or in a list or a tuple; without strict, the code has this size."""

    def body(rank: Rank) -> None:
        def given() -> torch.Tensor:
            return torch.full((4, 4), 1.0 + rank.index, device=rank.device)

        function, _ = dynamo.compiled(fixed, backend="eager")
        assert_same(fixed(given()) + 0, function(dynamo.marked("unbacked", given(), dims)) + 0, "not strict")
        function, _ = dynamo.compiled(fixed, backend="eager")
        with pytest.raises(Exception, match="Constraints violated"):
            function(dynamo.marked("unbacked", given(), dims, strict=True))

    world.run(body)


@requirement(
    "DYN-SIZE-6105",
    "Code is compiled once more for a size in specialize_on, whichever function has marked the dimension.",
    source=f"torch/_dynamo/decorators.py: mark_unbacked: specialize_on; {SOURCE}",
)
@pytest.mark.parametrize("how", ["dynamic", "unbacked"])
@pytest.mark.world(2)
def test_specialized(world: World, how: str) -> None:
    """Mark rows with a size, by number or in a list; call with that size and others."""

    def body(rank: Rank) -> None:
        for dims in 0, [0]:
            function, counter = dynamo.compiled(summed, backend="eager")
            for rows in 8, 5, 8:
                x = torch.full((rows, 3), 1.0 + rank.index, device=rank.device)
                dynamo.marked(how, x, dims, specialize_on=[lambda n: n == 8])
                assert_same(summed(x.clone()) + 0, function(x) + 0, f"{rows} rows, {dims}")
            assert counter.graphs == 2, f"compiled {counter.graphs} times for {dims}"

    world.run(body)
