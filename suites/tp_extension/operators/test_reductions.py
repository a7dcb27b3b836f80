"""Reductions, scans and sorts of DTensors: every form, over dimensions that are sharded evenly, unevenly or not.

Everything is computed in float64 on integers that differ, so that each extreme has one position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.operators import close, right
from fixtures.placements import MORE_OPERATORS, laid_out
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"

Reduction = Callable[..., Any]
Dims = int | tuple[int, ...] | None
Layout = tuple[Placement, ...]

ONE_DIM: tuple[Dims, ...] = (0, 1, -1, -2)
ALL: tuple[Dims, ...] = (None, *ONE_DIM)
SEVERAL: tuple[Dims, ...] = (None, 0, 1, -2, (-1,), (0, 1))


def _named(name: str) -> Reduction:
    """Return the method of a name as a function of a tensor, the dimensions (None for all) and ``keepdim``."""

    def reduce(x: Any, dim: Dims, keepdim: bool, **options: Any) -> Any:
        method = getattr(x, name)
        return method(**options) if dim is None else method(dim, keepdim=keepdim, **options)

    return reduce


def _norm(order: float) -> Reduction:
    return lambda x, dim, keepdim: torch.linalg.vector_norm(x, order, dim, keepdim)


METHODS = {name: _named(name) for name in ("sum", "mean", "prod", "var", "std", "amax", "amin", "max", "min", "median")}
ACCUMULATED: dict[str, Reduction] = {
    "cumsum": lambda x, dim, keepdim: x.cumsum(dim),
    "cumprod": lambda x, dim, keepdim: (x % 3).cumprod(dim),
    "logcumsumexp": lambda x, dim, keepdim: x.logcumsumexp(dim),
}
FAMILIES: dict[str, tuple[Sequence[Dims], Mapping[str, Reduction]]] = {
    "sums": (SEVERAL, {name: _named(name) for name in ("sum", "mean", "nansum")}),
    "products": (ALL, {"prod": METHODS["prod"]}),
    "spread": (
        SEVERAL,
        {
            "var": METHODS["var"],
            "std": METHODS["std"],
            "of the population": lambda x, dim, keepdim: x.var(dim, correction=0, keepdim=keepdim),
            "var_mean": lambda x, dim, keepdim: torch.var_mean(x, dim, keepdim=keepdim),
            "std_mean": lambda x, dim, keepdim: torch.std_mean(x, dim, correction=2, keepdim=keepdim),
        },
    ),
    "norms": (SEVERAL, {f"norm {order}": _norm(order) for order in (0, 0.5, 1, 2, 3)}),
    "extremes": (
        SEVERAL,
        {
            **{name: METHODS[name] for name in ("amax", "amin")},
            **{f"norm {order}": _norm(order) for order in (torch.inf, -torch.inf, -1)},
        },
    ),
    "positions": (
        (None, 0, 1, -1),  # before 2.15, PyTorch refuses argmax over -2 where that dimension is sharded
        {
            "max": METHODS["max"],
            "min": METHODS["min"],
            "argmax": lambda x, dim, keepdim: x.argmax(dim, keepdim=keepdim),
            "argmin": lambda x, dim, keepdim: x.argmin(dim, keepdim=keepdim),
        },
    ),
    "truth": (
        SEVERAL,
        {
            "any": lambda x, dim, keepdim: _named("any")(x < 4, dim, keepdim),  # some are in each array
            "all": lambda x, dim, keepdim: _named("all")(x > 3, dim, keepdim),
            "count": lambda x, dim, keepdim: (x > 5).count_nonzero(dim),
        },
    ),
    "logsumexp": ((0, 1, -1, (0, 1)), {"logsumexp": lambda x, dim, keepdim: x.logsumexp(dim)}),
    "logsumexp-kept": ((0, 1, -1, (0, 1)), {"kept logsumexp": lambda x, dim, keepdim: x.logsumexp(dim, keepdim=True)}),
    "orders": (
        ONE_DIM,
        {
            "median": METHODS["median"],
            "kthvalue": lambda x, dim, keepdim: x.kthvalue(2, dim, keepdim=keepdim),
            "sort": lambda x, dim, descending: x.sort(dim, descending=descending),
            "topk": lambda x, dim, largest: x.topk(2, dim, largest=largest),
            "argsort": lambda x, dim, descending: x.argsort(dim, descending=descending),
        },
    ),
    "scans": (
        (0, 1),
        {
            **ACCUMULATED,
            "cummax": lambda x, dim, keepdim: x.cummax(dim),
            "cummin": lambda x, dim, keepdim: x.cummin(dim),
            "softmax": lambda x, dim, keepdim: x.softmax(dim),
            "log_softmax": lambda x, dim, keepdim: x.log_softmax(dim),
        },
    ),
    "scans-from-the-end": ((-1, -2), {f"{name} from the end": scan for name, scan in ACCUMULATED.items()}),
    "from-the-end": (
        (-1, -2),
        {
            "cummax": lambda x, dim, keepdim: x.cummax(dim),
            "softmax": lambda x, dim, keepdim: x.softmax(dim),
            "log_softmax": lambda x, dim, keepdim: x.log_softmax(dim),
        },
    ),
}
"""Functions by family, each of a tensor, dimensions and a flag, with the dimensions that are tried."""

SELECTING = ("extremes", "positions", "orders")
"""Families that have no result for a rank without elements."""


def _whole(*shape: int) -> torch.Tensor:
    """Return numbers from 1 that all differ, in no order that follows a dimension."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 11) % (count + 1 if (count + 1) % 11 else count + 2)).double().reshape(shape) + 1


def _laid_out(whole: torch.Tensor, rank: Rank, mesh: Any, placements: Layout) -> DTensor:
    """Distribute a tensor; the first rank's partial values differ from the others'."""
    if not any(placement.is_partial() for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    (first, *_) = (i for i, placement in enumerate(placements) if placement.is_partial())
    others = mesh.size(first) - 1
    part = whole - others if mesh.get_local_rank(first) == 0 else torch.ones_like(whole)
    local = laid_out(part, mesh, placements).contiguous()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def _checked(
    rank: Rank, mesh: Any, family: str, layouts: Mapping[Layout, Sequence[tuple[int, int]]], every: int = 1
) -> tuple[list[str], list[str]]:
    """Return the wrong cases and the refused ones; flags take turns with shapes.

    With ``every`` at 4, each fourth of the dimensions is tried, beginning with another for each function and layout.
    """
    wrong, refused = [], []
    dims, functions = FAMILIES[family]
    for h, (placements, shapes) in enumerate(layouts.items()):
        for i, shape in enumerate(shapes):
            whole = _whole(*shape).to(rank.device)
            given = _laid_out(whole, rank, mesh, placements)
            before = given.to_local().clone()
            for (j, (name, function)), (k, dim) in itertools.product(enumerate(functions.items()), enumerate(dims)):
                if (h + i + j + k) % every:
                    continue
                flag = (i + j + k) % 2 == 1
                case = f"{name} of {shape} {', '.join(map(str, placements))} over {dim}, {flag}"
                expected = _parts(function(whole, dim, flag))
                try:
                    same = all(map(right, expected, _parts(function(given, dim, flag))))
                except (RuntimeError, NotImplementedError) as error:
                    refused.append(f"{case}: {type(error).__name__}")
                    continue
                if not same:
                    wrong.append(case)
            assert_same(before, given.to_local(), f"input of {family}")
    return wrong, refused


@requirement(
    "TP-OP-02",
    "A reduction, scan or sort of a DTensor gives the plain tensor's result for any dimensions, placements or sizes.",
    source=SOURCE,
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.world(2)
def test_reductions(world: World, family: str) -> None:
    """Use sizes that two ranks divide or not, or that leave a rank without elements of the dimension it shards."""

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        uneven, even = (5, 3), (4, 6)
        layouts: dict[Layout, list[tuple[int, int]]] = {
            (Replicate(),): [uneven],
            (Shard(0),): [uneven, even, (1, 3)],
            (Shard(1),): [uneven, even, (2, 1)],
            (Partial(),): [uneven, even],
        }
        if family in SELECTING:
            layouts |= {(Shard(0),): [uneven, even], (Shard(1),): [uneven, even]}
        if family == "logsumexp-kept":  # where shards differ in size, ranks abort
            layouts = {key: [even] for key in layouts}
        return _checked(rank, rank.mesh(), family, layouts)

    assert_on_ranks([([], [])] * world.size, world.run(body))


@requirement(
    "TP-OP-02",
    "A reduction, scan or sort of a DTensor gives the plain tensor's result for any dimensions, placements or sizes.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_two_dimensions(world: World) -> None:
    """Shard one dimension of the tensor by both dimensions of the mesh, or each by its own, with partial values."""

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        rows, columns = Shard(0), Shard(1)
        layouts: list[Layout] = [
            (columns, rows),
            (rows, rows),
            (rows, columns),
            (Partial(), columns),
            (rows, Partial()),
        ]
        wrong, refused = [], []
        for family in [family for family in FAMILIES if family not in ("logsumexp-kept", "scans-from-the-end")]:
            tried, every = (layouts, 1) if family in ("sums", "positions") else (layouts[1:4], 4)
            more = _checked(rank, mesh, family, {layout: [(5, 7)] for layout in tried}, every)
            wrong, refused = wrong + more[0], refused + more[1]
        return wrong, refused

    assert_on_ranks([([], [])] * world.size, world.run(body))


OF_NORMS: dict[str, tuple[tuple[float, ...], dict[str, Callable[[Any], Any]]]] = {
    "of-others": (
        (0.0, 1.0, float("inf"), -float("inf")),
        {
            "sum": torch.sum,
            "nansum": torch.nansum,
            "mean": torch.mean,
            "amax": torch.amax,
            "cumsum": lambda n: n.cumsum(0),
        },
    ),
    "of-roots": (
        (2.0, 3.0),
        {"mean": torch.mean, "amax": torch.amax, "norm": torch.linalg.vector_norm, "cumsum": lambda n: n.cumsum(0)},
    ),
    "sums-of-roots": (
        (2.0, 3.0),
        {"sum": torch.sum, "kept": lambda n: n.sum(0, keepdim=True), "nansum": torch.nansum},
    ),
}
"""Orders of norms by kind, with the reductions and scans that are tried on a tensor of such norms."""


@requirement(
    "TP-OP-02",
    "A reduction, scan or sort of a DTensor gives the plain tensor's result for any dimensions, placements or sizes.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", OF_NORMS)
@pytest.mark.world(2)
def test_norms_of_columns(world: World, kind: str) -> None:
    """Take the norm of each column of a matrix that is sharded by rows or columns, and reduce these norms."""

    def body(rank: Rank) -> list[str]:
        whole, wrong = _whole(4, 5).to(rank.device), []
        orders, functions = OF_NORMS[kind]
        for placement, order, (name, function) in itertools.product((Shard(0), Shard(1)), orders, functions.items()):
            expected = function(torch.linalg.vector_norm(whole, order, 0))
            given = _laid_out(whole, rank, rank.mesh(), (placement,))
            if not close(expected, function(torch.linalg.vector_norm(given, order, 0)).full_tensor()):
                wrong.append(f"{name} of norms of order {order} of {placement}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-03",
    "A reduction, scan or sort of a DTensor over a dimension that is not sharded does not communicate.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@requirement(
    "TP-OP-04",
    "A sum, mean, maximum or minimum of shards takes one collective, which the result of a sum awaits.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary; Partial",
)
@pytest.mark.world(2)
def test_communication(world: World) -> None:
    """Reduce even and uneven shards over their other dimension; then over the sharded one, and read the result."""

    def body(rank: Rank) -> dict[str, Any]:
        counts: dict[str, Any] = {}
        for shape, sharded in itertools.product(((4, 6), (5, 3)), (0, 1)):
            whole = _whole(*shape).to(rank.device)
            given = _laid_out(whole, rank, rank.mesh(), (Shard(sharded),))
            for family, (dims, functions) in FAMILIES.items() if (shape == (4, 6)) == (sharded == 0) else ():
                at = messages.mark()
                for function in functions.values():
                    for dim in {1 - sharded, -1 - sharded} & set(dims):
                        function(given, dim, False)
                if found := len(messages.since(at)):
                    counts[f"{family} of {shape} S({sharded}) over the other dimension"] = found
            for name in "sum", "mean", "amax", "amin":
                for dims in None, sharded, (0, 1):
                    at = messages.mark()
                    result = METHODS[name](given, dims, False)
                    early = len(messages.since(at))
                    result.full_tensor()
                    if len(messages.since(at)) != 1 or (early and name == "sum"):
                        counts[f"{name} of {shape} S({sharded}) over {dims}"] = (early, len(messages.since(at)))
        return counts

    assert_on_ranks([{}] * world.size, world.run(body))


DIFFERENTIABLE = {
    "reductions": (
        "sum",
        "mean",
        "var",
        "std",
        "max",
        "min",
        "median",
        "norm 1",
        "norm 2",
        "norm 3",
        "norm -1",
        "logsumexp",
    ),
    "orders": ("cumsum", "softmax", "log_softmax", "topk", "sort", "kthvalue"),
    "extremes": ("amax", "amin", "norm inf", "norm -inf"),
    "products": ("prod",),
    "products-so-far": ("cumprod",),
    "extremes-so-far": ("cummax", "cummin"),
}
"""Names of functions."""


@requirement(
    "TP-OP-05",
    "The gradient of a reduction, scan or sort of a DTensor is the plain tensor's, for any dimensions or placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", DIFFERENTIABLE)
@pytest.mark.world(2)
def test_gradients(world: World, kind: str) -> None:
    """Use uneven shards; each element of the result has its own gradient, which arrives replicated or sharded."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        whole = _whole(5, 3).to(rank.device)
        turns = itertools.count()
        every: dict[str, tuple[list[Dims], Reduction]] = {}
        for some, functions in FAMILIES.values():
            for name, function in functions.items():
                every[name] = [*every.get(name, ([], function))[0], *some], function
        for placement, name in itertools.product((Replicate(), Shard(0), Shard(1)), DIFFERENTIABLE[kind]):
            dims, function = every[name]
            for dim in [dim for dim in (None, 0, 1, -1) if dim in dims]:
                plain = whole.clone().requires_grad_()
                given = _laid_out(whole, rank, rank.mesh(), (placement,)).requires_grad_()
                expected, found = (_parts(function(x, dim, False))[0] for x in (plain, given))
                weights = numbers(*expected.shape, dtype=torch.float64).to(rank.device)
                (expected * weights).sum().backward()
                backs = [Replicate(), *map(Shard, range(expected.dim()))]
                back = backs[next(turns) % len(backs)]
                (found * _laid_out(weights, rank, rank.mesh(), (back,))).sum().full_tensor().backward()
                gradient: Any = given.grad
                assert plain.grad is not None
                if not close(plain.grad, gradient.full_tensor()):
                    wrong.append(f"{name} of {placement} over {dim}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
