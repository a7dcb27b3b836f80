"""Operators whose result is not made of what each rank computes from its part: losses, statistics, systems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operands, Operator, close, distributed, floats, right
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
GIVEN, TARGET = floats(4, 6) / 16, floats(4, 6, start=3).abs() / 16 + 0.125

LOSSES: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "backward-of-its-own": {
        "mse_loss": functional.mse_loss,
        "smooth_l1_loss": functional.smooth_l1_loss,
        "huber_loss": functional.huber_loss,
        "soft_margin_loss": lambda a, b: functional.soft_margin_loss(a, b.detach().sign()),
        "binary_cross_entropy": lambda a, b: functional.binary_cross_entropy(a.sigmoid(), b.detach()),
    },
    "backward-of-a-mean": {
        "l1_loss": functional.l1_loss,
        "kl_div": lambda a, b: functional.kl_div(a, b.detach(), reduction="batchmean"),
        "cross_entropy": lambda a, b: functional.cross_entropy(a, b.detach().long()[:, 0]),
        "mean of squares": lambda a, b: (a - b).square().mean(),
        "sum of mse_loss": lambda a, b: functional.mse_loss(a, b, reduction="sum"),
        "each mse_loss": lambda a, b: functional.mse_loss(a, b, reduction="none").mean(),
    },
}
"""Losses of a batch, by whether PyTorch has a function for the backward of the loss with its mean."""


@requirement(
    "TP-OP-07",
    "An operator gives each of its DTensors the plain tensor's gradient, or raises an error on every rank.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.world(2)
def test_gradients_of_losses(world: World, kind: str) -> None:
    """Shard predictions, targets or both evenly, over rows or columns."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        layouts = [(ROWS, ROWS), (COLUMNS, COLUMNS), (ROWS, R), (R, COLUMNS)]
        for (name, loss), (a, b) in itertools.product(LOSSES[kind].items(), layouts):
            plain = GIVEN.clone().to(rank.device).requires_grad_()
            own = distributed(plain.detach().clone(), a, rank, mesh).requires_grad_()
            loss(plain, TARGET.to(rank.device)).backward()
            loss(own, distributed(TARGET.to(rank.device), b, rank, mesh)).backward()
            assert plain.grad is not None
            if not close(plain.grad, own.grad.full_tensor()):  # type: ignore[union-attr]
                wrong.append(f"gradient of {name} of {a} and {b}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("which", ["replicated statistics of sharded channels", "others"])
@pytest.mark.world(2)
def test_statistics(world: World, which: str) -> None:
    """Normalize a batch twice, and read the running mean and variance."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        batch = floats(6, 4).to(rank.device)
        plain = nn.BatchNorm1d(4, dtype=torch.float64, device=rank.device)
        for layout, at in itertools.product((R, ROWS, COLUMNS), (R, ROWS)):
            if (layout is COLUMNS and at is R) != (which != "others"):
                continue
            plain.reset_running_stats()
            norm = nn.BatchNorm1d(4, dtype=torch.float64, device=rank.device)
            for name, buffer in list(norm.named_buffers()):
                setattr(norm, name, distribute_tensor(buffer, mesh, [at if buffer.dim() else R]))
            for name, parameter in list(norm.named_parameters()):
                norm.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [at])))
            for _ in range(2):
                plain(batch)
                norm(distributed(batch, layout, rank, mesh))
            for name, buffer in norm.named_buffers():
                if not close(plain.get_buffer(name), buffer.full_tensor()):  # type: ignore[operator]
                    wrong.append(f"{name} in {at} of a batch in {layout}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SYSTEMS: dict[str, Operator] = {
    "solve": torch.linalg.solve,
    "solve_triangular": lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a, upper=True),
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
}
MATRICES, SIDES = floats(2, 2, 3, 3).triu() + 9 * torch.eye(3, dtype=torch.float64), floats(2, 2, 3, 2)
BATCHES: dict[str, tuple[tuple[str, ...], tuple[tuple[Operands, tuple[Placement, Placement]], ...]]] = {
    "of-one-size": (
        tuple(SYSTEMS),
        (
            ((MATRICES, SIDES), (ROWS, ROWS)),
            ((MATRICES, SIDES), (COLUMNS, COLUMNS)),
            ((MATRICES, SIDES[0]), (R, R)),
        ),
    ),
    "with-more-matrices": (tuple(SYSTEMS), (((MATRICES, SIDES[0]), (ROWS, ROWS)),)),
    "with-more-sides": (tuple(SYSTEMS), (((MATRICES[1], SIDES), (ROWS, ROWS)),)),
    "with-replicated-matrices": (("solve_triangular",), (((MATRICES, SIDES), (R, ROWS)),)),
    "with-replicated-matrices-of-others": (
        ("solve", "cholesky_solve", "lu_solve"),
        (((MATRICES, SIDES), (R, ROWS)), ((MATRICES, SIDES), (ROWS, R))),
    ),
}
"""The names of solvers, with matrices and right sides, which are broadcast against each other, and placements."""


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.world(2)
def test_systems(world: World, batch: str) -> None:
    """Solve triangular systems in four ways."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (given, placements) in itertools.product(*BATCHES[batch]):
            operands = [x.to(rank.device) for x in given]
            inputs = [distributed(x, p, rank, mesh) for x, p in zip(operands, placements, strict=True)]
            try:
                if not close(SYSTEMS[name](*operands), SYSTEMS[name](*inputs).full_tensor()):
                    wrong.append(f"{name} of {placements}")
            except RuntimeError as e:  # a shard of another size
                wrong.append(f"{name} of {placements}: {e}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", ["a vector and a matrix", "others"])
@pytest.mark.world(2)
def test_shapes_of_products(world: World, kind: str) -> None:
    """Multiply vectors and matrices, of which PyTorch makes products of matrices, in which it squeezes a dimension."""
    products: dict[str, Operator] = {
        "product": lambda x, w: x @ w,
        "linear": functional.linear,
        "quantile": lambda x, w: x.quantile(0.5),
    }
    if kind == "others":
        products = {
            "product": lambda x, w: w @ x,
            "linear with a bias": lambda x, w: functional.linear(x, w, x),
            "dot": lambda x, w: x @ x,
            "product of matrices": lambda x, w: w @ w,
        }

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        vector, matrix = floats(4).to(rank.device), floats(4, 4).to(rank.device)
        for name, product in products.items():
            for layouts in itertools.product((R, ROWS), (R, ROWS, COLUMNS)):
                inputs = [distributed(x, p, rank, mesh) for x, p in zip((vector, matrix), layouts, strict=True)]
                expected, found = product(vector, matrix), product(*inputs)
                if found.shape != expected.shape:
                    wrong.append(f"{name}: shape {tuple(found.shape)} and not {tuple(expected.shape)}")
                elif not right(expected, found):
                    wrong.append(f"{name} of {layouts}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


INFINITE, NAN = float("inf"), float("nan")


def plus(x: torch.Tensor, number: float) -> torch.Tensor:
    """Add a replicated tensor of one number."""
    y = torch.full(x.shape, number, dtype=x.dtype, device=x.device)
    return x + (distribute_tensor(y, x.device_mesh, [R]) if isinstance(x, DTensor) else y)


PENDING: dict[str, dict[str, tuple[str, Operator, list[list[float]]]]] = {
    "infinite": {
        "infinite multiple": ("sum", lambda x: x * INFINITE, [[4.0, -2.0], [2.0, 4.0]]),
        "quotient by zero": ("sum", lambda x: x / 0.0, [[4.0, -2.0], [2.0, 4.0]]),
    },
    "infinite-summand": {
        "minimum less infinity": ("min", lambda x: plus(x, -INFINITE), [[INFINITE, 4.0], [4.0, 4.0]]),
        "maximum plus infinity": ("max", lambda x: plus(x, INFINITE), [[-INFINITE, 4.0], [4.0, 4.0]]),
    },
    "finite": {
        "minimum plus a number": ("min", lambda x: plus(x, 2.0), [[INFINITE, 4.0], [4.0, 4.0]]),
        "minimum plus infinity": ("min", lambda x: plus(x, INFINITE), [[INFINITE, 4.0], [4.0, 4.0]]),
        "multiple": ("sum", lambda x: x * 2.0, [[4.0, -2.0], [2.0, 4.0]]),
        "infinite multiple of the maximum": ("max", lambda x: x * INFINITE, [[4.0, -2.0], [2.0, 4.0]]),
    },
    "reduced": {
        "nansum": ("sum", torch.nansum, [[NAN, 1.0], [2.0, 3.0]]),
        "norm inf": ("max", lambda x: torch.linalg.vector_norm(x, INFINITE), [[-5.0, 1.0], [1.0, -7.0]]),
        "norm -inf": ("min", lambda x: torch.linalg.vector_norm(x, -INFINITE), [[-5.0, 1.0], [1.0, -7.0]]),
    },
    "not-monotonic": {
        "nan_to_num": ("max", lambda x: torch.nan_to_num(x, posinf=0.0), [[INFINITE, 1.0], [3.0, 7.0]]),
        "threshold": ("max", lambda x: functional.threshold(x, 0.5, 2.0), [[-5.0, 1.0], [1.0, -7.0]]),
        "irfft": ("max", torch.fft.irfft, [[0.0, 4.0], [4.0, 0.0]]),
    },
    "others": {
        "nansum": ("sum", torch.nansum, [[1.0, -1.0], [2.0, 3.0]]),
        "norm": ("max", torch.linalg.vector_norm, [[-5.0, 1.0], [1.0, -7.0]]),
        "norm inf of a sum": ("sum", lambda x: torch.linalg.vector_norm(x, INFINITE), [[-5.0, 1.0], [1.0, -7.0]]),
        "nan_to_num": ("max", torch.nan_to_num, [[INFINITE, 1.0], [3.0, 7.0]]),
        "threshold": ("min", lambda x: functional.threshold(x, 0.5, -1.0), [[-5.0, 1.0], [1.0, -7.0]]),
        "irfft of a sum": ("sum", torch.fft.irfft, [[0.0, 4.0], [4.0, 0.0]]),
        "absolute": ("max", torch.abs, [[-5.0, 1.0], [1.0, -7.0]]),
        "square": ("min", torch.square, [[-5.0, 1.0], [1.0, -7.0]]),
    },
}
"""Operators, and the parts that ranks have of what is pending with a reduction."""
if runs_with(">=2.13"):  # before, which compares complex numbers
    PENDING["complex"] = {
        f"{name} of a {reduction}": (reduction, lambda x, convert=convert: convert(x[None]), [[1.0, 4.0], [2.0, 3.0]])
        for reduction in ("max", "min", "sum")
        for name, convert in {
            "view_as_complex": torch.view_as_complex,
            "there and back": lambda x: torch.view_as_real(torch.view_as_complex(x)),
        }.items()
    }


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.parametrize("kind", PENDING)
@pytest.mark.world(2)
def test_pending_extremes(world: World, kind: str) -> None:
    """Parts of both signs, infinite or not a number, of which the whole has no such element."""
    reductions = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (reduction, operator, given) in PENDING[kind].items():
            parts = torch.tensor(given, dtype=torch.float64, device=rank.device)
            expected = operator(reductions[reduction](parts, 0))
            found = operator(DTensor.from_local(parts[rank.index], rank.mesh(), [Partial(reduction)]))
            if not close(expected, found.full_tensor()):
                wrong.append(f"{name} of a pending {reduction}: {found.full_tensor().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.parametrize("other", [R, ROWS], ids=["replicated", "sharded"])
@pytest.mark.world(2)
def test_pending_integers(world: World, other: Placement) -> None:
    """Combine a pending sum of integers that float32 does not have with replicated or sharded ones."""
    operators: dict[str, Operator] = {
        "sum": torch.add,
        "difference": torch.sub,
        "cat": lambda a, b: torch.cat([a, b]),
        "stack": lambda a, b: torch.stack([a, b]),
    }

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        parts = torch.tensor([[2**24, 5], [1, 2]], device=rank.device)
        whole, second = parts.sum(0), torch.tensor([4, 7], device=rank.device)
        for name, operator in operators.items():
            pending = DTensor.from_local(parts[rank.index].clone(), mesh, [Partial()])
            expected, found = operator(whole, second), operator(pending, distribute_tensor(second, mesh, [other]))
            if not right(expected, found):
                wrong.append(f"{name}: {found.full_tensor().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


JOINED: dict[str, Operator] = {
    "sum": torch.add,
    "sum in turn": lambda a, b: b + a,
    "difference": torch.sub,
    "difference in turn": lambda a, b: b - a,
    "sum of a multiple": lambda a, b: torch.add(a, b, alpha=2),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([b, a]),
    "elements": lambda a, b: torch.where(b > 0, b, a),
    "larger": torch.maximum,
    "smaller": lambda a, b: torch.minimum(b, a),
    "sum and square": lambda a, b: torch.addcmul(a, b, b),
}
"""Operators on two tensors of four elements."""
SPECIAL = [INFINITE, -INFINITE, NAN, -0.0]
PARTS = [[4.0, -2.0, 8.0, 2.0], [2.0, 4.0, -4.0, 0.0]], [[INFINITE, 1.0, 2.0, -INFINITE], [4.0, 4.0, 4.0, 4.0]]


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("other", [R, ROWS], ids=["replicated", "sharded"])
@pytest.mark.world(2)
def test_pending_beside_infinities(world: World, other: Placement, reduction: str) -> None:
    """Combine sums or averages, finite or not, or finite extremes with infinities, no number and a negative zero."""
    reductions = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        second = torch.tensor(SPECIAL, dtype=torch.float64, device=rank.device)
        for given in PARTS[: 2 if reduction in ("sum", "avg") else 1]:
            parts = torch.tensor(given, dtype=torch.float64, device=rank.device)
            for name, operator in JOINED.items():
                pending = DTensor.from_local(parts[rank.index].clone(), mesh, [Partial(reduction)])
                expected = operator(reductions[reduction](parts, 0), second)
                found = operator(pending, distribute_tensor(second, mesh, [other]))
                if not right(expected, found):
                    wrong.append(f"{name}: {found.full_tensor().tolist()} for {expected.tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SELECTED: dict[str, dict[str, tuple[Operator, torch.Tensor, Placement, Placement | None]]] = {
    "select-from-the-end": {
        "select of a column": (lambda x: x.select(-1, 0), floats(2, 2), ROWS, None),
        "trapezoid": (lambda x: torch.trapezoid(x, dim=-1), floats(2, 2), ROWS, None),
        "narrow": (lambda x: x.narrow(-1, 0, 2), floats(4, 4), R, COLUMNS),
        "last columns": (lambda x: x[..., 2:], floats(4, 4), R, COLUMNS),
    },
    "pool-of-rows": {
        "pool": (lambda x: functional.adaptive_avg_pool2d(x, (5, 7)), floats(8, 8, 8), COLUMNS, COLUMNS),
    },
    "others": {
        "select of a column": (lambda x: x.select(1, 0), floats(4, 2), ROWS, None),
        "select of the last": (lambda x: x.select(-1, 0), floats(4, 2), R, None),
        "column": (lambda x: x[..., 0], floats(4, 2), ROWS, None),
        "narrow": (lambda x: x.narrow(-1, 0, 2), floats(4, 4), ROWS, ROWS),
        "narrow of shards": (lambda x: x.narrow(-1, 0, 2), floats(4, 4), COLUMNS, ROWS),
        "pool of channels": (lambda x: functional.adaptive_avg_pool2d(x, (5, 7)), floats(8, 8, 8), ROWS, ROWS),
        "pool of a batch": (lambda x: functional.adaptive_avg_pool2d(x, 3), floats(2, 2, 6, 6), COLUMNS, COLUMNS),
    },
}
"""Operators with an operand, its placement, and that of the gradient that arrives, if not the result's."""


@requirement(
    "TP-OP-07",
    "An operator gives each of its DTensors the plain tensor's gradient, or raises an error on every rank.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", SELECTED)
@pytest.mark.world(2)
def test_gradients_of_parts(world: World, kind: str) -> None:
    """Dimensions that are named from the end, and images without a batch."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given, layout, back) in SELECTED[kind].items():
            plain = given.clone().to(rank.device).requires_grad_()
            own = distributed(plain.detach().clone(), layout, rank, mesh).requires_grad_()
            expected, found = operator(plain), operator(own)
            weights = floats(*expected.shape, start=2).to(rank.device)
            expected.backward(weights)
            found.backward(distribute_tensor(weights, mesh, [back] if back else found.placements))
            assert plain.grad is not None
            if not close(plain.grad, own.grad.full_tensor()):  # type: ignore[union-attr]
                wrong.append(f"gradient of {name} of {layout}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MODEL-02",
    "An operator gives each DTensor that requires a gradient, alone or with others, the plain tensor's gradient.",
    source=SOURCE,
)
@pytest.mark.parametrize("used", ["all", "one"])
@pytest.mark.world(2)
def test_used_parts(world: World, used: str) -> None:
    """Use all of the parts into which a DTensor is cut, or the first one only."""
    cuts: dict[str, Operator] = {
        "split": lambda x: x.split([1, 3]),
        "chunk": lambda x: x.chunk(2, -1),
        "unbind": lambda x: x.unbind(),
    }

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, cut in cuts.items():
            plain = floats(4, 4).to(rank.device).requires_grad_()
            own = distributed(plain.detach().clone(), R, rank, rank.mesh()).requires_grad_()
            try:
                for x in plain, own:
                    parts = cut(x)
                    sum(part.square().sum() for part in (parts if used == "all" else parts[:1])).backward()  # type: ignore[union-attr]
            except RuntimeError as e:
                wrong.append(f"{name}: {str(e).splitlines()[0]}")
                continue
            assert plain.grad is not None
            if not right(plain.grad, own.grad):  # type: ignore[arg-type]
                wrong.append(name)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


CUTS: dict[str, dict[str, Callable[[Any, int], Sequence[Any]]]] = {
    "of a size": {"split": lambda x, dim: x.split(2, dim)},
    "others": {
        "split by sizes": lambda x, dim: x.split([0, x.shape[dim]], dim),
        "chunk": lambda x, dim: x.chunk(2, dim),
        "tensor_split": lambda x, dim: x.tensor_split(3, dim),
        "unsafe_chunk": lambda x, dim: x.unsafe_chunk(2, dim),
    },
}
"""Ways to cut a tensor along a dimension."""


@requirement(
    "TP-OP-7504",
    "Operators cut a DTensor into the parts of a plain tensor, also along a dimension without elements.",
    source=f"{SOURCE}: torch.split, torch.chunk, torch.tensor_split",
)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.world(2)
def test_parts_of_nothing(world: World, cuts: str) -> None:
    """Cut matrices without rows, without columns, or with both, along rows and columns."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        cases = itertools.product(CUTS[cuts].items(), [(0, 4), (4, 0), (4, 4)], (R, ROWS, COLUMNS), (0, 1))
        for (name, cut), shape, layout, dim in cases:
            plain = floats(4, 4)[: shape[0], : shape[1]].to(rank.device)
            try:
                parts = [part.full_tensor() for part in cut(distribute_tensor(plain, mesh, [layout]), dim)]
            except RuntimeError as e:
                wrong.append(f"{name} of {shape} along {dim}: {str(e).splitlines()[0]}")
                continue
            expected = cut(plain, dim)
            if not (len(expected) == len(parts) and all(map(torch.equal, expected, parts))):
                wrong.append(f"{name} of {shape}, {layout}, along {dim}: {[tuple(part.shape) for part in parts]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


LOOKUPS: dict[str, tuple[tuple[tuple[Placement, Placement], tuple[Placement, Placement]], ...]] = {
    "rows-over-the-last": (
        ((ROWS, R), (R, ROWS)),
        ((COLUMNS, R), (R, ROWS)),
        ((R, R), (ROWS, R)),
        ((R, R), (ROWS, COLUMNS)),
        ((R, COLUMNS), (COLUMNS, R)),
    ),
    "rows-over-the-first": (
        ((R, ROWS), (ROWS, R)),
        ((R, COLUMNS), (ROWS, R)),
        ((ROWS, R), (COLUMNS, ROWS)),
    ),
    "rows-over-both": (((R, R), (ROWS, ROWS)),),
}
"""Placements of tokens and of a table on a mesh of two dimensions."""


@requirement(
    "TP-MODEL-01",
    "An operator of transformers, convolutional or recommendation models takes DTensors in any placements and gives "
    "the plain tensor's result.",
    source=SOURCE,
)
@pytest.mark.parametrize("which", LOOKUPS)
@pytest.mark.world(4, keeps="masks of lookups that failed")
def test_lookups(world: World, which: str) -> None:
    """Look up sequences of tokens, and put the result together once."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2), []
        tokens = torch.tensor([[3, 0], [2, 7], [5, 5], [1, 6]], device=rank.device)
        table = floats(8, 4).to(rank.device)
        for layouts in LOOKUPS[which]:
            own = [distribute_tensor(x, mesh, p) for x, p in zip((tokens, table), layouts, strict=True)]
            try:
                found: Any = functional.embedding(*own)
                if not close(table[tokens], found.full_tensor()):
                    wrong.append(f"{layouts}")
            except (IndexError, RuntimeError) as e:
                wrong.append(f"{layouts}: {e}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-AGAIN-01",
    "An operator that is called again on a DTensor with other numbers, dimensions or sizes gives the result for these.",
    source=f"{SOURCE}; pytorch/pytorch#149764",
)
@pytest.mark.world(2)
def test_products_again(world: World) -> None:
    """Cross products of rows and then of columns."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        a, b = floats(3, 3).to(rank.device), floats(3, 3, start=4).to(rank.device)
        for layout, dims in itertools.product((ROWS, COLUMNS), ((-1, 0), (0, -1))):
            for dim in dims:
                try:
                    own = (distributed(x, layout, rank, rank.mesh()) for x in (a, b))
                    if not right(torch.linalg.cross(a, b, dim=dim), torch.linalg.cross(*own, dim=dim)):
                        wrong.append(f"dimension {dim} of {layout}")
                except RuntimeError as e:
                    wrong.append(f"dimension {dim} of {layout}: {e}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, DTensors have no avg_pool")
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=["integers", "floats"])
@pytest.mark.world(2)
def test_pending_pools(world: World, dtype: torch.dtype) -> None:
    """Average neighbors in one, two and three dimensions."""
    pools: dict[int, Operator] = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for dimensions, pool in pools.items():
            whole = torch.tensor([1, 3, 2, 4], dtype=dtype, device=rank.device).expand(1, 1, *[4] * dimensions)
            first = torch.tensor([1, 0, 0, 0], dtype=dtype, device=rank.device).expand_as(whole)
            part = first if rank.index else whole - first
            found = pool(DTensor.from_local(part, mesh, [Partial()]), 2)
            if not right(pool(whole, 2), found):
                wrong.append(f"avg_pool{dimensions}d: {found.full_tensor().flatten()[:2].tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


DETERMINANTS: dict[str, Callable[[Any], Any]] = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
}


@requirement(
    "TP-OP-07",
    "An operator gives each of its DTensors the plain tensor's gradient, or raises an error on every rank.",
    source=SOURCE,
)
@pytest.mark.parametrize("form", ["transposed", "as they are"])
@pytest.mark.world(2)
def test_gradients_of_determinants(world: World, form: str) -> None:
    """Take determinants of a matrix that is replicated, or of which each rank has rows or columns."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        matrix = (torch.eye(4, dtype=torch.float64) * 8 + floats(4, 4) / 16).to(rank.device)
        for (name, operator), layout in itertools.product(DETERMINANTS.items(), (R, ROWS, COLUMNS)):
            plain = matrix.clone().requires_grad_()
            own = distributed(matrix.clone(), layout, rank, mesh).requires_grad_()
            operator(plain.mT if form == "transposed" else plain).backward()
            try:
                operator(own.mT if form == "transposed" else own).backward()
            except NotImplementedError:
                continue
            assert plain.grad is not None
            if not close(plain.grad, own.grad.full_tensor()):  # type: ignore[union-attr]
                same = close(plain.grad.mT, own.grad.full_tensor())  # type: ignore[union-attr]
                wrong.append(f"gradient of {name} of {layout}: {'its transpose' if same else 'another'}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-DTENSOR-7608",
    "The gradient of an operator that is constant almost everywhere is a DTensor of zeros.",
    source=SOURCE,
)
@pytest.mark.parametrize("name", ["sign", "sgn", "round", "floor", "ceil", "trunc"])
@pytest.mark.world(2)
def test_gradients_of_constants(world: World, name: str) -> None:
    """Call it on shards and on replicas."""

    def body(rank: Rank) -> list[str]:
        seen = []
        for placement in ROWS, COLUMNS, R:
            given = distribute_tensor(GIVEN.to(rank.device), rank.mesh(), [placement]).requires_grad_()
            getattr(torch, name)(given).sum().backward()
            grad = given.grad
            assert grad is not None, f"{name} of {placement}: no gradient"
            kind = f"of {type(grad).__name__} {tuple(grad.shape)}"
            zero = not (grad.full_tensor() if isinstance(grad, DTensor) else grad + 0).any()
            seen.append(f"{placement}: {kind}, {'zero' if zero else 'not zero'}")
        return seen

    expected = [f"{placement}: of DTensor {tuple(GIVEN.shape)}, zero" for placement in (ROWS, COLUMNS, R)]
    assert_on_ranks([expected] * world.size, world.run(body))
