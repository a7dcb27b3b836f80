"""First and second derivatives through collectives, compared with those of one device that has every rank's tensors.

The collectives are those of the tests of gradients. All numbers are whole and small enough to be exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from harness import Rank, World, assert_same, requirement
from harness.profiles.obeyed import in_force
from harness.stacks.collectives import functional
from suites.collectives.functional.test_functional import of_list
from suites.collectives.gradients.test_gradient_modes import BOTH, WAYS, listed
from suites.collectives.gradients.test_gradients import IN_PARTS

ROOTED = ("broadcast", "gather", "scatter", "reduce")


def alone(name: str, xs: Sequence[torch.Tensor], root: int) -> list[list[torch.Tensor]]:
    """Return what a collective of every rank's tensor gives to each rank, computed on one device."""
    ranks = range(len(xs))
    parts = [x.chunk(len(xs)) for x in xs]
    total = torch.stack(list(xs)).sum(0)
    if name.startswith("all_reduce"):
        return [[total]] * len(xs)
    if name.startswith("reduce_scatter"):
        return [[part] for part in total.chunk(len(xs))]
    if name.startswith("all_gather_single"):
        return [[torch.cat(list(xs))]] * len(xs)
    results: dict[str, Callable[[int], list[torch.Tensor]]] = {
        "broadcast": lambda rank: [xs[root]],
        "gather": lambda rank: [x if rank == root else x * 0 for x in xs],
        "scatter": lambda rank: [parts[root][rank]],
        "reduce": lambda rank: [total],  # only the root's is used
        "all_gather": lambda rank: list(xs),
        "all_to_all": lambda rank: [parts[sender][rank] for sender in ranks],
        "all_to_all_single": lambda rank: [torch.cat([parts[sender][rank] for sender in ranks])],
        "permute_tensor": lambda rank: [xs[rank - 1]],
    }
    return [results[name](rank) for rank in ranks]


def loss(name: str, results: Sequence[torch.Tensor], rank: int, root: int, only: int | None) -> Any:
    """Return a rank's part of the loss, which is cubic in the results, or in one of them."""
    used = list(enumerate(results)) if only is None else [(0, results[only % len(results)])]
    weight = rank + 1 if name != "reduce" or rank == root else 0  # only the root has a result
    return sum((result**3).sum() * (number + weight) for number, result in used)


def derivatives(
    name: str, size: int, root: int, only: Sequence[int | None]
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return every rank's input, and with it the first and the second derivatives, computed on one device."""
    count = 2 * (size if name in IN_PARTS else 1)
    given = [torch.arange(1.0, count + 1) + rank for rank in range(size)]
    xs = [x.clone().requires_grad_() for x in given]
    results = alone(name, xs, root)
    whole: Any = sum(loss(name, results[rank], rank, root, only[rank]) for rank in range(size))
    first = torch.autograd.grad(whole, xs, create_graph=True, materialize_grads=True)
    squares: Any = sum((x**2).sum() * (rank + 1) for rank, x in enumerate(first))
    second = torch.autograd.grad(squares, xs, materialize_grads=True)
    return given, [[x.detach() for x in first], list(second)]


def compare(world: World, way: str, names: Sequence[str], only: Callable[[int, int], int | None]) -> None:
    """Compare both derivatives for each root; ``only(rank, turn)``: the result that is used, None for all."""
    through = WAYS[way][0]

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        for name in names:
            for root in range(size if name in ROOTED else 1):
                for turn in range(size if only(0, 0) is not None else 1):
                    some = [only(i, turn) for i in range(size)]
                    given, (first, second) = derivatives(name, size, root, some)
                    x = given[me].to(rank.device).requires_grad_()
                    results = listed(through(name, x, dist.group.WORLD, root, size))
                    mine = loss(name, results, me, root, some[me])
                    (found,) = torch.autograd.grad(mine, x, create_graph=True)
                    what = f"{name} with root {root}, results {some}"
                    assert_same(first[me], found.detach(), f"{what}: first derivative")
                    ((found**2).sum() * (me + 1)).backward()
                    assert x.grad is not None, f"{what}: second derivative"
                    assert_same(second[me], x.grad, f"{what}: second derivative")

    world.run(body)


@requirement(
    "COLL-GRAD-12",
    "First and second derivatives through a collective are those of one device, whichever rank is its root.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.autograd.grad: "
    "create_graph",
)
@BOTH
@pytest.mark.world(2, 3)
def test_twice(world: World, way: str) -> None:
    """The loss is the sum of the ranks' cubes; the second loss is the sum of squares of the first's gradients."""
    compare(world, way, WAYS[way][1], lambda rank, turn: None)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "among others": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}
"""Copies of matrices whose elements do not lie side by side."""
AS_THEY_ARE = ("gather", "scatter", "all_to_all_single", "permute_tensor")
"""What takes no matrix, or passes tensors on as they are: test_layouts_of_gathered_gradients and COLL-LAYOUT-01 ask."""
WITH_STRIDES = ("broadcast", "reduce")
"""What torch.distributed.nn.functional calls with a clone, which is transposed if the tensor is."""


def matrices(name: str, size: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return every rank's input, results and gradient; result i of rank r weighs (i + 1) 10^r."""
    count = 2 * (size if name in IN_PARTS else 1)
    given = [torch.arange(3.0 * count).reshape(count, 3) + 100 * r for r in range(size)]
    xs = [x.clone().requires_grad_() for x in given]
    results = alone(name, xs, 0)
    whole: Any = sum((out * weights_of(name, out, i, r)).sum() for r in range(size) for i, out in enumerate(results[r]))
    gradients = torch.autograd.grad(whole, xs, materialize_grads=True)
    return given, [[out.detach() for out in each] for each in results], list(gradients)


def weights_of(name: str, out: torch.Tensor, number: int, rank: int) -> torch.Tensor:
    factor = (number + 1) * 10**rank if name != "reduce" or rank == 0 else 0  # only the root has a result
    return torch.arange(1.0, out.numel() + 1).reshape(out.shape) * factor


@requirement(
    "COLL-GRAD-254",
    "A differentiable collective takes tensors of any strides as input, output or gradient, by their elements.",
    source="torch/distributed/nn/functional.py: 'Need contiguous tensors for collectives'; pytorch/pytorch#79747; "
    "pytorch/pytorch#101373; pytorch/pytorch#120386",
)
@BOTH
@pytest.mark.world(2)
def test_layouts(world: World, way: str) -> None:
    """Inputs, what is given for the results, and their gradients are matrices that are contiguous or not, by turns."""
    through, names = WAYS[way]
    dense = way == "module" and in_force().claims.lacks_features("collectives", ["strided"])

    def body(rank: Rank) -> None:
        for name in names:
            if name in AS_THEY_ARE:
                continue
            given, results, gradients = matrices(name, rank.size)
            for which, (layout, lay) in itertools.product(("input", "gradient", "output"), LAYOUTS.items()):
                if (way, name, which, layout) == ("module", "all_gather", "gradient", "transposed"):
                    continue  # test_transposed_gradients
                if dense and name in WITH_STRIDES and layout == "transposed":
                    continue
                x = given[rank.index].to(rank.device, copy=True)
                x = (lay(x) if which == "input" else x).requires_grad_()
                if which == "output":
                    if (way, name) != ("module", "reduce_scatter"):
                        continue
                    into = lay(torch.zeros(2, 3, device=rank.device))
                    found = [differentiable.reduce_scatter(into, list(x.chunk(rank.size)))]
                else:
                    found = listed(through(name, x, dist.group.WORLD, 0, rank.size))
                what = f"{name}, {which} {layout}"
                for number, (one, other) in enumerate(zip(results[rank.index], found, strict=True)):
                    if name != "reduce" or rank.index == 0:
                        assert_same(one, (other.detach() + 0).contiguous(), f"{what}: result {number}")
                mine = [weights_of(name, out, i, rank.index).to(rank.device) for i, out in enumerate(found)]
                torch.autograd.backward(found, [lay(w) for w in mine] if which == "gradient" else mine)
                assert x.grad is not None, what
                assert_same(gradients[rank.index], x.grad.contiguous(), f"{what}: gradient")

    world.run(body)


@requirement(
    "COLL-GRAD-1500",
    "The strides of the inputs of a differentiable collective, and of its gradients, may differ between ranks.",
    source="torch/distributed/nn/functional.py: 'Need contiguous tensors for collectives'; pytorch/pytorch#101373",
)
@BOTH
@pytest.mark.world(2)
def test_layouts_of_one_rank(world: World, way: str) -> None:
    """Each rank in turn gives a matrix, or a gradient, that is not contiguous, and the other a contiguous one."""
    names = WAYS[way][1]
    left_out = (*AS_THEY_ARE, *(WITH_STRIDES if way == "module" else ()))  # test_clones_of_one_rank
    compare_layouts_of_one_rank(world, way, [name for name in names if name not in left_out], LAYOUTS)


@requirement(
    "COLL-GRAD-1500",
    "The strides of the inputs of a differentiable collective, and of its gradients, may differ between ranks.",
    source="torch/distributed/nn/functional.py: 'Need contiguous tensors for collectives'; pytorch/pytorch#101373",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WITH_STRIDES)
@pytest.mark.needs(features=["strided"])
@pytest.mark.world(2)
def test_clones_of_one_rank(world: World, name: str, layout: str) -> None:
    """The same for what torch.distributed.nn.functional calls with a clone."""
    compare_layouts_of_one_rank(world, "module", [name], {layout: LAYOUTS[layout]})


def compare_layouts_of_one_rank(
    world: World, way: str, names: Sequence[str], layouts: dict[str, Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Compare results and gradients where one rank's input, or its gradient, has a layout and the other's has not."""
    through = WAYS[way][0]

    def body(rank: Rank) -> None:
        for name in names:
            given, results, gradients = matrices(name, rank.size)
            for which, who, (layout, lay) in itertools.product(("input", "gradient"), range(2), layouts.items()):
                if (way, name, which, layout) == ("module", "all_gather", "gradient", "transposed"):
                    continue  # test_transposed_gradients
                what = f"{name}, {which} {layout} on rank {who}"
                x = given[rank.index].to(rank.device, copy=True)
                x = (lay(x) if (which, who) == ("input", rank.index) else x).requires_grad_()
                found = listed(through(name, x, dist.group.WORLD, 0, rank.size))
                for number, (one, other) in enumerate(zip(results[rank.index], found, strict=True)):
                    if name != "reduce" or rank.index == 0:
                        assert_same(one, (other.detach() + 0).contiguous(), f"{what}: result {number}")
                mine = [weights_of(name, out, i, rank.index).to(rank.device) for i, out in enumerate(found)]
                laid = [lay(w) if (which, who) == ("gradient", rank.index) else w for w in mine]
                torch.autograd.backward(found, laid)
                assert x.grad is not None, what
                assert_same(gradients[rank.index], x.grad.contiguous(), f"{what}: gradient")

    world.run(body)


@requirement(
    "COLL-GRAD-254",
    "A differentiable collective takes tensors of any strides as input, output or gradient, by their elements.",
    source="torch/distributed/nn/functional.py: 'Need contiguous tensors for collectives'; pytorch/pytorch#79747; "
    "pytorch/pytorch#101373; pytorch/pytorch#120386",
)
@pytest.mark.world(2)
def test_transposed_gradients(world: World) -> None:
    """The gradients of what the ranks have gathered are transposed matrices."""

    def body(rank: Rank) -> None:
        x = torch.zeros(2, 3, device=rank.device).requires_grad_()
        parts = list(differentiable.all_gather(x))
        torch.autograd.backward(parts, [(torch.arange(6.0) + 10 * i).reshape(3, 2).to(rank.device).t() for i in (0, 1)])
        assert x.grad is not None
        right = (torch.arange(6.0) + 10 * rank.index).reshape(3, 2).t().contiguous() * rank.size
        assert_same(right, x.grad.contiguous(), "gradient of the gathered")

    world.run(body)


@requirement(
    "COLL-GRAD-13",
    "A loss may use some of a collective's results, and another selection of them on each rank.",
    source="torch.distributed.nn.functional: all_gather, gather, all_to_all; "
    "torch.distributed._functional_collectives: all_reduce_coalesced; torch.autograd.Function: undefined gradients "
    "are zeros",
)
@pytest.mark.world(3)
def test_results_left_out(world: World) -> None:
    """Each rank uses one result, the same on all ranks or not."""
    compare(world, "module", ["all_gather", "gather", "all_to_all"], lambda rank, turn: turn)
    compare(world, "module", ["all_gather", "gather", "all_to_all"], lambda rank, turn: rank * 2 + turn)


@requirement(
    "COLL-GRAD-13",
    "A loss may use some of a collective's results, and another selection of them on each rank.",
    source="torch.distributed.nn.functional: all_gather, gather, all_to_all; "
    "torch.distributed._functional_collectives: all_reduce_coalesced; torch.autograd.Function: undefined gradients "
    "are zeros",
)
@pytest.mark.world(2, keeps="results that are left out")
def test_results_of_lists_left_out(world: World) -> None:
    """The lists have two tensors, of which one is used by each rank, or by both."""
    names = ("all_reduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced")

    def body(rank: Rank) -> None:
        group: Any = dist.group.WORLD
        for name in names:
            if not hasattr(functional, name):
                continue
            for used in ((0, 0), (1, 1), (0, 1), (1, 0)):
                pair = [torch.arange(1.0, 5).to(rank.device).requires_grad_() for _ in range(2)]
                results = of_list(name, list(pair), "sum", group)
                (results[used[rank.index]] * 10**rank.index).sum().backward()
                for number, x in enumerate(pair):
                    weights = [10.0**i if used[i] == number else 0.0 for i in range(2)]
                    right = [weights[0]] * 2 + [weights[1]] * 2 if "scatter" in name else [sum(weights)] * 4
                    found = torch.zeros(4) if x.grad is None else x.grad
                    assert_same(torch.tensor(right), found, f"{name}, used {used}, tensor {number}")

    world.run(body)
