"""Iterators that compiled code with collectives reads: what they give, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.objects import known, summed, unlike

ITERATORS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "iter": iter,
    "enumerate": enumerate,
    "zip": lambda items: zip(items, items, strict=False),
    "map": lambda items: map(abs, items),
    "filter": lambda items: filter(lambda value: value > 0, items),
    "generator": lambda items: (value * 2 for value in items),
    "reversed": reversed,
}
"""Iterators over a list."""


@requirement(
    "DYN-CONTAINER-1902",
    "In compiled code, an iterator over a list gives what was appended before it ended, but nothing once it has ended.",
    source="Python: Iterator types, 'must continue to do so on subsequent calls'; torch.compile",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, map, filter and reversed give other values")
@pytest.mark.world(2)
def test_iterators(world: World) -> None:
    """Append a number after the first value of each iterator, and another one after its end."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, over in ITERATORS.items():

            def iterate(x: torch.Tensor, over: Callable[[Any], Iterator[Any]] = over) -> Any:
                items = [1, 2]
                iterator = over(items)
                found = [next(iterator)]
                items.append(3)
                found += list(iterator)
                items.append(4)
                return summed(x) * len(items), found, list(iterator), next(iterator, "none")

            compiled, _ = dynamo.compiled(iterate, backend="eager", fullgraph=False)
            x = torch.ones(2, device=rank.device)
            right, found = known(iterate(x)), known(compiled(x))
            if found != right:
                wrong.append(f"{name}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


GIVEN: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([2, 3, 4]),
    "generator": lambda: (batch for batch in (2, 3, 4)),
    "tuple": lambda: iter((2, 3, 4)),
    "range": lambda: iter(range(2, 5)),
}
"""Iterators over numbers of batches."""


@requirement(
    "DYN-CONTAINER-2900",
    "Compiled code that reads an iterator which it is given leaves to its caller what uncompiled code leaves.",
    source="Python: Iterator types; torch.compile: side effects",
)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.world(2)
def test_given_iterators(world: World, kind: str) -> None:
    """Add the first batch, or all, to a sum over ranks, and see what is left for the next call."""

    def one(x: torch.Tensor, batches: Iterator[int]) -> torch.Tensor:
        return summed(x) + next(batches)

    def every(x: torch.Tensor, batches: Iterator[int]) -> torch.Tensor:
        for batch in list(batches):
            x = x + batch
        return summed(x)

    def body(rank: Rank) -> list[str]:
        wrong = []
        for step in (one, every):
            found = []
            for call in (step, dynamo.compiled(step, backend="eager", fullgraph=False)[0]):
                batches = GIVEN[kind]()
                found.append((known(call(torch.ones(2, device=rank.device), batches)), list(batches)))
            if found[0] != found[1]:
                wrong.append(f"{step.__name__}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


READERS: dict[str, Callable[[Iterator[int]], Any]] = {
    "list": list,
    "sorted": sorted,
    "tuple": tuple,
    "set": set,
    "max": max,
    "min": min,
    "in": lambda numbers: 1 in numbers,
    "sum": sum,
    "any": any,
    "all": all,
}
"""Functions that read an iterator to its end, or until they know."""


@requirement(
    "DYN-CONTAINER-2901",
    "In compiled code, a function that reads an iterator leaves of it what the function leaves in uncompiled code.",
    source="Python: Built-in Functions, sum, any, all; torch.compile",
)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.world(2)
def test_read_iterators(world: World, reader: str) -> None:
    """Read numbers by a function, and add up over ranks what is left of them."""
    read = READERS[reader]

    def step(x: torch.Tensor) -> Any:
        numbers = iter([0, 1, 2])
        found = read(numbers)
        left = list(numbers)
        return summed(x) * len(left), found, left

    def body(rank: Rank) -> list[str]:
        return unlike(rank, {reader: (step, ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class Batches:
    """An iterator of which the third number can't be read."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count == 3:
            raise ValueError("no such batch")
        return self.count


def _batches() -> Iterator[int]:
    yield 1
    yield 2
    raise ValueError("no such batch")


@requirement(
    "DYN-CONTAINER-2903",
    "In compiled code, list.extend keeps what an iterator gave before it raised an error.",
    source="Python: list.extend, 'Extend the list by appending all the items'; torch.compile",
)
@pytest.mark.parametrize("kind", ["generator", "own-iterator"])
@pytest.mark.world(2)
def test_extended_until_an_error(world: World, kind: str) -> None:
    """Extend a list by two numbers and an error, and multiply a sum over ranks by its length."""

    def step(x: torch.Tensor) -> Any:
        items = [7]
        try:
            items.extend(_batches() if kind == "generator" else Batches())
        except ValueError:
            x = x + 1
        return summed(x) * len(items), items

    def body(rank: Rank) -> list[str]:
        return unlike(rank, {kind: (step, ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _ended(numbers: Iterator[int]) -> Iterator[int]:
    while True:
        try:
            number = next(numbers)
        except StopIteration:
            return
        yield number


def _not_ended(numbers: Iterator[int]) -> Iterator[int]:
    while True:
        yield next(numbers)


@requirement(
    "DYN-CONTAINER-3102",
    "A StopIteration that leaves a generator in compiled code is a RuntimeError, and one that the generator catches is "
    "none.",
    source="torch.compile: the compiled function does what the function does; PEP 479",
)
@pytest.mark.parametrize("generator", [_ended, _not_ended], ids=["caught", "not caught"])
@pytest.mark.world(2)
def test_ends_of_generators(world: World, generator: Callable[[Iterator[int]], Iterator[int]]) -> None:
    """Add two numbers that a generator takes out of an iterator without a default."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = summed(x)
        try:
            return y * sum(generator(iter([1, 2])))
        except RuntimeError:
            return y * 100

    def body(rank: Rank) -> float:
        return float(dynamo.compiled(step, backend="eager", fullgraph=False)[0](torch.ones(1, device=rank.device)))

    right = 2.0 * (3 if generator is _ended else 100)
    assert world.run(body) == [right] * world.size
