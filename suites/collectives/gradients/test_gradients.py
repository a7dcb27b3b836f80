"""Gradients through collectives: the transposed collective of the gradients.

Output i of member r is weighted with (i + 1) 10^r, so that a gradient's digits show whose outputs it comes from.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import Case, inputs, outputs
from harness.stacks.collectives import claimed_cases, functional, reduction
from suites.collectives.cases import OPS, dtypes_of, here

GROUPS = pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
MODULE = ("broadcast", "gather", "scatter", "reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_single")
FUNCTIONAL = (
    "broadcast",
    "all_reduce-sum",
    "all_reduce-avg",
    "all_reduce_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "permute_tensor",
    "all_gather_single_autograd",
    "reduce_scatter_single_autograd",
)
NEW = [name for name in FUNCTIONAL if "_single_" in name]
"""Names that older versions of torch lack."""
EXCHANGES = ["module", "all_to_all_single", pytest.param("all_to_all_single_autograd", id="functional")]
EXTREMES = pytest.mark.needs(torch=f"{functional.__name__}.wait_tensors")
"""What came to PyTorch together with gradients of maxima and minima."""
AVERAGES = pytest.mark.needs(op="AVG")
IN_PARTS = (
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
)
"""Collectives whose input has a part for each member."""


def expected_gradient(name: str, member: int, size: int) -> list[float]:
    """Return the gradient of two elements, or of two elements per part; the first member is the root."""
    weights = [10.0**i for i in range(size)]
    parts = {
        "broadcast": [sum(weights) if member == 0 else 0],
        "gather": [weights[0] * (member + 1)],
        "scatter": weights if member == 0 else [0] * size,
        "reduce": [weights[0]],
        "reduce_scatter": weights,
        "reduce_scatter_single_autograd": weights,
        "reduce_scatter_single_coalesced": weights,
        "all_gather": [sum(weights) * (member + 1)],
        "all_gather_single_autograd": [sum(weights)],
        "all_gather_single_coalesced": [sum(weights)],
        "all_to_all": [weight * (member + 1) for weight in weights],
        "all_to_all_single": weights,
        "all_reduce": [sum(weights)],
        "all_reduce-sum": [sum(weights)],
        "all_reduce-avg": [sum(weights) / size],
        "all_reduce_coalesced": [sum(weights)],
        "permute_tensor": [weights[(member + 1) % size]],
    }
    return [part for part in parts[name] for _ in range(2)]


def through_module(name: str, x: torch.Tensor, group: Any, root: int, size: int) -> Any:
    """Call a collective of torch.distributed.nn.functional."""
    parts = list(x.chunk(size))
    into = torch.zeros(parts[0].shape, dtype=x.dtype, device=x.device)
    if name in ("broadcast", "gather", "reduce"):
        return getattr(differentiable, name)(x, root, group=group)
    if name == "scatter":
        return differentiable.scatter(parts, root, group)
    if name == "reduce_scatter":
        return differentiable.reduce_scatter(into, parts, group=group)
    if name == "all_to_all":
        return differentiable.all_to_all([torch.zeros_like(into) for _ in parts], parts, group)
    if name == "all_to_all_single":
        return differentiable.all_to_all_single(torch.zeros(x.shape, dtype=x.dtype, device=x.device), x, group=group)
    if name == "all_reduce-avg":
        return differentiable.all_reduce(x, dist.ReduceOp.AVG, group)
    return getattr(differentiable, name)(x, group=group)


def through_functional(name: str, x: torch.Tensor, group: Any, root: int, size: int) -> Any:
    """Call a collective of torch.distributed._functional_collectives."""
    name, _, op = name.partition("-")
    if name == "broadcast":
        return functional.broadcast(x, 0, group)
    if name == "all_reduce":
        return functional.all_reduce(x, op, group)
    if name == "all_reduce_coalesced":
        return functional.all_reduce_coalesced([x], "sum", group)[0]
    if name == "all_gather_single_coalesced":
        return functional.all_gather_single_coalesced([x], group)[0]
    if name == "reduce_scatter_single_coalesced":
        return functional.reduce_scatter_single_coalesced([x], "sum", [0], group)[0]
    if name == "all_gather_single_autograd":
        return functional.all_gather_single_autograd(x, 0, group)
    if name == "reduce_scatter_single_autograd":
        return functional.reduce_scatter_single_autograd(x, "sum", 0, group)
    return functional.permute_tensor(x, [*range(1, size), 0], group)


def assert_gradients(world: World, name: str, ranks: tuple[int, ...], through: Any) -> None:
    """Compare every member's gradient with :func:`expected_gradient`; of the module also without a group."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        for given in (group, None) if through is through_module and size == rank.size else (group,):
            x = torch.arange(2.0 * (size if name in IN_PARTS else 1), device=rank.device).requires_grad_()
            outputs = through(name, x, given, ranks[0], size)
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            sum((out * (i + 1) * 10**member).sum() for i, out in enumerate(outputs)).backward()
            assert x.grad is not None
            right = torch.tensor(expected_gradient(name, member, size), dtype=torch.float32)
            assert_same(right, x.grad, "gradient")

    world.run(body)


@requirement(
    "COLL-GRAD-01",
    "The gradient of a differentiable collective is the transposed collective of the gradients, in subgroups too.",
    source="torch.distributed.nn.functional: broadcast, gather, scatter, reduce, reduce_scatter, all_gather, "
    "all_to_all, all_to_all_single, all_reduce",
)
@GROUPS
@pytest.mark.parametrize("name", [*MODULE, "all_reduce", pytest.param("all_reduce-avg", marks=AVERAGES)])
@pytest.mark.world(3)
def test_differentiable(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """The first member is the root."""
    assert_gradients(world, name, ranks, through_module)


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda whole: whole.sum(0),
    "AVG": lambda whole: whole.mean(0),
    "MAX": lambda whole: whole.amax(0),
    "MIN": lambda whole: whole.amin(0),
    "PRODUCT": lambda whole: whole.prod(0),
}
"""What each operation makes of all ranks' rows, on one device."""
OPERATIONS = [pytest.param(op, marks=pytest.mark.needs(op=op)) for op in REDUCED]


@requirement(
    "COLL-GRAD-16",
    "The gradient of a differentiable reduction is that of the operation that it is given, or is refused.",
    source="torch.distributed.nn.functional: all_reduce, reduce, reduce_scatter: op",
)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.world(3)
def test_gradients_of_operations(world: World, op: str) -> None:
    """Reduce three elements, each of which is another power of two on every rank; the last rank is the root."""

    def body(rank: Rank) -> None:
        last = rank.size - 1
        powers = 2.0 ** torch.arange(rank.size)
        weights = 3 * torch.tensor([2.0, 16.0, 128.0])
        # The loss of rank r counts 2 ** r times.
        losses = {"all_reduce": powers.sum(), "reduce": powers[last], "reduce_scatter": powers}
        for name, factor in losses.items():
            whole = torch.stack(
                [powers.roll(i) * 8**i for i in range(3)], 1
            ).requires_grad_()  # row r is that of rank r
            (REDUCED[op](whole) * weights * factor).sum().backward()
            assert whole.grad is not None

            x = whole[rank.index].detach().to(rank.device).requires_grad_()
            own = weights.to(rank.device) * 2**rank.index
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch 2.13 announces that these functions may go
                if name == "all_reduce":
                    loss = differentiable.all_reduce(x, reduction(op)) * own
                elif name == "reduce":
                    loss = differentiable.reduce(x, last, reduction(op)) * own * (rank.index == last)
                else:
                    parts = list(x.split(1))
                    loss = differentiable.reduce_scatter(x.new_zeros(1), parts, reduction(op)) * own[rank.index]
            try:
                loss.sum().backward()
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            assert x.grad is not None
            assert_same(whole.grad[rank.index], x.grad, f"gradient of {name}")

    world.run(body)


@requirement(
    "COLL-GRAD-15",
    "A differentiable reduction applies the operation that it is given.",
    source="torch.distributed.nn.functional: all_reduce, reduce, reduce_scatter: op",
)
@GROUPS
@pytest.mark.world(3)
def test_operations(world: World, ranks: tuple[int, ...]) -> None:
    """Reduce floats and whole numbers with each operation that is defined for them; the last member is the root."""
    base = [Case(name) for name in ("all_reduce", "reduce", "reduce_scatter")]
    cases = claimed_cases(
        [
            replace(case, op=op, dtype=dtype, shape=(5,), root=len(ranks) - 1)
            for case in base
            for op in OPS
            for dtype in (torch.float32, torch.float64, torch.int64)
            if dtype in dtypes_of(op)
        ]
    )

    def body(rank: Rank) -> None:
        group: Any = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        for call, case in enumerate(cases):
            given = moved(inputs(case, size, member, call), rank.device)
            op = reduction(case.op)
            if case.collective == "all_reduce":
                result = differentiable.all_reduce(given[0], op, group)
            elif case.collective == "reduce":
                result = differentiable.reduce(given[0], ranks[-1], op, group)
            else:
                result = differentiable.reduce_scatter(torch.zeros_like(given[0]), given, op, group)
            for right in outputs(case, size, member, call):  # reduce has a result only on its root
                assert_same(right, result, str(case))

    world.run(body)


@requirement(
    "COLL-GRAD-02",
    "The gradient of a functional collective is the transposed collective of the gradients, in subgroups too.",
    source="torch.distributed._functional_collectives: broadcast, all_reduce, all_reduce_coalesced, "
    "all_gather_single_coalesced, reduce_scatter_single_coalesced, permute_tensor, all_gather_single_autograd, "
    "reduce_scatter_single_autograd; pytorch/pytorch#190007",
)
@GROUPS
@pytest.mark.parametrize("name", [*(n for n in FUNCTIONAL if n not in NEW), *here(n for n in FUNCTIONAL if n in NEW)])
@pytest.mark.world(3)
def test_functional(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """The first member is the root."""
    assert_gradients(world, name, ranks, through_functional)


@requirement(
    "COLL-GRAD-06",
    "The gradient of a functional all_reduce with max or min is split equally among the elements that equal its "
    "result.",
    source="torch.distributed._functional_collectives: all_reduce, all_reduce_coalesced",
)
@EXTREMES
@GROUPS
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_coalesced"])
@pytest.mark.world(3)
def test_extremes(world: World, name: str, op: str, ranks: tuple[int, ...]) -> None:
    """One member has the extreme, or several have it, or it is NaN on one."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        member, size = ranks.index(rank.index), len(ranks)
        columns = [[float(m), -float(m), 5.0, float(m > 0), float("nan") if m == 0 else 1.0] for m in range(size)]
        x = torch.tensor(columns[member], device=rank.device).requires_grad_()
        through = getattr(functional, name)
        output = through(x, op, group) if name == "all_reduce" else through([x], op, group)[0]
        (output * 12 * 10**member).sum().backward()
        whole = 12 * sum(10.0**m for m in range(size))
        right = []
        for column in zip(*columns, strict=True):
            extreme = column[0] if isnan(column[0]) else (max if op == "max" else min)(column)
            held = [value == extreme or (isnan(value) and isnan(extreme)) for value in column]
            right.append(whole / sum(held) if held[member] else 0.0)
        if not output.isnan()[-1]:  # where the backend drops NaN (extremes_of_nan), the others have the extreme
            right[-1] = 0.0 if member == 0 else whole / (size - 1)
        assert x.grad is not None
        assert_same(torch.tensor(right), x.grad, "gradient")

    world.run(body)


@requirement(
    "COLL-GRAD-03",
    "The gradient of an all-to-all with chunks of different sizes returns to the rank that each chunk came from.",
    source="torch.distributed.nn.functional.all_to_all_single; torch.distributed._functional_collectives: "
    "all_to_all_single, all_to_all_single_autograd",
)
@GROUPS
@pytest.mark.parametrize("through", EXCHANGES)
@pytest.mark.world(3)
def test_uneven_exchange(world: World, through: str, ranks: tuple[int, ...]) -> None:
    """Member s sends s + r + 1 rows to member r, then 2 s + r, so that it receives another number than it sends."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        me, size = ranks.index(rank.index), len(ranks)
        for factor, more in ((1, 1), (2, 0)):
            rows = [[factor * sender + receiver + more for receiver in range(size)] for sender in range(size)]
            sent, received = rows[me], [rows[sender][me] for sender in range(size)]
            x = torch.arange(2.0 * sum(sent), device=rank.device).reshape(-1, 2).requires_grad_()
            if through == "module":
                into = x.new_zeros(sum(received), 2)
                output = differentiable.all_to_all_single(into, x, received, sent, group=group)
            else:
                output = getattr(functional, through)(x, received, sent, group)
            weights = torch.cat([_rows(sender, me, received[sender]) for sender in range(size)])
            (output * weights.to(rank.device)).sum().backward()
            assert x.grad is not None
            right = torch.cat([_rows(me, receiver, sent[receiver]) for receiver in range(size)])
            assert_same(right, x.grad, f"gradient, {factor=}")

    world.run(body)


def _rows(sender: int, receiver: int, count: int) -> torch.Tensor:
    """Return weights, float32[count, 2], that encode sender, receiver and element."""
    return torch.arange(2.0 * count).reshape(count, 2) + 100 * sender + 1000 * receiver


@requirement(
    "COLL-GRAD-04",
    "The gradient of a functional collective along any dimension is the transposed collective along that dimension.",
    source="torch.distributed._functional_collectives: all_gather_tensor_autograd, reduce_scatter_tensor_autograd",
)
@requirement(
    "COLL-FUNC-05",
    "A functional collective gathers or scatters along any dimension.",
    source="torch.distributed._functional_collectives.all_gather_tensor, reduce_scatter_tensor",
)
@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.world(1, 2, 3)
def test_along_dimensions(world: World, dimension: int) -> None:
    """Tensors have three dimensions of different size."""

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        shape = [2, 3, 4]
        parts = [torch.arange(24.0, device=rank.device).reshape(shape) + 100 * i for i in range(size)]
        whole = torch.cat(parts, dimension)
        weights = [whole * 2 + 1000 * i for i in range(size)]
        x = parts[me].clone().requires_grad_()
        gathered = functional.all_gather_tensor_autograd(x, dimension, rank.group)
        (gathered * weights[me]).sum().backward()
        assert_same(whole, functional.wait_tensor(gathered.detach()), "gathered")
        plain = functional.wait_tensor(functional.all_gather_tensor(parts[me], dimension, rank.group))
        assert_same(whole, plain, "gathered, plain")
        plain = functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", dimension, rank.group))
        assert_same(parts[me] * size, plain, "scattered, plain")
        assert x.grad is not None
        everyone = sum(weights[1:], weights[0])
        assert_same(everyone.chunk(size, dimension)[me].contiguous(), x.grad, "gradient of the gathering")
        y = (whole * (me + 1)).requires_grad_()
        scattered = functional.reduce_scatter_tensor_autograd(y, "sum", dimension, rank.group)
        (scattered * parts[me]).sum().backward()
        assert_same(parts[me] * sum(range(1, size + 1)), functional.wait_tensor(scattered.detach()), "scattered")
        assert y.grad is not None
        assert_same(whole, y.grad, "gradient of the scattering")

    world.run(body)


@requirement(
    "COLL-GRAD-05",
    "A collective's backward accepts an expanded gradient, such as the gradient of a sum.",
    source="torch.Tensor.sum: its gradient is expanded",
)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all_single"])
@pytest.mark.world(2, 3, keeps="results of forwards, which nothing uses")
def test_expanded(world: World, name: str) -> None:
    """The gradient of every output element is one number per rank, in functional forms."""

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        x = torch.arange(4.0 * size, device=rank.device).reshape(-1, 2).requires_grad_()
        through = {
            "all_reduce": lambda: functional.all_reduce(x, "sum", rank.group),
            "all_gather": lambda: functional.all_gather_tensor_autograd(x, 0, rank.group),
            "reduce_scatter": lambda: functional.reduce_scatter_tensor_autograd(x, "sum", 0, rank.group),
            "all_to_all_single": lambda: functional.all_to_all_single_autograd(x, [2] * size, [2] * size, rank.group),
        }[name]
        output = through()
        output.backward(torch.tensor(10.0**me, device=rank.device).expand(output.shape))
        numbers = torch.tensor([10.0**i for i in range(size)])
        by_part = numbers.repeat_interleave(2)[:, None].expand(-1, 2).contiguous()
        everyone = torch.full_like(by_part, numbers.sum().item())
        right = everyone if name in ("all_reduce", "all_gather") else by_part
        assert x.grad is not None
        assert_same(right, x.grad, "gradient")

    world.run(body)


@requirement(
    "COLL-FUNC-15",
    "A functional all_to_all_single with split sizes returns as many rows as it receives, even for rows without "
    "elements.",
    source="torch.distributed._functional_collectives: all_to_all_single; pytorch/pytorch#84099",
)
@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.world(2, 3)
def test_rows_received(world: World, width: int) -> None:
    """Member s sends s + 1 rows to every rank; rows have no, one or three elements."""

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        given = torch.full((size * (me + 1), width), float(me), device=rank.device)
        received = [sender + 1 for sender in range(size)]
        result = functional.all_to_all_single(given, received, [me + 1] * size, rank.group)
        right = torch.cat([torch.full((rows, width), float(sender)) for sender, rows in enumerate(received)])
        assert_same(right, functional.wait_tensor(result), "received")

    world.run(body)


@requirement(
    "COLL-GRAD-07",
    "The gradient of a functional reduce-scatter with avg is that of an average, or is refused.",
    source="torch.distributed._functional_collectives: reduce_scatter_tensor",
)
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.world(2, 4)
def test_gradient_of_average(world: World) -> None:
    """Each rank weighs its part by its number; gradients are the weights, divided by the number of ranks."""

    def body(rank: Rank) -> list[float] | str:
        x = torch.ones(rank.size, device=rank.device, requires_grad=True)
        try:
            part = functional.wait_tensor(functional.reduce_scatter_tensor(x, "avg", 0, dist.group.WORLD))
            (part * (rank.index + 1)).sum().backward()
        except (NotImplementedError, RuntimeError, ValueError):
            return "refused"
        return "no gradient" if x.grad is None else x.grad.tolist()

    found = world.run(body)
    assert found in (["refused"] * world.size, [[(i + 1) / world.size for i in range(world.size)]] * world.size)
