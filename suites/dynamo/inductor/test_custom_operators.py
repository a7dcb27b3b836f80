"""Operators of the user that reduce tensors in place, compiled: which tensors and which parts of them they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo

Tensors = list[torch.Tensor]


def _reduce(x: torch.Tensor, factor: float = 1.0) -> None:
    """Sum over ranks in place, whatever the strides."""
    y = x.contiguous() * factor
    dist.all_reduce(y)
    x.copy_(y)


def defined() -> Any:
    """Define the operators on this rank, and return their namespace."""

    def reduce_one(x: torch.Tensor, factor: float) -> None:
        _reduce(x, factor)

    def reduce_all(xs: Tensors) -> None:
        for number, x in enumerate(xs):
            _reduce(x, number + 1.0)

    def reduce_some(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        _reduce(x, 2.0)
        if z is not None:
            _reduce(z, 3.0)
        return x + y

    for function, schema, changed, fake in (
        (reduce_one, "(Tensor(a0!) x, float factor) -> ()", ["x"], lambda x, factor: None),
        (reduce_all, "(Tensor(a0!)[] xs) -> ()", ["xs"], lambda xs: None),
        (
            reduce_some,
            "(Tensor(a0!) x, Tensor y, Tensor(a1!)? z) -> Tensor",
            ["x", "z"],
            lambda x, y, z: torch.empty_like(x),
        ),
    ):
        name = f"concord_reducing::{function.__name__}"
        torch.library.custom_op(name, function, mutates_args=changed, schema=schema).register_fake(fake)
    return torch.ops.concord_reducing


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: x,
    "first rows": lambda x: x[:2],
    "last rows": lambda x: x[1:],
    "a row": lambda x: x[1],
    "first columns": lambda x: x[:, :1],
    "middle columns": lambda x: x[:, 1:3],
    "last columns": lambda x: x.narrow(1, 2, 2),
    "a column": lambda x: x[:, 2],
    "every other column": lambda x: x[:, ::2],
    "a part of both": lambda x: x[1:3, 1:3],
    "transposed": lambda x: x.t(),
    "rows of the transposed": lambda x: x.t()[1:3],
    "viewed": lambda x: x.view(2, -1)[1],
    "a chunk": lambda x: x.chunk(2, 1)[1],
    "diagonal": lambda x: x.diagonal(),
    "strided": lambda x: x.as_strided((2, 3), (1, 4), 5),
}
"""Parts of a tensor of four rows and four columns."""


def _numbers(rank: Rank) -> torch.Tensor:
    return torch.arange(16.0, device=rank.device).view(4, 4) + 100 * rank.index


@requirement(
    "DYN-CUSTOM-51",
    "A compiled custom operator that reduces a part of a tensor in place changes that part alone.",
    source="torch.library.custom_op: mutates_args",
)
@pytest.mark.world(2)
def test_parts(world: World) -> None:
    """Give rows, columns, and other views, of a tensor of the graph and of one that is given to it."""

    def body(rank: Rank) -> None:
        operators = defined()

        def changed(x: torch.Tensor) -> Tensors:
            results = []
            for part in PARTS.values():
                y = x + 1
                operators.reduce_one(part(y), 2.0)
                results.append(y)
            return results

        def given(*tensors: torch.Tensor) -> None:
            for part, x in zip(PARTS.values(), tensors, strict=True):
                operators.reduce_one(part(x), 1.0)

        compiled, counter = dynamo.compiled(changed)
        for name, right, found in zip(PARTS, changed(_numbers(rank)), compiled(_numbers(rank)), strict=True):
            assert_same(right, found, name)
        assert counter.graphs == 1
        rights, founds = ([_numbers(rank) for _ in PARTS] for _ in range(2))
        given(*rights)
        compiled, counter = dynamo.compiled(given)
        compiled(*founds)
        for name, right, found in zip(PARTS, rights, founds, strict=True):
            assert_same(right, found, f"{name} of a given tensor")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-CUSTOM-52",
    "A compiled custom operator that reduces several tensors in place changes each of them by its own numbers.",
    source="torch.library.custom_op: mutates_args",
)
@pytest.mark.world(2)
def test_several(world: World) -> None:
    """Give lists of one to three tensors, also parts of one, and tensors with and without an optional one."""

    def body(rank: Rank) -> None:
        operators = defined()

        def lists(x: torch.Tensor) -> Tensors:
            a, b, c, d = x + 1, x[:2] + 2, x[0] + 3, x + 4
            operators.reduce_all([a])
            operators.reduce_all([b, a])
            operators.reduce_all([c, a, b])
            operators.reduce_all([d[:, 2:], c, d[:, :1]])
            return [a, b, c, d]

        def options(x: torch.Tensor) -> Tensors:
            a, b, c, d = x + 1, x + 2, x + 3, x + 4
            e = operators.reduce_some(a, b, None)
            f = operators.reduce_some(b, a, c)
            g = operators.reduce_some(d[:2], e[:2], d[2:])
            return [a, b, c, d, e, f, g]

        def given(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Tensors:
            operators.reduce_all([a, b])
            operators.reduce_all([c[1:], a[:1], b[:, 1]])
            return [operators.reduce_some(c, a, b), a, b, c]

        for function in (lists, options, given):
            compiled, counter = dynamo.compiled(function)
            count = 3 if function is given else 1
            pairs = [
                call(*(_numbers(rank) * (k + 1) for k in range(count)))  # type: ignore[operator]
                for call in (function, compiled)
            ]
            for number, (right, found) in enumerate(zip(*pairs, strict=True)):
                assert_same(right, found, f"{function.__name__}, tensor {number}")
            assert counter.graphs == 1, function.__name__

    world.run(body)
