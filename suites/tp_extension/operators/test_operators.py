"""Operators on DTensors give what they give on plain tensors, whatever the placements of their inputs.

Most sizes are not divisible by the world size, so that ranks have shards of different sizes. Everything is computed in
float64 and compared as float32, bit for bit, so that another order of summation makes no difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operands, Operator, classes, combinations, distributed, floats
from fixtures.placements import MORE_OPERATORS, REDUCED
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"

A, B = floats(5, 7), floats(5, 7, start=3)
ROW, COLUMN, MATRIX, CUBE = floats(7), floats(5, start=1), floats(7, 4, start=1), floats(2, 5, 6)
IMAGES, KERNELS = floats(2, 3, 6), floats(4, 3, 3)
LABELS = classes(7, 5)
SPREAD = (torch.arange(35) * 11).remainder(37).sub(9).double().reshape(5, 7)
"""Numbers of which every row and column has another range."""
TIED = floats(5, 7).remainder(3)
"""Numbers of which every row and column has some twice."""
REPEATED = torch.tensor([1, 0, 1])
"""Rows of A, or columns, one of them twice."""
GROUPS = torch.tensor([2, 5, 8], dtype=torch.int32)
"""Where groups of eight rows end."""
POSITIONS = (torch.arange(3)[:, None] + 2 * torch.arange(7)).remainder(5)
"""Rows of A, none twice for a column."""


def _changed(row: int, column: int) -> torch.Tensor:
    """Return A with another element at a position."""
    other = A.clone()
    other[row, column] += 1
    return other


def _scattered(name: str, dim: int, rows: int, columns: int) -> tuple[Operator, Operands]:
    """Return a function of A, positions (for up to four columns, none twice along a dimension) and a source."""
    index = (torch.arange(rows)[:, None] + 2 * torch.arange(columns)).remainder(5)
    return lambda a, i, b: getattr(a, name)(dim, i, b), (A, index, floats(5, 7, start=4)[:rows])


def _part_scattered(dim: int, rows: int, columns: int) -> tuple[Operator, Operands]:
    """Return scatter_add with positions and a source of one size, as its gradient needs."""
    operator, (a, index, source) = _scattered("scatter_add", dim, rows, columns)
    return operator, (a, index, source[:, :columns].clone())


def _ones(*shape: int, start: int = 0) -> torch.Tensor:
    """Return -1, 0 and 1 in bfloat16, which sums of products of few of them do not round."""
    return floats(*shape, start=start).sign().to(torch.bfloat16)


FAMILIES: dict[str, dict[str, tuple[Operator, Operands]]] = {
    "pointwise": {
        "add": (torch.add, (A, ROW)),
        "mul": (torch.mul, (A, B)),
        "where": (lambda a, b: torch.where(a > 0, a, b), (A, B)),
        "maximum": (torch.maximum, (A, B)),
        "clamp": (lambda a: a.clamp(-2, 2), (A,)),
        "rsub": (lambda a: 1 - a, (A,)),
        "relu": (functional.relu, (A,)),
        "comparison": (lambda a: a > 0, (A,)),
        "conversion": (lambda a: a.to(torch.int32), (A,)),
    },
    "of-sums": {
        "add": (lambda a: a.sum(0) + 1, (A,)),
        "mul": (lambda a: a.sum(0) * a.sum(0), (A,)),
        "division": (lambda a: 2 / (a.sum(0) + 100), (A,)),
        "relu": (lambda a: functional.relu(a.sum(0)), (A,)),
        "comparison": (lambda a: a.sum(0) > 0, (A,)),
        "negative maximum": (lambda a: -a.amax(0), (A,)),
        "maximum and minimum": (lambda a: a.amax(0) + a.amin(0), (A,)),
        "mean": (lambda a: a.mean(0) + 1, (A,)),
        "norm": (lambda a: torch.linalg.vector_norm(a) ** 2, (A,)),
        "cat": (lambda a, b: torch.cat([a.sum(0), b[0]]), (A, B)),
        "scaling": (lambda a: a.sum(0).mul_(2), (A,)),
    },
    "reductions": {
        "sum": (lambda a: a.sum(1, keepdim=True), (A,)),
        "mean": (torch.mean, (A,)),
        "mean of rows": (lambda a: a.mean(0), (A,)),
        "maximum": (lambda a: a.max(0).values, (A,)),
        "argmax": (lambda a: a.argmax(1), (floats(5, 7) * 7 + torch.arange(7),)),
        "product": (lambda a: a.prod(0), (A,)),
        "variance": (lambda a: a.var(0), (A,)),
        "norms": (lambda a: torch.stack([torch.linalg.vector_norm(a, p) for p in (0, 1, 2, torch.inf)]), (A,)),
        "any": (lambda a: (a > 4).any(1), (A,)),
        "logsumexp": (lambda a: a.logsumexp(0), (A,)),
    },
    "scans": {
        "softmax": (lambda a: a.softmax(0), (A,)),
        "cumsum": (lambda a: a.cumsum(0), (A,)),
        "sort": (lambda a: a.sort(1).values, (A,)),
        "topk": (lambda a: a.topk(2, 0).values, (A,)),
        "flip": (lambda a: a.flip(0), (A,)),
        "roll": (lambda a: a.roll(2, 0), (A,)),
        "tril": (torch.tril, (A,)),
    },
    "views": {
        "transpose": (lambda a: a.transpose(0, 2), (CUBE,)),
        "flatten": (lambda a: a.flatten(1), (CUBE,)),
        "unflatten": (lambda a: a.unflatten(2, (3, 2)), (CUBE,)),
        "expand": (lambda a: a.unsqueeze(0).expand(3, 5, 7), (A,)),
        "slice": (lambda a: a[1:4, ::2], (A,)),
        "select": (lambda a: a[:, 3], (A,)),
        "split": (lambda a: a.split([2, 3], 0)[1], (A,)),
        "unbind": (lambda a: a.unbind(1)[4], (A,)),
        "cat": (lambda a, b: torch.cat([a, b], 0), (A, B)),
        "stack": (lambda a, b: torch.stack([a, b], 1), (A, B)),
        "pad": (lambda a: functional.pad(a, (1, 2)), (A,)),
    },
    "dimensions": {
        **{
            f"stack at {dim}": (lambda a, b, dim=dim: torch.stack([a, b, a], dim), (A, B))
            for dim in (0, 1, 2, -1, -2, -3)
        },
        **{f"unsqueeze at {dim}": (lambda a, dim=dim: a.unsqueeze(dim), (A,)) for dim in (0, 1, -1, -2)},
        **{f"squeeze at {dim}": (lambda a, dim=dim: a.squeeze(dim), (A[:1],)) for dim in (0, 1, -1, -2)},
        **{f"cat at {dim}": (lambda a, b, dim=dim: torch.cat([a, b], dim), (A, B)) for dim in (-1, -2)},
        **{f"unbind at {dim}": (lambda a, dim=dim: a.unbind(dim)[2], (A,)) for dim in (0, -1, -2)},
        "roll of all": (lambda a: a.roll(2), (A,)),
        "roll of both": (lambda a: a.roll((1, 2), (0, -1)), (A,)),
        "flip of both": (lambda a: a.flip(-1, 0), (A,)),
    },
    "products": {
        "mm": (torch.mm, (A, MATRIX)),
        "mv": (torch.mv, (A, ROW)),
        "bmm": (torch.bmm, (CUBE, floats(2, 6, 3))),
        "addmm": (lambda a, b, bias: torch.addmm(bias, a, b, beta=2, alpha=3), (A, MATRIX, floats(4))),
        "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (CUBE, floats(2, 6, 3))),
        "outer": (torch.outer, (ROW, COLUMN)),
    },
    "indexing": {
        "gather": (lambda a, i: a.gather(0, i), (A, classes(4, 5, 7))),
        "scatter": (lambda a, i: a.scatter(1, i, 9.0), (A, classes(7, 5, 7))),
        "scatter_add over rows": _scattered("scatter_add", 0, 5, 7),
        "scatter_add over columns": _scattered("scatter_add", -1, 5, 7),
        "embedding": (functional.embedding, (LABELS, MATRIX)),
        "embedding of sequences": (functional.embedding, (classes(7, 5, 3), MATRIX)),
        "embedding with padding": (lambda i, w: functional.embedding(i, w, padding_idx=2), (classes(7, 3, 5), MATRIX)),
        "masked_fill": (lambda a: a.masked_fill(a > 0, 9), (A,)),
    },
    "reduced-by-index": {
        f"{name} {'with' if kept else 'without'} the row": (
            lambda a, i, b, name=name, kept=kept: a.index_reduce(0, i, b, name, include_self=kept),
            (A, REPEATED, floats(3, 7, start=2)),
        )
        for name, kept in (("prod", True), ("mean", False), ("amax", False), ("amin", True))
    }
    | {
        "mean with the column": (
            lambda a, i, b: a.index_reduce(-1, i, b, "mean"),
            (A, REPEATED, floats(5, 3, start=2)),
        ),
    },
    "filled-by-index": {
        f"index_fill at {dim}": (
            lambda a, i, b, dim=dim: a.index_fill(dim, i, b),
            (A, REPEATED, torch.tensor(9.0, dtype=torch.float64)),
        )
        for dim in (0, 1, -1)
    },
    "stable-sorts": {
        **{
            f"places of {order} numbers at {dim}": (
                lambda a, dim=dim, order=order: a.argsort(stable=True, dim=dim, descending=order == "falling"),
                (TIED,),
            )
            for order, dim in (("rising", 0), ("falling", 1), ("rising", -1))
        },
        "numbers": (lambda a: a.sort(stable=True, dim=0).values, (TIED,)),
        "of rows": (lambda a: torch.sort(a, stable=True).indices, (TIED,)),
    },
    "grouped-products": {
        "of groups of rows": (
            lambda a, b, i: functional.grouped_mm(a, b, offs=i),
            (_ones(8, 16), _ones(3, 16, 8, start=1), GROUPS),
        ),
        "of batches": (functional.grouped_mm, (_ones(3, 8, 16), _ones(3, 16, 8, start=1))),
        "of groups of columns": (
            lambda a, b, i: functional.grouped_mm(a, b, offs=i),
            (_ones(3, 8, 16), _ones(16, 8, start=1), GROUPS),
        ),
    }
    if hasattr(functional, "grouped_mm")
    else {},
    "slices": {
        "step": (lambda a: a[::2], (A,)),
        "step over columns": (lambda a: a[:, ::3], (A,)),
        "step over both": (lambda a: a[::3, ::2], (A,)),
        "step over the end": (lambda a: a[::10, 1::4], (A,)),
        "step from a row": (lambda a: a[1::2], (A,)),
        "step until a row": (lambda a: a[:4:3], (A,)),
        "step of a cube": (lambda a: a[..., ::2, ::5], (CUBE,)),
        "all": (lambda a: a[:, :], (A,)),
        "more than all": (lambda a: a[:99], (A,)),
        "without the last": (lambda a: a[:-1], (A,)),
        "the last": (lambda a: a[-2:, -1:], (A,)),
        "none": (lambda a: a[2:2], (A,)),
        "narrowed": (lambda a: a.narrow(1, 2, 3), (A,)),
    },
    "scatters": {
        "sum of few columns over rows": _scattered("scatter_add", 0, 5, 4),
        "sum of few rows over columns": _scattered("scatter_add", -1, 3, 7),
        "sum of a part over columns": _scattered("scatter_add", 1, 2, 3),
        "few columns over rows": _scattered("scatter", -2, 5, 4),
        "few rows over columns": _scattered("scatter", 1, 3, 4),
    },
    "larger-sources": {
        "scatter_add over rows": (lambda a, i, b: a.scatter_add(0, i, b), (A, POSITIONS, floats(5, 9, start=4))),
        "scatter_add over columns": (
            lambda a, i, b: a.scatter_add(-1, i, b),
            (A, classes(7, 5, 4), floats(8, 6, start=4)),
        ),
    },
    "sources": {
        "more rows": (lambda a, i, b: a.scatter_add(0, i, b), (A, classes(5, 3, 7), floats(9, 7, start=4))),
        "more columns": (lambda a, i, b: a.scatter(0, i, b), (A, POSITIONS, floats(5, 9, start=4))),
        "maximum": (lambda a, i, b: a.scatter_reduce(0, i, b, "amax"), (A, POSITIONS, floats(5, 9, start=4))),
    },
    "gathers": {
        "gather of few rows over columns": (lambda a, i: a.gather(1, i), (A, classes(7, 3, 2))),
        "gather of few columns over rows": (lambda a, i: a.gather(-2, i), (A, classes(5, 2, 4))),
    },
    "sums-of-parts": {
        "scatter_add of few rows over columns": _part_scattered(-1, 3, 7),
    },
    "equalities": {
        f"{name} {kind}": (lambda a, b, equal=equal: torch.tensor(equal(a, b)), (A, other))
        for kind, other in {
            "of copies": A.clone(),
            **{f"but for {row}, {column}": _changed(row, column) for row, column in ((0, 0), (4, 0), (0, 6), (4, 6))},
            "of others": B,
            "and a number": A[0, 0],
            "and a part": A[:4],
        }.items()
        for name, equal in {"equal": torch.equal, "equal method": torch.Tensor.equal}.items()
    },
    "sizes": {
        f"is_same_size {kind}": (lambda a, b: torch.tensor(torch.is_same_size(a, b)), (A, other))
        for kind, other in {"of others": B, "but for rows": A[:4], "turned": A.t(), "of a row": ROW}.items()
    },
    "histograms": {
        "histogram": (torch.histc, (A,)),
        "bins": (lambda a: a.histc(5), (SPREAD,)),
        "bins of a column": (lambda a: a.histc(4), (SPREAD[:, :1],)),
        "range": (lambda a: a.histc(4, min=-3, max=9), (SPREAD,)),
        "minimum": (lambda a: a.histc(4, min=-20), (SPREAD,)),
        "maximum": (lambda a: torch.histc(a, 4, max=20), (SPREAD,)),
        "range without width": (lambda a: a.histc(4, 0, 0), (SPREAD,)),
    },
    "normalization": {
        "layer_norm with a bias": (lambda a, w, b: functional.layer_norm(a, (7,), w, b), (A, ROW, MATRIX[:, 0])),
        "layer_norm with only a bias": (lambda a, b: functional.layer_norm(a, (7,), None, b), (A, ROW)),
        "layer_norm of sequences": (
            lambda a, w, b: functional.layer_norm(a, (6,), w, b),
            (CUBE, CUBE[0, 0], CUBE[1, 1]),
        ),
        "layer_norm over two dimensions": (
            lambda a, w, b: functional.layer_norm(a, (5, 6), w, b),
            (CUBE, CUBE[0], CUBE[1]),
        ),
        "plain layer_norm": (lambda a: functional.layer_norm(a, (7,)), (A,)),
        "rms_norm of sequences": (lambda a, w: functional.rms_norm(a, (6,), w), (CUBE, CUBE[0, 0])),
        "plain rms_norm": (lambda a: functional.rms_norm(a, (7,)), (A,)),
        "layer_norm": (lambda a, w: functional.layer_norm(a, (7,), w), (A, ROW)),
        "rms_norm": (lambda a, w: functional.rms_norm(a, (7,), w), (A, ROW)),
        "group_norm": (lambda a: functional.group_norm(a, 2), (floats(4, 6, 3),)),
    },
    "losses": {
        "cross_entropy": (lambda a, i: functional.cross_entropy(a, i, reduction="sum"), (A, LABELS)),
        "mean cross_entropy": (functional.cross_entropy, (A, LABELS)),
        "mse_loss": (lambda a, b: functional.mse_loss(a, b, reduction="sum"), (A, B)),
        "l1_loss": (functional.l1_loss, (A, B)),
    },
    "mean-losses": {
        "mse_loss": (functional.mse_loss, (A, B)),
        "huber_loss": (functional.huber_loss, (A, B)),
        "binary_cross_entropy": (functional.binary_cross_entropy_with_logits, (A, B.clamp(0, 1))),
    },
    "weighted-losses": {
        "nll_loss": (lambda a, i, w: functional.nll_loss(a, i, w), (floats(12, 7), classes(7, 12), ROW.abs() + 1)),
        "cross_entropy with ignored": (
            lambda a, i: functional.cross_entropy(a, i, ignore_index=1),
            (floats(12, 7), classes(7, 12)),
        ),
    },
    "even-losses": {
        "mse_loss": (functional.mse_loss, (IMAGES[0, :2], IMAGES[1, :2])),
        "huber_loss": (functional.huber_loss, (IMAGES[0, :2], IMAGES[1, :2])),
        "nll_loss": (functional.nll_loss, (floats(12, 6), classes(6, 12))),
    },
    "losses-of-batches": {
        "cross_entropy": (functional.cross_entropy, (floats(12, 6), classes(6, 12))),
        "cross_entropy with ignored": (
            lambda a, i: functional.cross_entropy(a, i, ignore_index=1),
            (floats(12, 6), classes(6, 12)),
        ),
        "cross_entropy with weights": (
            lambda a, i, w: functional.cross_entropy(a, i, w.detach()),
            (floats(12, 6), classes(6, 12), ROW[:6].abs() + 1),
        ),
        "cross_entropy of sequences": (functional.cross_entropy, (floats(4, 6, 2), classes(6, 4, 2))),
    },
    "batches": {"conv1d": (lambda a, w: functional.conv1d(a, w, padding=1), (IMAGES, KERNELS))},
    "convolution": {"conv1d": (lambda a, w: functional.conv1d(a, w, padding=1), (IMAGES, KERNELS))},
    "written": {
        "copy": (lambda a, b: a.clone().copy_(b), (A, B)),
        "sum": (lambda a, b: a.clone().add_(b, alpha=2), (A, B)),
        "difference": (lambda a, b: a.clone().sub_(b), (A, ROW)),
        "product": (lambda a, b: a.clone().mul_(b), (A, B)),
        "quotient": (lambda a, b: a.clone().div_(b.abs() + 1), (A, B)),
        "product added": (lambda a, b: a.clone().addcmul_(b, b, value=2), (A, B)),
        "between": (lambda a, b: a.clone().lerp_(b, 0.5), (A, B)),
        "where": (lambda a, b: a.clone().masked_fill_(b > 0, 3), (A, B)),
        "minimum": (lambda a: a.clone().clamp_(max=2), (A,)),
        "negative": (lambda a: a.clone().neg_(), (A,)),
        "absolute": (lambda a: a.clone().abs_(), (A,)),
        "zero": (lambda a: a.clone().zero_(), (A,)),
        "out": (lambda a, b: torch.add(a, b, out=torch.zeros_like(a)), (A, B)),
    },
    "alike": {
        "zeros": (torch.zeros_like, (A,)),
        "ones": (torch.ones_like, (A,)),
        "full": (lambda a: torch.full_like(a, 3), (A,)),
        "dtype": (lambda a: torch.ones_like(a, dtype=torch.int32), (A,)),
        "new": (lambda a: a.new_ones(2, 3), (A,)),
        "conversion": (lambda a: a.to(torch.float32), (A,)),
        "copy": (torch.clone, (A,)),
        "contiguous": (lambda a: a.t().contiguous(), (A,)),
    },
    "dtypes": {
        **{
            f"sum of {kind}": (lambda a, kind=kind: a.to(kind).sum(0), (A,))
            for kind in (torch.int32, torch.int16, torch.bool, torch.bfloat16)
        },
        "sum in float64": (lambda a: a.float().sum(1, dtype=torch.float64), (A,)),
        "sum of all in float32": (lambda a: a.sum(dtype=torch.float32), (A,)),
        "product in float32": (lambda a: a.sign().prod(0, dtype=torch.float32), (A,)),
        "product of int32": (lambda a: a.sign().to(torch.int32).prod(1), (A,)),
        "mean in float32": (lambda a: a.mean(0, dtype=torch.float32), (IMAGES[0, :2] * 2,)),
        "norm in float64": (lambda a: torch.linalg.vector_norm(a.float(), 1, 0, dtype=torch.float64), (A,)),
        "scan of int32": (lambda a: a.to(torch.int32).cumsum(0), (A,)),
        "scan in float32": (lambda a: a.cumsum(1, dtype=torch.float32), (A,)),
        "float32 and float64": (lambda a, b: a + b.float(), (A, B)),
        "int32 and float64": (lambda a, b: a.to(torch.int32) * b, (A, B)),
        "int32 and a number": (lambda a: a.to(torch.int32) * 0.5, (A,)),
    },
    "constants": {
        "number on the right": (lambda a: a + 2, (A,)),
        "number on the left": (lambda a: 2 + a, (A,)),
        "multiple of a number": (lambda a: torch.add(a, 2, alpha=3), (A,)),
        "added in place": (lambda a: a.clone().add_(2), (A,)),
        "subtracted": (lambda a: a - 2, (A,)),
        "multiple subtracted": (lambda a: torch.sub(a, 2, alpha=3), (A,)),
        "subtracted in place": (lambda a: a.clone().sub_(2), (A,)),
        "product": (lambda a: -2 * a, (A,)),
        "product in place": (lambda a: a.clone().mul_(-2), (A,)),
        "quotient": (lambda a: a / -2, (A,)),
        "rounded quotient": (lambda a: torch.div(a, 2, rounding_mode="floor"), (A,)),
        "remainder": (lambda a: a % 3, (A,)),
        "power": (lambda a: a**2, (A,)),
        "negative": (lambda a: -a, (A,)),
        "minimum": (lambda a: a.clamp(max=2), (A,)),
        "comparison": (lambda a: a >= 2, (A,)),
        "none of a tensor": (lambda a: a + torch.zeros_like(a), (A,)),
        "another sum": (lambda a: (a + a) - 3 * a, (A,)),
    },
    "numbers": {
        "item": (lambda a: torch.tensor(a.sum().item()), (A,)),
        "item of a maximum": (lambda a: torch.tensor(a.amax().item()), (A,)),
    },
    "pending-weights": {
        "lerp": (torch.lerp, (ROW, ROW + 1, floats(7, start=1))),
        "addcdiv": (torch.addcdiv, (ROW, ROW + 1, floats(7, start=1).abs() + 1)),
    },
    "counted-embeddings": {
        "counted embedding": (
            lambda i, w: functional.embedding(i, w, scale_grad_by_freq=True),
            (torch.tensor([1, 2, 1, 6, 1]), MATRIX),
        ),
    },
    "bits": {
        "int64": (lambda a: a.view(torch.int64), (A,)),
    },
    "written-sums": {
        "fill_": (lambda a: a.sum(0).fill_(2), (A,)),
        "zero_": (lambda a: a.sum(0).zero_(), (A,)),
    },
}
"""Operators by family, each with its name, a function, and the operands."""
NEEDED = {
    **dict.fromkeys(("dimensions", "dtypes", "reduced-by-index", "filled-by-index"), MORE_OPERATORS),
    "grouped-products": "torch.nn.functional.grouped_mm",
}
"""The name in PyTorch without which DTensor lacks a family's operators."""


REPLICATED, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
ONLY: dict[str, tuple[tuple[Placement, ...], ...]] = {
    "batches": ((REPLICATED, ROWS), (REPLICATED,)),
    "reduced-by-index": ((REPLICATED, ROWS, COLUMNS), (REPLICATED,), (REPLICATED, ROWS, COLUMNS)),
    **dict.fromkeys(
        ("larger-sources", "sources"),
        ((REPLICATED, ROWS, COLUMNS), (REPLICATED,), (REPLICATED, ROWS, COLUMNS)),
    ),
    # Ranks abort for other placements: docs/findings/dtensor_convolution.py, dtensor_convolution_of_width.py.
    "convolution": ((REPLICATED, ROWS), (REPLICATED, ROWS)),
}
"""The placements of each operand, for families that are not tried with all."""


def _placements(operands: Operands, family: str) -> Iterable[tuple[Placement, ...]]:
    return combinations(operands, ONLY.get(family))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.needs(torch=NEEDED[name])) if name in NEEDED else name
        for name in FAMILIES
        if name != "sums-of-parts"  # of which "scatters" tries the like
    ],
)
@pytest.mark.world(2)
def test_operators(world: World, family: str) -> None:
    """Operators that DTensor has must accept replicated inputs, and most must be there."""

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        mesh, wrong, refused, done = rank.mesh(rank.size), [], [], set()
        for name, (operator, given) in FAMILIES[family].items():
            operands = tuple(operand.to(rank.device) for operand in given)
            expected = operator(*operands)
            for placements in _placements(operands, family):
                case = f"{name} of {', '.join(map(str, placements))}"
                inputs = [distributed(x, p, rank, mesh) for x, p in zip(operands, placements, strict=True)]
                try:
                    result = operator(*inputs)
                except NotImplementedError:  # DTensor does not have the operator
                    continue
                except (RuntimeError, AssertionError):
                    assert not all(placement.is_replicate() for placement in placements), f"{case} is refused"
                    refused.append(case)
                    continue
                done.add(name)
                if not _same(expected, result.full_tensor() if isinstance(result, DTensor) else result):
                    wrong.append(case)
        assert len(done) > len(FAMILIES[family]) // 2
        return wrong, refused

    results = world.run(body)
    assert_on_ranks([([], results[0][1])] * world.size, results)


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_equal_on_other_meshes(world: World) -> None:
    """Each rank has a mesh of its own; one of them compares equal tensors, and the other does not."""

    def body(rank: Rank) -> list[str]:
        mesh = [DeviceMesh(rank.device.type, [i]) for i in range(rank.size)][rank.index]
        wrong = []
        for layout, changed in itertools.product((Replicate(), Shard(0), Shard(1)), range(2)):
            one = DTensor.from_local(torch.ones(2, 3, device=rank.device), mesh, [layout])
            other = DTensor.from_local(torch.ones(2, 3, device=rank.device), mesh, [layout])
            if rank.index == changed:
                other.to_local()[-1, -1] += 1
            answer = torch.equal(one, other)
            if answer == (rank.index == changed):
                wrong.append(f"{layout!r}, rank {changed} has another element: {answer}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("dim", [0, 1], ids=["that both have", "that one lacks"])
@pytest.mark.world(2)
def test_equal_of_other_shapes(world: World, dim: int) -> None:
    """Compare tensors of ones with others of as many elements; the first is sharded along a dimension."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for shape, layout in itertools.product(((4,), (8,), (1, 2)), (Replicate(), Shard(0))):
            one = distribute_tensor(torch.ones(2, 2, device=rank.device), mesh, [Shard(dim)])
            other = distribute_tensor(torch.ones(*shape, device=rank.device), mesh, [layout])
            for names, pair in ((f"S({dim})", (one, other)), (f"the other with S({dim})", (other, one))):
                try:
                    if torch.equal(*pair):
                        wrong.append(f"{names}, {shape} {layout}: equal")
                except IndexError as e:
                    wrong.append(f"{names}, {shape} {layout}: {e}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-41",
    "The backward of group_norm of DTensors works wherever its forward does, with the gradients of plain tensors.",
    source=f"{SOURCE}; torch.nn.functional.group_norm",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensor has no group_norm")
@pytest.mark.world(2)
def test_gradients_of_group_norm(world: World) -> None:
    """Replicas or shards of a batch, with a weight, a bias, both or neither."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for layout, given in itertools.product(
            (Replicate(), Shard(0)), ((), ("weight",), ("bias",), ("weight", "bias"))
        ):
            plain = [torch.arange(24.0).reshape(2, 4, 3).square(), *(torch.arange(1.0, 5.0) for _ in given)]
            whole = [x.to(rank.device).requires_grad_() for x in plain]
            layouts = (layout, *(Replicate() for _ in given))
            own = [
                distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(whole, layouts, strict=True)
            ]
            for x, *parameters in (whole, own):
                found = functional.group_norm(x, 2, **dict(zip(given, parameters, strict=True)))
                try:
                    found.square().sum().backward()
                except (RuntimeError, NotImplementedError) as e:
                    wrong.append(f"{layout} with {' and '.join(given) or 'neither'}: {str(e).splitlines()[0]}")
                    break
            else:
                for name, one, other in zip(("input", *given), whole, own, strict=True):
                    if not torch.allclose(one.grad, other.grad.full_tensor(), rtol=1e-4, atol=1e-4):
                        wrong.append(f"{layout} with {given}: gradient of {name}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


DIFFERENTIABLE = {
    "values": ("pointwise", "of-sums", "scans"),
    "elements": ("views", "indexing", "slices"),
    "layers": ("products", "normalization", "losses", "losses-of-batches"),
    "weights": ("pending-weights",),
    "counts": ("counted-embeddings",),
    "sums-of-parts": ("sums-of-parts",),
}
"""Families of which the gradients are tried."""


@requirement(
    "TP-OP-07",
    "An operator gives each of its DTensors the plain tensor's gradient, or raises an error on every rank.",
    source=SOURCE,
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.parametrize("kind", DIFFERENTIABLE)
@pytest.mark.world(2)
def test_gradients(world: World, kind: str) -> None:
    """Give one operand each of its placements, others are replicated; gradients arrive replicated or sharded."""

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        mesh, wrong, refused, done = rank.mesh(), [], [], set()
        operators = {f"{family}: {name}": x for family in DIFFERENTIABLE[kind] for name, x in FAMILIES[family].items()}
        for name, (operator, given) in operators.items():
            plain = [x.to(rank.device).requires_grad_(x.is_floating_point()) for x in map(torch.clone, given)]
            expected = operator(*plain)
            if not expected.requires_grad:
                continue
            weights = floats(*expected.shape, start=2).to(rank.device)
            (expected * weights).sum().backward()
            layouts = [p for p in _placements(given, "") if sum(not layout.is_replicate() for layout in p) <= 1]
            arriving = itertools.cycle([Replicate(), *map(Shard, range(expected.dim()))])
            for placements, back in zip(layouts, arriving, strict=False):
                case = f"{name} of {', '.join(map(str, placements))}, {back} on the way back"
                inputs = [distributed(x.detach(), p, rank, mesh) for x, p in zip(plain, placements, strict=True)]
                for x in inputs:
                    x.requires_grad_(x.is_floating_point())
                try:
                    (operator(*inputs) * distributed(weights, back, rank, mesh)).sum().full_tensor().backward()
                except (NotImplementedError, RuntimeError, AssertionError):
                    refused.append(case)
                    if all(placement.is_replicate() for placement in placements):  # DTensor lacks it, or its backward
                        break
                    continue
                done.add(name)
                for x, found in zip(plain, inputs, strict=True):
                    if x.grad is not None and not (found.grad is not None and _same(x.grad, found.grad.full_tensor())):
                        wrong.append(case)
        assert len(done) > len(operators) * 3 // 4
        return wrong, refused

    results = world.run(body)
    assert_on_ranks([([], results[0][1])] * world.size, results)


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("of", ["shards", "bytes", "pending sums"])
@pytest.mark.world(2)
def test_any(world: World, of: str) -> None:
    """Of shards, of shards of bytes, and of pending sums that cancel out on the ranks; of all and of a dimension."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        whole = torch.tensor([[0, 1], [2, 3], [0, 5], [0, 7]], device=rank.device, dtype=torch.uint8)
        if of == "bytes":
            found = distribute_tensor(whole, mesh, [Shard(0)])
        elif of == "shards":
            whole = whole.float()
            found = distribute_tensor(whole, mesh, [Shard(0)])
        else:
            sign = 1.0 if rank.index else -1.0
            found = DTensor.from_local(whole.float() * sign, mesh, [Partial()])
            whole = torch.zeros(4, 2, device=rank.device)
        for dims in ((), (0,), (1,)):
            right, got = whole.any(*dims), found.any(*dims).full_tensor()
            if right.dtype != got.dtype or not torch.equal(right, got):
                wrong.append(f"any{dims}: {got.tolist()} and not {right.tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_pending(world: World) -> None:
    """Combine partial values with numbers and with replicated tensors, or reduce them further."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        parts = torch.stack([A, B]).to(rank.device) * 2
        for op, reduced in REDUCED.items():
            whole = reduced(parts, 0)
            for family in "constants", "pointwise", "of-sums", "reductions":
                for name, (operator, (_, *others)) in FAMILIES[family].items():
                    plain = [other.to(rank.device) for other in others]
                    pending = DTensor.from_local(parts[rank.index].clone(), mesh, [Partial(op)])
                    replicated = [DTensor.from_local(other, mesh, [Replicate()]) for other in plain]
                    try:
                        result: Any = operator(pending, *replicated)
                    except RuntimeError as e:  # since 2.15, what would no longer be pending is refused in place
                        if "in place" not in name or "placement changes are not supported" not in str(e):
                            raise
                        continue
                    if not _same(operator(whole, *plain), result.full_tensor()):
                        wrong.append(f"{name} of {op}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


LATER: dict[str, Operator] = {
    "sum": torch.add,
    "difference": torch.sub,
    "product": torch.mul,
    "quotient": torch.div,
    "quotient in place": lambda a, b: a.clone().div_(b),
    "floored quotient": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncated quotient": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "power": torch.pow,
    "angle": torch.atan2,
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "maximum": torch.maximum,
    "comparison": torch.lt,
    "where": lambda a, b: torch.where(a > 3, a, b),
    "condition": lambda a, b: torch.where(b > 3, a, 0),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "clamp": lambda a, b: torch.clamp(a, max=b),
    "number minus": lambda a, b: 3 - b,
    "number by": lambda a, b: 3 / b,
    "number to the power": lambda a, b: 2**b,
    "plain number by": lambda a, b: torch.tensor(3.0, dtype=torch.float64) / b,
    "reciprocal": lambda a, b: b.reciprocal(),
    "product of matrices": lambda a, b: a @ b.t(),
    "product of a column": lambda a, b: a / b[:, :1],
    "mean of a sum": lambda a, b: a.sum() / b.sum(),
}
"""Functions of two tensors, of which the second one is pending."""


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_pending_later(world: World) -> None:
    """Put a number or another tensor before it, which is replicated and sharded, or for all but sums either of them."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        whole, parts = A.to(rank.device).abs() + 1, torch.stack([A, B]).to(rank.device).abs() + 1
        for i, (name, operator) in enumerate(LATER.items()):
            for j, (op, reduced) in enumerate(REDUCED.items()):
                turn: Placement = (Replicate(), Shard(0), Shard(1))[(i + j) % 3]
                for layout in (Replicate(), Shard(i % 2)) if op == "sum" else (turn,):
                    pending = DTensor.from_local(parts[rank.index].clone(), mesh, [Partial(op)])
                    found = operator(distributed(whole, layout, rank, mesh), pending)
                    if not _same(operator(whole, reduced(parts, 0)), found.full_tensor()):
                        wrong.append(f"{name} of {layout} and {op}")
                    if not torch.equal(parts[rank.index], pending.to_local()):
                        wrong.append(f"{name} of {layout} and {op}: changes the pending tensor")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def _same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two tensors have one dtype and shape, and equal values once rounded to float32."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if expected.is_floating_point():
        expected, found = expected.float(), found.float()
    return torch.equal(expected, found)
