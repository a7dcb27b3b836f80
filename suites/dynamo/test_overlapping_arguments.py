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
