"""Compiled gathers and scatters along each dimension, collectives of lists, exchanges, and the gradients of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

SOURCE = "torch/distributed/_functional_collectives.py"
SHAPES = ((2, 3, 4), (1, 2, 3), (1, 1, 5))
"""Shapes of which none, one or two dimensions have one element."""
ALONG = [(shape, dim) for shape in SHAPES for dim in range(3)]

Tensors = list[torch.Tensor]
Gets = Callable[[int, list[Tensors]], Tensors]
"""What the rank of an index gets of the tensors of all ranks, computed on one device."""


def longer(shape: tuple[int, ...], dim: int, count: int) -> tuple[int, ...]:
    """Return a shape with a dimension that is ``count`` times as long."""
    return tuple(n * count if i == dim else n for i, n in enumerate(shape))


def assert_as_on_one_device(
    rank: Rank, code: Callable[[Tensors], Tensors], right: Gets, given: Callable[[int, int], Tensors], names: list[str]
) -> None:
    """Compare the results and the gradients of code, compiled and not, in two calls each.

    ``given(i, call)`` are the tensors of rank i; each element of each result has a weight of its own.
    """
    compiled, counter = dynamo.compiled(code)
    for call in range(2):
        leaves = [[x.requires_grad_() for x in given(i, call)] for i in range(rank.size)]
        expected = [right(i, leaves) for i in range(rank.size)]
        weights = [
            [dyadic(*y.shape, key=(i, k, call), dtype=torch.float32) for k, y in enumerate(ys)]
            for i, ys in enumerate(expected)
        ]
        products = [(y * w).sum() for pair in zip(expected, weights, strict=True) for y, w in zip(*pair, strict=True)]
        rights = torch.autograd.grad(torch.stack(products).sum(), leaves[rank.index])
        for how, run in (("compiled", compiled), ("uncompiled", code)):
            xs = [x.detach().to(rank.device).requires_grad_() for x in leaves[rank.index]]
            found = run(xs)
            ws = [w.to(rank.device) for w in weights[rank.index]]
            torch.stack([(y * w).sum() for y, w in zip(found, ws, strict=True)]).sum().backward()
            for name, y, result in zip(names, expected[rank.index], found, strict=True):
                assert_same(y.detach(), (result + 0).detach(), f"{name}, {how}, call {call}")
            for number, (one, x) in enumerate(zip(rights, xs, strict=True)):
                assert x.grad is not None
                assert_same(one, x.grad, f"gradient of tensor {number}, {how}, call {call}")
    assert counter.graphs == 1


@requirement(
    "DYN-DIM-01",
    "A functional gather or scatter goes along the dimension that it is given, compiled or not.",
    source=f"{SOURCE}: all_gather_tensor, reduce_scatter_tensor",
)
@requirement(
    "DYN-DIM-02",
    "The gradient of a functional gather or scatter goes along the same dimension, compiled or not.",
    source=f"{SOURCE}: all_gather_tensor_autograd, reduce_scatter_tensor_autograd",
)
@pytest.mark.world(3)
def test_dimensions(world: World) -> None:
    """Gather and scatter tensors of three shapes along each of three dimensions in one graph."""

    def body(rank: Rank) -> None:
        size, group, count = rank.size, dist.group.WORLD, len(ALONG)

        def move(xs: Tensors) -> Tensors:
            pairs = list(zip(xs, ALONG * 2, strict=True))
            return [
                *(functional.all_gather_tensor_autograd(x, dim, group) for x, (_, dim) in pairs[:count]),
                *(functional.reduce_scatter_tensor_autograd(x, "sum", dim, group) for x, (_, dim) in pairs[count:]),
            ]

        def right(index: int, everyone: list[Tensors]) -> Tensors:
            columns = [list(each) for each in zip(*everyone, strict=True)]
            return [
                *(torch.cat(xs, dim) for xs, (_, dim) in zip(columns[:count], ALONG, strict=True)),
                *(
                    torch.stack(xs).sum(0).chunk(size, dim)[index]
                    for xs, (_, dim) in zip(columns[count:], ALONG, strict=True)
                ),
            ]

        def given(index: int, call: int) -> Tensors:
            shapes = [*(shape for shape, _ in ALONG), *(longer(shape, dim, size) for shape, dim in ALONG)]
            return [dyadic(*s, key=("x", index, k, call), dtype=torch.float32) for k, s in enumerate(shapes)]

        names = [f"{what} of {[*shape]} along {dim}" for what in ("gather", "scatter") for shape, dim in ALONG]
        assert_as_on_one_device(rank, move, right, given, names)

    world.run(body)


@requirement(
    "DYN-DIM-03",
    "Each tensor of a functional collective of a list has its own result, compiled or not.",
    source=f"{SOURCE}: all_reduce_coalesced, all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced",
)
@requirement(
    "DYN-DIM-04",
    "Each tensor of a functional collective of a list has its own gradient, compiled or not.",
    source=f"{SOURCE}: all_reduce_coalesced, all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, collectives of lists have no gradients")
@pytest.mark.world(2)
def test_lists(world: World) -> None:
    """Lists have two tensors of one shape and one of another, and one list has a single tensor."""

    def body(rank: Rank) -> None:
        size, group = rank.size, dist.group.WORLD
        dims = [0, 1, 1]

        def move(xs: Tensors) -> Tensors:
            return [
                *functional.all_reduce_coalesced(xs[:3], "sum", group),
                *functional.all_gather_into_tensor_coalesced(xs[3:6], group),
                *functional.reduce_scatter_tensor_coalesced(xs[6:9], "sum", list(dims), group),
                *functional.all_gather_into_tensor_coalesced(xs[9:], group),
            ]

        def right(index: int, everyone: list[Tensors]) -> Tensors:
            columns = [list(each) for each in zip(*everyone, strict=True)]
            sums = [torch.stack(xs).sum(0) for xs in columns[:3] + columns[6:9]]
            return [
                *sums[:3],
                *(torch.cat(xs) for xs in columns[3:6]),
                *(each.chunk(size, dim)[index] for each, dim in zip(sums[3:], dims, strict=True)),
                torch.cat(columns[9]),
            ]

        def given(index: int, call: int) -> Tensors:
            shapes = [*[(2, 3), (2, 3), (4,)] * 2, (size, 2 * size), (size, 2 * size), (3, size), (2, 2)]
            return [dyadic(*s, key=("x", index, k, call), dtype=torch.float32) for k, s in enumerate(shapes)]

        names = [f"{what} of tensor {k}" for what in ("sum", "gather", "scatter") for k in range(3)]
        assert_as_on_one_device(rank, move, right, given, [*names, "gather of one tensor"])

    world.run(body)


EXCHANGES: dict[str, Callable[[int, int], int]] = {
    "more to later ranks": lambda i, j: 1 + j,
    "more from later ranks": lambda i, j: 1 + 2 * i,
    "both": lambda i, j: 1 + i + 3 * j,
}
"""How many rows rank i sends to rank j."""


@requirement(
    "DYN-DIM-05",
    "The gradient of an uneven functional exchange comes back in the sizes that were sent, compiled or not.",
    source=f"{SOURCE}: all_to_all_single, all_to_all_single_autograd",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, only all_to_all_single_autograd has a gradient")
@pytest.mark.world(3)
def test_exchanges(world: World) -> None:
    """Ranks send and receive different numbers of rows by both functions, in one graph."""

    def body(rank: Rank) -> None:
        size, group = rank.size, dist.group.WORLD
        rows = list(EXCHANGES.values())
        sent = [[f(rank.index, j) for j in range(size)] for f in rows]
        received = [[f(j, rank.index) for j in range(size)] for f in rows]

        def move(xs: Tensors) -> Tensors:
            calls = (functional.all_to_all_single, functional.all_to_all_single_autograd)
            return [calls[k % 2](xs[k] * 2, received[k], sent[k], group) for k in range(len(rows))]

        def right(index: int, everyone: list[Tensors]) -> Tensors:
            return [
                torch.cat([everyone[i][k].split([f(i, j) for j in range(size)])[index] * 2 for i in range(size)])
                for k, f in enumerate(rows)
            ]

        def given(index: int, call: int) -> Tensors:
            return [
                dyadic(sum(f(index, j) for j in range(size)), 2, key=("x", index, k, call), dtype=torch.float32)
                for k, f in enumerate(rows)
            ]

        assert_as_on_one_device(rank, move, right, given, list(EXCHANGES))

    world.run(body)


REDUCTIONS: dict[str, Callable[[torch.Tensor, str, Any], torch.Tensor]] = {
    "all_reduce": lambda x, op, g: functional.all_reduce(x, op, g),
    "all_reduce_coalesced": lambda x, op, g: functional.all_reduce_coalesced([x], op, g)[0],
    "reduce_scatter_tensor": lambda x, op, g: functional.reduce_scatter_tensor(x, op, 0, g),
    "reduce_scatter_tensor_coalesced": lambda x, op, g: functional.reduce_scatter_tensor_coalesced([x], op, [0], g)[0],
}


@requirement(
    "DYN-DIM-06",
    "A functional reduction by another operation than the sum has no gradient, and says so, compiled or not.",
    source=f"{SOURCE}: all_reduce, reduce_scatter_tensor: only the sum has a gradient",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, not all of these reductions have gradients")
@pytest.mark.skipif(runs_with(">=2.15"), reason="since 2.15, the maximum and the minimum have gradients as well")
@pytest.mark.world(2)
def test_operations_without_gradients(world: World) -> None:
    """Each reduction takes the maximum, and an all-reduce each other operation."""

    def body(rank: Rank) -> None:
        for name, op in [*((name, "max") for name in REDUCTIONS), ("all_reduce", "min"), ("all_reduce", "product")]:

            def reduce(x: torch.Tensor, call: Any = REDUCTIONS[name], op: str = op) -> torch.Tensor:
                result: torch.Tensor = call(x, op, dist.group.WORLD) * 3
                return result

            for function in (reduce, dynamo.compiled(reduce)[0]):
                x = torch.full((2,), 1.0 + rank.index, device=rank.device, requires_grad=True)
                with pytest.raises(Exception, match="only supports 'sum'"):
                    function(x).sum().backward()
                assert x.grad is None, f"{name} by {op}"

    world.run(body)
