"""When collectives record a gradient: with and without grad mode, for parameters and data, twice, and in low precision.

The collectives are those of the tests of gradients. The first member is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from harness import Rank, World, assert_same, requirement
from harness.stacks.collectives import functional, unwaited
from harness.stacks.training import launched, since
from suites.collectives.gradients.test_gradients import (
    FUNCTIONAL,
    IN_PARTS,
    MODULE,
    expected_gradient,
    through_functional,
    through_module,
)

WAYS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "module": (through_module, [*MODULE, "all_reduce"]),
    # COLL-GRAD-02 is about the gradients of the two that are left out
    "functional": (
        through_functional,
        [
            name
            for name in FUNCTIONAL
            if name not in ("broadcast", "all_reduce-avg") and hasattr(functional, name.partition("-")[0])
        ],
    ),
}
BOTH = pytest.mark.parametrize("way", WAYS)


def listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def each(world: World, way: str, body: Callable[[str, Rank, Callable[..., list[torch.Tensor]]], None]) -> None:
    """Run ``body(name, rank, call)`` for each collective; ``call(x)`` issues it on the world."""
    through, names = WAYS[way]

    def run(rank: Rank) -> None:
        for name in names:

            def call(x: torch.Tensor, name: str = name) -> list[torch.Tensor]:
                return listed(through(name, x, dist.group.WORLD, 0, rank.size))

            body(name, rank, call)
        assert unwaited() == 0

    world.run(run)


def data(name: str, rank: Rank, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the input of a collective, two elements for each part, from 0 on."""
    return torch.arange(2 * (rank.size if name in IN_PARTS else 1), dtype=dtype, device=rank.device)


@requirement(
    "COLL-GRAD-08",
    "A collective records no gradient without grad mode, nor for inputs that require none.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.no_grad",
)
@BOTH
@pytest.mark.world(2)
def test_without_gradients(world: World, way: str) -> None:
    """Results have the values of those with a gradient, and require none."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        x = data(name, rank)
        recorded = [result.detach().clone() for result in call(x.clone().requires_grad_())]
        with torch.no_grad():
            plain = call(x.clone().requires_grad_())
        for what, results in (("no_grad", plain), ("detached", call(x.clone().requires_grad_().detach()))):
            assert len(results) == len(recorded)
            for right, result in zip(recorded, results, strict=True):
                assert_same(right.cpu(), result + 0, f"{name}, {what}")
                if what == "no_grad" or way == "functional":  # those of the module have a graph in any case
                    assert not (result + 0).requires_grad, f"{name}, {what}"

    each(world, way, body)


@requirement(
    "COLL-GRAD-09",
    "Gradients through a collective are added to those that are there, with each backward.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.Tensor.backward",
)
@requirement(
    "COLL-GRAD-10",
    "The backward of a collective issues as many collectives each time, and its input stays as it is.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives",
)
@BOTH
@pytest.mark.world(2)
def test_several_backwards(world: World, way: str) -> None:
    """Two forwards with a backward each, and one forward whose graph is used twice."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        x = data(name, rank).requires_grad_()
        before = x.detach().clone()
        right = torch.tensor(expected_gradient(name, rank.index, rank.size), dtype=torch.float32)

        def loss() -> torch.Tensor:
            results = call(x)
            total: Any = sum((out * (i + 1) * 10**rank.index).sum() for i, out in enumerate(results))
            return total

        issued = []
        kept = loss()
        for times in range(1, 5):
            here = loss() if times < 3 else kept
            already = launched()
            here.backward(retain_graph=times == 3)
            issued.append(sum(since(already).values()))
            assert x.grad is not None
            assert_same(right * times, x.grad, f"{name}, after {times} backwards")
        assert len(set(issued)) == 1, f"{name}: collectives of backwards {issued}"
        assert_same(before.cpu(), x.detach(), f"{name}: input")

    each(world, way, body)


@requirement(
    "COLL-GRAD-11",
    "The gradient of a collective has the dtype, shape and device of its input.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives",
)
@BOTH
@pytest.mark.world(2)
def test_kinds_of_gradients(world: World, way: str) -> None:
    """Inputs of double and half the precision; the input is no leaf, and what comes before it gets its gradient."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        for dtype in (torch.float64, torch.bfloat16):
            x = data(name, rank, dtype).requires_grad_()
            results = call(x * 2)
            assert {result.dtype for result in results} == {dtype}, name
            total: Any = sum((out * (i + 1) * 4**rank.index).sum() for i, out in enumerate(results))
            total.backward()
            assert x.grad is not None
            assert (x.grad.dtype, x.grad.shape, x.grad.device) == (dtype, x.shape, x.device), name
            right = [2 * _to_base_four(value) for value in expected_gradient(name, rank.index, rank.size)]
            assert_same(torch.tensor(right, dtype=dtype), x.grad, f"{name}, {dtype}")

    each(world, way, body)


@requirement(
    "COLL-GRAD-05",
    "A collective's backward accepts an expanded gradient, such as the gradient of a sum.",
    source="torch.Tensor.sum: its gradient is expanded",
)
@requirement(
    "COLL-GRAD-14",
    "A collective's backward accepts a gradient with any strides, whose elements have the effect of contiguous ones.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.autograd.backward",
)
@BOTH
@pytest.mark.world(2, 3)
def test_layouts_of_gradients(world: World, way: str) -> None:
    """Give one number for all elements of a result, and different ones that do not lie side by side."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        if name == "gather":
            return  # test_layouts_of_gathered_gradients is about it
        pairs = torch.tensor([1.0, 3.0], device=rank.device)
        for layout in ("expanded", "stepped"):
            x = data(name, rank).requires_grad_()
            results, gradients = call(x), []
            for i, out in enumerate(results):
                weight = (i + 1) * torch.tensor(10.0**rank.index, device=rank.device)
                laid = weight.expand(out.shape)
                if layout != "expanded":  # the second element of each pair weighs three times as much
                    laid = (weight * pairs).repeat(len(out) // 2).repeat_interleave(3)[::3]
                gradients.append(laid)
            torch.autograd.backward(results, gradients)
            for out in results:
                functional.wait_tensor(out.detach())  # nothing else reads it
            right = torch.tensor(expected_gradient(name, rank.index, rank.size), dtype=torch.float32)
            right = right if layout == "expanded" else right * pairs.cpu().repeat(len(right) // 2)
            assert x.grad is not None
            assert_same(right, x.grad, f"{name}, {layout}")

    each(world, way, body)


@requirement(
    "COLL-GRAD-05",
    "A collective's backward accepts an expanded gradient, such as the gradient of a sum.",
    source="torch.Tensor.sum: its gradient is expanded",
)
@requirement(
    "COLL-GRAD-14",
    "A collective's backward accepts a gradient with any strides, whose elements have the effect of contiguous ones.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.autograd.backward",
)
@pytest.mark.parametrize("layout", ["expanded", "stepped"])
@pytest.mark.world(2)
def test_layouts_of_gathered_gradients(world: World, layout: str) -> None:
    """The root gives all elements of a part one number, or numbers that do not lie side by side."""

    def body(rank: Rank) -> None:
        x = torch.zeros(4, device=rank.device).requires_grad_()
        parts: Any = differentiable.gather(x, 0)
        gradients = [
            torch.tensor(i + 1.0, device=rank.device).expand(4)
            if layout == "expanded"
            else (torch.arange(12.0, device=rank.device) + i)[::3]
            for i in range(rank.size)
        ]
        torch.autograd.backward(list(parts), gradients)
        right = torch.full((4,), rank.index + 1.0) if layout == "expanded" else torch.arange(12.0)[::3] + rank.index
        assert x.grad is not None
        assert_same(right.contiguous(), x.grad, "gradient")

    world.run(body)


def _to_base_four(value: float) -> float:
    """Read the digits of a gradient of two ranks, whose weights are powers of ten, as those of powers of four."""
    doubled = round(value * 2)  # an average has halves
    return (doubled // 10 * 4 + doubled % 10) / 2


WAITED: dict[str, Callable[[Any], torch.Tensor]] = {
    "wait": lambda t: t.wait(),
    "wait_tensor": lambda t: functional.wait_tensor(t),  # type: ignore[no-untyped-call,no-any-return]
    "used": lambda t: t * 1,
}
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "result": lambda t: t,
    "view": lambda t: t.view(-1).view(t.shape),
    "transposed": lambda t: t.t().t(),
}


@requirement(
    "COLL-GRAD-6901",
    "Gradients pass through a functional collective's result and its views, however they are waited for.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor; all_gather_tensor_autograd",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", WAITED)
@pytest.mark.world(2)
def test_waited_for(world: World, how: str, form: str) -> None:
    """Wait for pending results that have gradients, or for views of them, and go backward."""

    def body(rank: Rank) -> None:
        calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "all_gather": lambda x: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD),  # type: ignore[no-untyped-call]
            "reduce_scatter": lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD),  # type: ignore[no-untyped-call]
        }
        for name, call in calls.items():
            x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=rank.device, requires_grad=True)
            result = WAITED[how](FORMS[form](call(x)))
            assert result.requires_grad, f"{name}: the {form} has lost its gradient"
            result.backward(torch.ones_like(result))  # not expanded: COLL-GRAD-05
            assert x.grad is not None
            assert x.grad.tolist() == [[2.0, 2.0]] * 2 if name == "all_gather" else [[1.0, 1.0]] * 2, name

    world.run(body)
