"""Blocks of compiled code in which graph breaks are refused or allowed, around collectives that break the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks import dynamo

refused = dynamo.breaks_refused


def _pending(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    work.wait()
    return y


def _within(x: torch.Tensor) -> torch.Tensor:
    with refused(True):
        return _pending(x)


def _after(x: torch.Tensor) -> torch.Tensor:
    with refused(True):
        y = x + 1
    return _pending(y)


def _before(x: torch.Tensor) -> torch.Tensor:
    y = _pending(x)
    with refused(True):
        return y + 1


def _allowed_within(x: torch.Tensor) -> torch.Tensor:
    with refused(True):
        y = x + 1
        with refused(False):
            return _pending(y)


def _after_allowed(x: torch.Tensor) -> torch.Tensor:
    with refused(True):
        with refused(False):
            y = x + 1
        return _pending(y)


def _after_two(x: torch.Tensor) -> torch.Tensor:
    with refused(True), refused(True):
        y = x + 1
    return _pending(y)


def _decorated(x: torch.Tensor) -> torch.Tensor:
    return _of_decorated(x)


def _after_decorated(x: torch.Tensor) -> torch.Tensor:
    return _pending(_plain_of_decorated(x))


def _after_return(x: torch.Tensor) -> torch.Tensor:
    def early(x: torch.Tensor) -> torch.Tensor:
        with refused(True):
            return x + 1

    return _pending(early(x))


if refused is not None:
    _of_decorated = refused(True)(_pending)
    _plain_of_decorated = refused(True)(lambda x: x + 1)

CASES: dict[Callable[[torch.Tensor], torch.Tensor], bool] = {
    _within: True,
    _after: False,
    _before: False,
    _allowed_within: False,
    _after_allowed: True,
    _after_two: False,
    _decorated: True,
    _after_decorated: False,
    _after_return: False,
}
"""Functions of a tensor, and whether they have a graph break where it is refused."""


@requirement(
    "DYN-BREAK-5000",
    "error_on_graph_break refuses graph breaks of collectives in its own block or function only.",
    source="torch/_dynamo/decorators.py: error_on_graph_break",
)
@pytest.mark.needs(torch=dynamo.REFUSES_BREAKS)
@pytest.mark.world(2)
def test_blocks(world: World) -> None:
    """Break the graph in, before and after blocks and functions that refuse it, and in blocks that allow it again."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for function, refuses in CASES.items():
            x = torch.full((2,), rank.index + 1.0, device=rank.device)
            found: Any
            try:
                found = dynamo.compiled(function, backend="eager", fullgraph=False)[0](x).tolist()
            except dynamo.REFUSED:
                found = "refused"
            right = "refused" if refuses else function(x).tolist()
            if found != right:
                wrong.append(f"{function.__name__.strip('_')}: {right} expected, {found} found")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
