"""Shapes, data, fills and dtypes of tensors in compiled code with collectives: they are those of uncompiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import attention

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.objects import known, summed, unlike


def _shapes(x: torch.Tensor) -> Any:
    y = summed(x)
    shapes = [y.shape + (1,), (2,) + y.shape, y.shape * 2, y.shape[:1], y.view(1, -1).size(), torch.Size([3, *y.shape])]
    return y, [(type(shape).__name__, tuple(shape)) for shape in shapes], (y.shape + (3,)).numel()


def _sized(x: torch.Tensor) -> Any:
    """Make tensors of a size in each way that takes a size, and of numbers in the ways that take these."""
    y = summed(x)
    size = torch.Size([3, 1])
    made = [y.new(y.shape), y.new(size), y.new(3, 1), y.new_empty(size), y.new_empty(3, 1), y.new_zeros(y.shape)]
    made += [y.new_ones((3, 1)), y.new_full(size, 2.0), torch.empty(size), torch.zeros(3, 1), torch.ones([3, 1])]
    made += [torch.full(y.shape, 2.0), torch.rand(size), y[:1].expand(size), y[:1].repeat(size), y.view(y.shape)]
    of_numbers = [y.new([3.0, 1.0]), y.new_tensor([3.0, 1.0]), torch.tensor(y.shape), torch.as_tensor([3, 1])]
    return y, [(tuple(each.shape), str(each.dtype)) for each in (*made, *of_numbers)], of_numbers


def _filled(x: torch.Tensor) -> Any:
    y = summed(x)
    return torch.full((3,), y.sum()), torch.full((2, 1), 2.5), torch.full_like(y, 7), y.new_full((2,), 3)


def _replaced(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> Any:
    w.data = w.data.to(dtype)
    return summed(x), w.dtype, w * 2, w.element_size()


@requirement(
    "DYN-TENSOR-2500",
    "In compiled code, shapes, their sums or their parts are of the class that they have in uncompiled code.",
    source="torch.Size; torch.compile: the compiled function does what the function does",
)
@requirement(
    "DYN-TENSOR-2501",
    "In compiled code, torch.full and its relatives fill with numbers or with tensors as in uncompiled code.",
    source="torch.full: fill_value; torch.compile",
)
@requirement(
    "DYN-TENSOR-2502",
    "In compiled code, a tensor whose data is replaced has the dtype of the new data.",
    source="torch.Tensor.data; torch.compile: the compiled function does what the function does",
)
@requirement(
    "DYN-TENSOR-3350",
    "In compiled code, what is made of a torch.Size has this size, in each way to make a tensor.",
    source="torch.Size; torch.Tensor.new_empty; torch.compile: the compiled function does what the function does",
)
@pytest.mark.world(2)
def test_tensors(world: World) -> None:
    """Add to shapes, make tensors of them, fill with the sum of a sum over ranks, and replace data by other dtypes."""

    def body(rank: Rank) -> list[str]:
        cases = {"shapes": (_shapes, ()), "sized": (_sized, ()), "filled": (_filled, ())}
        wrong = unlike(rank, cases, fullgraph=True)
        for dtype in torch.float32, torch.float64, torch.bfloat16:
            x, found = torch.ones(2, device=rank.device), []
            for call in _replaced, dynamo.compiled(_replaced, backend="eager", fullgraph=False)[0]:
                w = nn.Parameter(torch.ones(3, device=rank.device))
                found.append((known(call(x, w, dtype)), w.dtype))
            if found[0] != found[1]:
                wrong.append(f"replaced by {dtype}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "quotient": lambda a, b: a / b,
    "floor": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "power": lambda a, b: a**b,
    "difference": lambda a, b: a - b,
    "comparison": lambda a, b: a < b,
    "divided downwards": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "mean": lambda a, b: (a * b).double().mean(),
    "maximum": lambda a, b: torch.maximum(a, b),
    "where": lambda a, b: torch.where(a > b, a, b),
}
"""Operators of two tensors."""


@requirement(
    "DYN-TENSOR-2503",
    "In code that is compiled for all sizes, results of operators have the dtypes that they have in uncompiled code.",
    source="torch: Type promotion; torch.compile: dynamic",
)
@requirement(
    "DYN-TENSOR-2504",
    "In code that is compiled for all sizes, results whose size depends on data have the strides of uncompiled ones.",
    source="torch.nonzero; torch.compile: dynamic; torch.Tensor.stride",
)
@pytest.mark.world(2)
def test_for_all_sizes(world: World) -> None:
    """Combine whole numbers with whole numbers and floats of two sizes, and ask strides of what depends on data."""

    def body(rank: Rank) -> None:
        def told(a: torch.Tensor, b: torch.Tensor) -> Any:
            a = summed(a)
            found = [function(a, b) for function in BINARY.values()]
            return found, [(str(y.dtype), y.is_floating_point()) for y in found]

        def placed(a: torch.Tensor) -> Any:
            places = (summed(a).view(1, -1) > 3).nonzero()
            return places, places.stride(0), places.t().stride(1)

        for dtypes in ((torch.int64, torch.int64), (torch.int32, torch.int64), (torch.int64, torch.float32)):
            compiled, _ = dynamo.compiled(told, dynamic=True)
            for size in 3, 5:
                a, b = (torch.arange(k, size + k, device=rank.device).to(t) for k, t in enumerate(dtypes, start=1))
                right, found = told(a, b), compiled(a, b)
                for name, one, other in zip(BINARY, right[0], found[0], strict=True):
                    assert known(other) == known(one), (name, dtypes, size)
                assert found[1] == right[1], (dtypes, size)
        with dynamo.data_in_graphs():
            compiled, _ = dynamo.compiled(placed, dynamic=True)
            for size in 4, 6:
                a = torch.arange(size, device=rank.device)
                right, found = placed(a), compiled(a)
                assert (known(found[0]), *found[1:]) == (known(right[0]), *right[1:])
                assert found[0].stride() == right[0].stride()

    world.run(body)


@requirement(
    "DYN-TENSOR-2505",
    "Attention in compiled code uses the backends that sdpa_kernel names, in the order that it is told to keep.",
    source="torch.nn.attention.sdpa_kernel: set_priority",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="the order of backends is read as of 2.12")
@pytest.mark.parametrize(
    ("priority", "whole"),
    [(False, False), (True, True), (True, False)],
    ids=["any order", "in order, one graph", "in order"],
)
@pytest.mark.world(2)
def test_attention(world: World, priority: bool, whole: bool) -> None:
    """Give two backends in both orders, around a graph break or in one graph, and a sum over ranks."""

    def body(rank: Rank) -> None:
        x = torch.ones(1, 1, 2, 4, device=rank.device)
        backends = [attention.SDPBackend.MATH, attention.SDPBackend.FLASH_ATTENTION]
        for order in backends, backends[::-1]:
            seen: list[Any] = []

            def look(x: torch.Tensor, seen: Any = seen) -> torch.Tensor:
                seen.append(dynamo.attention_backends())
                return x + 0

            look = torch.compiler.allow_in_graph(look) if whole else torch.compiler.disable(look)

            def attended(x: torch.Tensor, look: Any = look, order: Any = order) -> torch.Tensor:
                with attention.sdpa_kernel(order, set_priority=priority):
                    x = look(x)
                    return nn.functional.scaled_dot_product_attention(x, x, summed(x))

            attended(x)
            dynamo.compiled(attended, backend="eager", fullgraph=whole)[0](x)
            assert seen[0] == seen[-1]

    world.run(body)


class Left(torch.Tensor):
    """A tensor whose class answers for the functions that are asked for, with a number."""

    number = 1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.add, torch.stack, torch.where, torch.mul):
            return torch.tensor(cls.number)
        return super().__torch_function__(func, types, args, kwargs or {})


class Right(Left):
    """A class that is no relative of others, but of the first."""

    number = 2.0


class Other(torch.Tensor):
    """A class that is no relative of the first."""

    number = 4.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.add, torch.stack, torch.where, torch.mul):
            return torch.tensor(cls.number)
        return super().__torch_function__(func, types, args, kwargs or {})


ASKED: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "positions": lambda a, b: torch.add(a, b),
    "by name": lambda a, b: torch.add(a, other=b),
    "in a list": lambda a, b: torch.stack([a, b]),
    "last two of three": lambda a, b: torch.where(torch.ones(2) > 0, a, b),
    "beside a number": lambda a, b: torch.mul(a, 2) + torch.mul(3, b) * 8,
    "beside a tensor": lambda a, b: torch.mul(torch.ones(2), a) + torch.mul(b, torch.ones(2)) * 8,
}
"""Calls with two tensors of subclasses."""


@requirement(
    "DYN-TENSOR-3351",
    "Of several tensor subclasses among the arguments of a call, compiled code asks the same one first as uncompiled "
    "code.",
    source="torch: Extending torch, 'subclasses before superclasses, and left to right otherwise'; torch.compile",
)
@pytest.mark.world(2)
def test_subclasses(world: World) -> None:
    """Give tensors of two classes, of which some are relatives, and scale a sum over ranks by what is answered."""

    def body(rank: Rank) -> list[str]:
        def asked(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
            return [summed(x) * call(a, b).clone() for call in ASKED.values()]

        classes: list[type[torch.Tensor]] = [Left, Right, Other]
        given = [torch.ones(2, device=rank.device).as_subclass(kind) for kind in classes]
        pairs = [(given[first], given[second]) for first, second in ((0, 1), (0, 2), (2, 1))]
        cases = {f"{type(a).__name__}, {type(b).__name__}": (asked, (a, b)) for a, b in pairs}
        return unlike(rank, cases)

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
