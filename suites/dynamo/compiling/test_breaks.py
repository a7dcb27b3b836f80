"""What breaks graphs, why, and into how many: asynchronous collectives, messages, barriers, and settings of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement, spmd
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.training import launched, since

SOURCE = "torch/_dynamo/variables/functions.py: CollectiveFunctionRewriteVariable"
ASYNC = "async_op=True for distributed collectives"


def _all_reduce(x: torch.Tensor, size: int, **options: Any) -> Any:
    return x, dist.all_reduce(x, **options)


def _gather_list(x: torch.Tensor, size: int, **options: Any) -> Any:
    into = [torch.zeros_like(x) for _ in range(size)]
    return into[-1], dist.all_gather(into, x, **options)


def _exchange(x: torch.Tensor, size: int, **options: Any) -> Any:
    into = torch.zeros_like(x)
    return into, dist.all_to_all_single(into, x, **options)


COLLECTIVES = (_all_reduce, _gather_list, _exchange)


@requirement(
    "DYN-BREAK-02",
    "A collective with async_op=True breaks the graph, and one with async_op=False does not.",
    source=SOURCE,
)
@requirement(
    "DYN-BREAK-03",
    "fullgraph=True refuses a collective with async_op=True, and names async_op.",
    source=SOURCE,
)
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.world(2)
def test_asynchronous(world: World, collective: Callable[..., Any]) -> None:
    """One function is given the flag, in turn and again; the other ones leave it out or have it as a constant."""

    def body(rank: Rank) -> None:
        def given(x: torch.Tensor, flag: bool) -> torch.Tensor:
            y, work = collective(x + 1, rank.size, async_op=flag)
            if flag:
                work.wait()
            result: torch.Tensor = y * 2
            return result

        def left_out(x: torch.Tensor, flag: bool) -> torch.Tensor:
            result: torch.Tensor = collective(x + 1, rank.size)[0] * 2
            return result

        def constant(x: torch.Tensor, flag: bool) -> torch.Tensor:
            result: torch.Tensor = collective(x + 1, rank.size, async_op=False)[0] * 2
            return result

        def check(function: Callable[..., torch.Tensor], run: Callable[..., torch.Tensor], flag: bool) -> None:
            x = torch.arange(8.0, device=rank.device).view(4, 2) + 10 * rank.index
            assert_same(function(x, flag), run(x, flag), f"{function.__name__}, async_op={flag}")

        for function in (left_out, constant, given):
            whole, counter = dynamo.compiled(function)
            check(function, whole, False)
            assert counter.graphs == 1
        with pytest.raises(dynamo.REFUSED, match="async_op"):
            whole(torch.ones(4, 2, device=rank.device), True)
        broken, counter = dynamo.compiled(given, fullgraph=False)
        counts = []
        for flag in (False, True, False, True):
            check(given, broken, flag)
            counts.append(counter.graphs)
        assert counts[0] == 1
        assert counts[1] > 1
        assert counts[3] == counts[2]

    world.run(body)


def _single(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    work: Any = dist.isend(x, 1) if rank == 0 else dist.irecv(y, 0)
    work.wait()
    return x + y


def _batch(x: torch.Tensor, rank: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x + y


@requirement(
    "DYN-P2P-06",
    "Messages are part of a graph only while enable_p2p_compilation is on, which it is not by default.",
    source="torch/_dynamo/config.py: enable_p2p_compilation",
)
@requirement(
    "DYN-P2P-07",
    "Compiled code sends and receives the same messages whether or not they are part of the graph.",
    source="torch/_dynamo/config.py: enable_p2p_compilation",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("messages", [_single, _batch], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.world(2, timeout=15)
def test_messages(world: World, messages: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Compile by default, with the setting off, on and off again."""

    def body(rank: Rank) -> None:
        x = torch.arange(4.0, device=rank.device) + 10 * rank.index
        right = messages(x, rank.index)

        def check(on: bool) -> None:
            function, counter = dynamo.compiled(messages, backend="eager")
            if on:
                assert_same(right, function(x, rank.index), "in one graph")
                assert counter.graphs == 1
            else:
                with pytest.raises(dynamo.REFUSED, match="P2P compilation"):
                    function(x, rank.index)
                assert counter.graphs == 0
            function, _ = dynamo.compiled(messages, backend="eager", fullgraph=False)
            assert_same(right, function(x, rank.index), f"with the setting {on}")

        check(on=False)
        for on in (False, True, False):
            with dynamo.compiled_messages(on):
                check(on)
        check(on=False)

    world.run(body)


def _whole(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return functional.all_reduce(x, "max", dist.group.WORLD) * 2


def _barrier(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    dist.barrier()
    return x + 1


def _later(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    work: Any = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1


def _twice(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    dist.broadcast(x, 0)
    x = functional.all_reduce(x, "sum", dist.group.WORLD)
    dist.barrier()
    return x + 1


@requirement(
    "DYN-BREAK-04",
    "torch._dynamo.explain counts the graphs and graph breaks of a function with collectives.",
    source="torch/_dynamo/eval_frame.py: explain",
)
@requirement(
    "DYN-BREAK-05",
    "torch._dynamo.explain launches the collectives that one call of the function launches.",
    source="torch/_dynamo/eval_frame.py: explain",
)
@pytest.mark.parametrize(
    ("function", "breaks"),
    [(_whole, 0), (_barrier, 1), (_later, 1), (_twice, 2)],
    ids=lambda p: p.__name__.strip("_") if callable(p) else None,
)
@pytest.mark.world(2)
def test_explained(world: World, function: Callable[[torch.Tensor], torch.Tensor], breaks: int) -> None:
    """Explain functions with none to two breaks, twice, and compile them afterwards."""

    def body(rank: Rank) -> None:
        x = torch.full((2,), 1.0 + rank.index, device=rank.device)
        before = launched()
        right, once = function(x.clone()), since(before)
        for _ in range(2):
            before = launched()
            told = dynamo.explained(function, x.clone())
            assert since(before) == once
            assert told.graphs == breaks + 1
            assert told.breaks == breaks
            assert len(told.reasons) == breaks
            assert all(told.reasons)
            assert function is not _later or told.reasons == (ASYNC,)
        compiled, counter = dynamo.compiled(function, fullgraph=False)
        assert_same(right, compiled(x.clone()), "result")
        assert counter.graphs == breaks + 1

    world.run(body)


def _before_loop(x: torch.Tensor) -> torch.Tensor:
    x = functional.all_reduce(x, "sum", dist.group.WORLD)
    dynamo.graph_break()
    for _ in range(3):
        x = x + 1
    return x


def _after_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + 1
    dynamo.graph_break()
    return x * 2


def _in_loop_that_returns(x: torch.Tensor) -> torch.Tensor:
    for k in range(3):
        x = x + 1
        if k == 1:
            dynamo.graph_break()
            return x * 2
    return x


def _in_inner_loop_that_returns(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        while True:
            x = x + 1
            dynamo.graph_break()
            return x * 2
    return x


def _in_branch_before_loop(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    if x.dim() == 1:
        dynamo.graph_break()
        return x * 2
    for _ in range(3):
        x = x + 1
    return x


def _in_branch_after_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + 1
    if x.dim() == 1:
        dynamo.graph_break()
        return x * 2
    return x


LOOPS = (
    _before_loop,
    _after_loop,
    _in_loop_that_returns,
    _in_inner_loop_that_returns,
    _in_branch_before_loop,
    _in_branch_after_loop,
)
"""Functions with a loop whose graph breaks outside of it, or where the loop ends."""


@requirement(
    "DYN-BREAK-3300",
    "A graph break outside a loop, or on a path that returns from it, cuts the function into two graphs.",
    source="torch.compile: fullgraph=False; torch.compiler.config: graph breaks in loops skip the frame",
)
@pytest.mark.world(2)
def test_loops(world: World) -> None:
    """Compare each with uncompiled code, and count its graphs."""

    def body(rank: Rank) -> None:
        for function in LOOPS:
            x = torch.arange(2.0, device=rank.device) + rank.index
            compiled, counter = dynamo.compiled(function, backend="eager", fullgraph=False)
            assert_same(function(x), compiled(x), function.__name__)
            assert counter.graphs == 2, f"{function.__name__}: {counter.graphs} graphs"

    world.run(body)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Return twice the sum over the ranks."""
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD)


@requirement(
    "DYN-OPTION-5442",
    "torch.compiler.disable keeps a function with a collective out of graphs, and an error says the reason given.",
    source="torch.compiler.disable: fn, recursive, reason",
)
@pytest.mark.parametrize("recursive", [True, False], ids=["with what it calls", "alone"])
@pytest.mark.parametrize("form", ["function", "decorator"])
@spmd(2)
def test_disabled(rank: Rank, form: str, recursive: bool) -> None:
    """Compile a function that calls a disabled one, with breaks or without."""
    if form == "function":
        disabled = torch.compiler.disable(summed, recursive=recursive, reason="it is late")
    else:
        disabled = torch.compiler.disable(recursive=recursive, reason="it is late")(summed)

    def run(x: torch.Tensor) -> torch.Tensor:
        return disabled(x + 0) + 0

    x = torch.ones(2, device=rank.device)
    function, counter = dynamo.compiled(run, backend="eager", fullgraph=False)
    assert_same(run(x), function(x), "with breaks")
    assert counter.graphs == 2
    with pytest.raises(dynamo.REFUSED, match="it is late"):
        torch.compile(run, backend="eager", fullgraph=True)(x)
