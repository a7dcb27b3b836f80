"""Functions and generators that compiled code makes for itself, and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness import World, requirement
from suites.dynamo.objects import summed, unlike


def _declared(x: torch.Tensor) -> Any:
    def scaled(x: torch.Tensor, by: int = 2) -> torch.Tensor:
        return x * by

    return scaled(x)


def _assigned(x: torch.Tensor) -> Any:
    def scaled(x: torch.Tensor, by: int = 2) -> torch.Tensor:
        return x * by

    scaled.__defaults__ = (5,)
    return scaled(x)


def _read(x: torch.Tensor) -> Any:
    def scaled(x: torch.Tensor, by: int = 2) -> torch.Tensor:
        return x * by

    return scaled(x), scaled.__defaults__


@requirement(
    "DYN-MADE-3759",
    "A function that compiled code makes has the defaults that it was given last, which __defaults__ shows.",
    source="Python: function.__defaults__, 'A tuple containing default parameter values'; torch.compile",
)
@pytest.mark.parametrize("way", [_declared, _assigned, _read], ids=["declared", "assigned", "read"])
@pytest.mark.world(2)
def test_defaults(world: World, way: Callable[[torch.Tensor], Any]) -> None:
    """Scale a sum over ranks by a function that has a default, is given another, or is asked for it."""
    for wrong in world.run(lambda rank: unlike(rank, {"defaults": (lambda x: way(summed(x)), ())})):
        assert not wrong, "\n".join(wrong)


def _scaled(x: torch.Tensor) -> Iterator[Any]:
    yield x * 2
    yield x * 3


def _scales(x: torch.Tensor) -> Iterator[Any]:
    yield x * 2
    return x * 3


def _values(x: torch.Tensor) -> Iterator[Any]:
    yield from _scaled(x)


def _result(x: torch.Tensor) -> Iterator[Any]:
    result = yield from _scales(x)  # type: ignore[misc]
    yield result


@requirement(
    "DYN-MADE-3760",
    "In compiled code, yield from gives what the generator yields, and has what it returned for its value.",
    source="Python: yield expressions, 'the value of the yield expression' of a subgenerator; torch.compile",
)
@pytest.mark.parametrize("outer", [_values, _result], ids=["values", "result"])
@pytest.mark.world(2)
def test_subgenerators(world: World, outer: Callable[[torch.Tensor], Iterator[Any]]) -> None:
    """List what a generator gives that yields from another, of a sum over ranks."""
    for wrong in world.run(lambda rank: unlike(rank, {"generator": (lambda x: list(outer(summed(x))), ())})):
        assert not wrong, "\n".join(wrong)
