"""Arguments that share memory and are changed in place, compiled by AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_function, nop

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with


def first_changed(a: torch.Tensor, b: torch.Tensor, n: Any, m: Any) -> torch.Tensor:
    """Change the first tensor."""
    a.add_(1)
    return a + b * n + m


def second_changed(a: torch.Tensor, b: torch.Tensor, n: Any, m: Any) -> torch.Tensor:
    """Change the second tensor by the sum of the first over ranks."""
    b.add_(functional.all_reduce(a, "sum", dist.group.WORLD))
    return a * m - n


def both_changed(a: torch.Tensor, b: torch.Tensor, n: Any, m: Any) -> torch.Tensor:
    """Change both tensors."""
    a.mul_(n)
    b.sub_(m)
    return a + b


FUNCTIONS: tuple[Callable[..., torch.Tensor], ...] = (first_changed, second_changed, both_changed)

VIEWS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "overlap": lambda base: (base[:3], base[1:]),
    "apart": lambda base: (base[:2], base[2:]),
    "the same": lambda base: (base[:3], base[:3]),
    "own memory": lambda base: (base[:3], base[1:].clone()),
}
"""Two arguments that are made of a tensor of four elements."""

NUMBERS = {"equal": (5, 5), "unlike": (5, 3)}


@requirement(
    "DYN-ARG-1804",
    "Code that AOTAutograd compiles may change arguments that share memory, whatever its other arguments are.",
    source="functorch.compile.aot_function; torch/_functorch/_aot_autograd: synthetic bases",
)
@pytest.mark.world(2)
def test_changed_arguments(world: World) -> None:
    """Change one or both of two tensors that overlap, lie side by side, are the same or have memory of their own."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for views, made in VIEWS.items():
            for numbers, pair in NUMBERS.items():
                for function in FUNCTIONS:
                    found: list[Any] = []
                    compiled = aot_function(function, nop)
                    for run in function, compiled:
                        base = torch.arange(4.0, device=rank.device) + rank.index
                        a, b = made(base)
                        try:
                            result = run(a, b, *pair)
                        except (RuntimeError, AssertionError, IndexError) as error:
                            found.append(f"{error!r:.150}")
                        else:
                            found.append([(result + 0).tolist(), base.tolist(), b.tolist()])
                    if found[0] != found[1]:
                        wrong.append(
                            f"{function.__name__}, {views}, {numbers}: {found[0]} uncompiled, {found[1]} compiled"
                        )
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PLACES: dict[str, list[tuple[int, int]]] = {
    "overlapping first": [(2, 0), (0, 8), (0, 2), (4, 3)],
    "always apart": [(4, 0), (0, 8), (6, 12), (12, 6)],
}
"""Where two slices of a buffer begin in each call; they have four elements."""


def one_changed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Change the first tensor, and return the sum of the second over ranks."""
    a.add_(1)
    return functional.all_reduce(b * 2, "sum", dist.group.WORLD)


@requirement(
    "DYN-ARG-3100",
    "Compiled code changes and reads the views that it is given, wherever in their buffer the views of earlier calls "
    "began.",
    source="torch.compile: the compiled function does what the function does; pytorch/pytorch#184481",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a function of two views of a buffer fails an assertion")
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.world(2)
def test_other_places(world: World, places: str) -> None:
    """Call code with slices of new buffers, that begin elsewhere each time."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        torch.compiler.reset()
        compiled = torch.compile(one_changed, backend="aot_eager", fullgraph=True)
        for first, second in PLACES[places]:
            found = []
            for function in one_changed, compiled:
                buffer = torch.arange(16.0, device=rank.device)
                result = function(buffer[first : first + 4], buffer[second : second + 4])
                found.append(((result + 0).tolist(), buffer.tolist()))
            if found[0] != found[1]:
                wrong.append(f"slices from {first} and {second}: {found[0][1]} uncompiled, {found[1][1]} compiled")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


FIRST: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "overlapping": lambda buffer: (buffer[:4], buffer[2:6]),
    "own memory": lambda buffer: (buffer[:4], buffer[2:6].clone()),
    "apart": lambda buffer: (buffer[:4], buffer[4:]),
}
"""What code is given first, of a buffer."""


@requirement(
    "DYN-ARG-3765",
    "Compiled code that changes one of its arguments also reads the change in another one, if they share memory in "
    "this call.",
    source="torch.compile: the compiled function does what the function does; pytorch/pytorch#139789",
)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.world(2)
def test_overlapping_later(world: World, first: str) -> None:
    """Call code with tensors that overlap or do not, and then with slices of a buffer that overlap."""

    def body(rank: Rank) -> list[Any]:
        torch.compiler.reset()
        compiled = torch.compile(one_changed, backend="aot_eager", fullgraph=True)
        found: list[Any] = []
        for function in one_changed, compiled:
            function(*FIRST[first](torch.arange(8.0, device=rank.device)))
            buffer = torch.arange(8.0, device=rank.device)
            found.append((function(buffer[:4], buffer[2:6]) + 0).tolist())
        return found

    for expected, observed in world.run(body):
        assert observed == expected, f"{first} first: sums {expected} uncompiled, {observed} compiled"
