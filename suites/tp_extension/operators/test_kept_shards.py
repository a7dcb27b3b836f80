"""Operators that leave shards of one dimension alone, or a gradient pending: what they keep without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operands, Operator, classes, distributed, floats, right
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensor gathers for more operators")
R, ROWS, COLUMNS, LAST, SUM, AVERAGE = Replicate(), Shard(0), Shard(1), Shard(2), Partial(), Partial("avg")
LINE, IMAGES, VOLUMES = floats(4, 3, 8), floats(4, 3, 6, 6), floats(4, 3, 4, 4, 4)
CUBE = (torch.arange(4 * 3 * 5) * 7).remainder(61).double().view(4, 3, 5)
"""Different numbers."""
MATRICES, SIDES = floats(2, 3, 3, 3) / 8 + 5 * torch.eye(3, dtype=torch.float64), floats(2, 3, 3, 2)
POSITIVE, UPPER = MATRICES @ MATRICES.mT, MATRICES.triu()
INDEX, OTHER, TABLE = torch.tensor([2, 0, 1]), torch.tensor([1, 1, 0]), torch.tensor([[1, 0], [2, 2]])

Layouts = tuple[Placement, ...]
Case = tuple[Operator, Operands, tuple[tuple[Layouts, Placement], ...]]
"""An operator, its operands, and these operands' placements, each with the result's."""


def placed(whole: torch.Tensor, layout: Placement, rank: Rank) -> DTensor:
    """Return a DTensor of a tensor, or of two ranks' different parts that are reduced to it."""
    if not isinstance(layout, Partial):
        return distributed(whole, layout, rank, rank.mesh())
    parts = {
        "sum": (whole - 1, whole * 0 + 1),
        "avg": (whole * 2 - 1, whole * 0 + 1),
        "max": (whole, whole - 1),
        "min": (whole, whole + 1),
    }
    return DTensor.from_local(parts[layout.reduce_op][rank.index], rank.mesh(), [layout])


def kept(rank: Rank, cases: Iterable[tuple[str, Case]], *, back: bool = False) -> list[str]:
    """Return what is wrong with results, or, on the way back, with gradients of the first operand."""
    wrong = []
    for name, (operator, given, turns) in cases:
        whole = [x.to(rank.device) for x in given]
        plain = [whole[0].clone().requires_grad_(back), *whole[1:]]
        expected = operator(*plain)
        weights = floats(*expected.shape, start=2).to(rank.device) if back else expected
        if back:
            expected.backward(weights)
        for layouts, due in turns:
            own: Any = [placed(x, p, rank) for x, p in zip(whole, layouts, strict=True)]
            own[0].requires_grad_(back)
            case, at = f"{name} of {layouts}", messages.launched()
            found = operator(*own)
            if (found.placements, messages.launched() - at) != ((due,), 0):
                wrong.append(f"{case}: {found.placements} after {messages.launched() - at} collectives")
            if not right(expected.detach(), found.detach()):
                wrong.append(case)
            if back:
                gradient, at = placed(weights, due, rank), messages.launched()
                found.backward(gradient)
                if own[0].grad.placements != layouts[:1] or messages.launched() != at:
                    count = messages.launched() - at
                    wrong.append(f"{case}: gradient in {own[0].grad.placements} after {count} collectives")
                if not right(plain[0].grad, own[0].grad):  # type: ignore[arg-type]
                    wrong.append(f"{case}: gradient")
    return wrong


def whole(tensor: torch.Tensor, x: Any) -> Any:
    """Return a tensor as a replicated DTensor, if the other one is a DTensor."""
    tensor = tensor.to(x.device)
    return DTensor.from_local(tensor, x.device_mesh, [R]) if isinstance(x, DTensor) else tensor


def _pool(name: str) -> Operator:
    return lambda x: getattr(functional, name)(x, 2)


def _larger(mode: str) -> Operator:
    return lambda x: functional.interpolate(x, scale_factor=2, mode=mode)


LARGER = {"linear": LINE, "bilinear": IMAGES, "bicubic": IMAGES, "trilinear": VOLUMES, "nearest": VOLUMES}
OF_IMAGES: dict[str, dict[str, Case]] = {
    "back": {
        **{
            name: (_pool(name), (given,), (((turn,), turn),))
            for name, given, turn in (
                ("max_pool1d", LINE, COLUMNS),
                ("max_pool2d", IMAGES, COLUMNS),
                ("max_pool2d", IMAGES[0], ROWS),
                ("adaptive_avg_pool1d", LINE, COLUMNS),
                ("adaptive_avg_pool2d", IMAGES, ROWS),
                ("adaptive_avg_pool2d", IMAGES, COLUMNS),
            )
        },
        **{
            f"interpolation, {mode}": (_larger(mode), (given,), (((COLUMNS,), COLUMNS), ((pending,), pending)))
            for pending, (mode, given) in zip((SUM, AVERAGE) * 3, LARGER.items(), strict=False)
        },
        "batch_norm": (
            lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
            (IMAGES, IMAGES[0, :, 0, 0], IMAGES[1, :, 0, 0]),
            (((COLUMNS, ROWS, ROWS), COLUMNS),),
        ),
        "max_unpool2d": (
            lambda x, i: functional.max_unpool2d(x, i, 2),
            (floats(4, 3, 3, 3), functional.max_pool2d(IMAGES, 2, return_indices=True)[1]),
            (((ROWS, ROWS), ROWS), ((COLUMNS, COLUMNS), COLUMNS)),
        ),
        "grid_sample": (
            lambda x, grid: functional.grid_sample(x, grid, align_corners=False),
            (IMAGES, floats(4, 2, 2, 2) / 8),
            (((ROWS, ROWS), ROWS),),
        ),
        "conv2d": (
            functional.conv2d,
            (IMAGES, floats(2, 3, 3, 3), floats(2)),
            (((ROWS, R, R), ROWS),),
        ),
    },
    "forth": {
        **{
            name: (_pool(name), (given,), tuple(((turn,), turn) for turn in turns))
            for name, given, turns in (
                ("avg_pool1d", LINE, (ROWS, SUM)),
                ("avg_pool2d", IMAGES, (COLUMNS, AVERAGE)),
                ("avg_pool3d", VOLUMES, (COLUMNS, SUM)),
                ("adaptive_avg_pool1d", LINE, (AVERAGE,)),
                ("adaptive_avg_pool2d", IMAGES, (SUM,)),
                ("adaptive_avg_pool3d", VOLUMES, (COLUMNS, AVERAGE)),
                ("adaptive_max_pool1d", LINE, (COLUMNS,)),
                ("adaptive_max_pool2d", IMAGES, (COLUMNS,)),
                ("adaptive_max_pool3d", VOLUMES, (COLUMNS, ROWS)),
                ("max_pool3d", VOLUMES, (COLUMNS, ROWS)),
            )
        },
        "batch_norm with statistics": (
            lambda x, mean, variance, w: functional.batch_norm(x, mean, variance, w),
            (IMAGES, floats(3), floats(3).abs() + 1, floats(3, start=2)),
            (((COLUMNS, ROWS, ROWS, ROWS), COLUMNS),),
        ),
        "grid_sample": (
            lambda x, grid: functional.grid_sample(x, grid, align_corners=False),
            (IMAGES, floats(4, 2, 2, 2) / 8),
            (((SUM, R), SUM), ((AVERAGE, R), AVERAGE)),
        ),
        "group_norm": (
            lambda x, w: functional.group_norm(x, 3, w),
            (IMAGES, floats(3, start=2)),
            (((ROWS, R), ROWS),),
        ),
    },
}
"""Operators that treat each channel or each image alone, and whether the way back is free, too."""

Along = Callable[[Any, int, bool], Any]
REDUCED_TO: dict[str, Along] = {
    **{
        name: lambda x, dim, keepdim, name=name: getattr(torch, name)(x, dim, keepdim=keepdim)
        for name in ("sum", "mean", "amax", "amin", "prod", "argmin", "std", "var", "any", "all", "nansum")
    },
    **{
        f"values of {name}": lambda x, dim, keepdim, name=name: getattr(torch, name)(x, dim, keepdim).values
        for name in ("median", "nanmedian", "mode", "max")
    },
    **{
        f"positions of {name}": lambda x, dim, keepdim, name=name: getattr(torch, name)(x, dim, keepdim).indices
        for name in ("median", "min")
    },
    "kthvalue": lambda x, dim, keepdim: x.kthvalue(2, dim, keepdim).values,
    "vector_norm": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 3, dim, keepdim),
    "select": lambda x, dim, _: x.select(dim, 1),
    "unbind": lambda x, dim, _: x.unbind(dim)[1],
}
TURNED: dict[str, Along] = {
    **{
        name: lambda x, dim, _, name=name: getattr(torch, name)(x, dim)
        for name in ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
    },
    **{name: lambda x, dim, _, name=name: getattr(torch, name)(x, dim).values for name in ("sort", "cummax", "cummin")},
    "topk": lambda x, dim, _: x.topk(2, dim).values,
    "stable sort": lambda x, dim, _: x.sort(dim=dim, stable=True).values,
    "flip": lambda x, dim, _: x.flip(dim),
    "roll": lambda x, dim, _: x.roll(1, dim),
    "fft": lambda x, dim, _: torch.fft.fft(x, dim=dim).abs(),
    "split": lambda x, dim, _: x.split(2, dim)[0],
    "narrow": lambda x, dim, _: x.narrow(dim, 1, 2),
    "index_select": lambda x, dim, _: x.index_select(dim, whole(INDEX[:2], x)),
    "index_fill": lambda x, dim, _: x.index_fill(dim, whole(INDEX[:2], x), 9.0),
    "index_add": lambda x, dim, _: x.index_add(dim, whole(INDEX[:1], x), x.narrow(dim, 0, 1)),
    "linalg.cross": lambda x, dim, _: torch.linalg.cross(x.narrow(dim, 0, 3), x.narrow(dim, 0, 3) * 2 + 1, dim=dim),
}
"""Operators along a dimension, with or without what is left of it."""
DIMENSIONS = ((0, 2, False), (1, 2, True)), ((2, 0, False), (0, 1, False), (1, 0, True))
"""Dimensions of the operator and of the shards, the last or others, and whether the operator keeps its dimension."""


def _along() -> dict[str, dict[str, Case]]:
    """Return operators with two dimensions each, such that their neighbours have others."""
    cases: dict[str, dict[str, Case]] = {}
    for kind, operators in {"to fewer": REDUCED_TO, "to as many": TURNED}.items():
        cases[kind] = {}
        for i, (name, operator) in enumerate(operators.items()):
            for dim, shard, keepdim in (DIMENSIONS[0][i % 2], DIMENSIONS[1][i % 3]):
                left = kind == "to as many" or (keepdim and name not in ("select", "unbind"))
                due = shard - (shard > dim and not left)
                cases[kind][f"{name} over {dim}, {keepdim=}, for {shard}"] = (
                    lambda x, operator=operator, dim=dim, keepdim=keepdim: operator(x, dim, keepdim),
                    (CUBE,),
                    (((Shard(shard),), Shard(due)),),
                )
    return cases


def _batches(operator: Operator, *given: torch.Tensor, pending: Layouts = ()) -> Case:
    """Return a case of batches that are sharded over each of their two dimensions; a last operand may be pending."""
    layouts = [((turn,) * len(given), turn) for turn in (ROWS, COLUMNS)]
    return operator, given, (*layouts, *(((*[R] * (len(given) - 1), p), p) for p in pending))


OF_MATRICES: dict[str, Case] = {
    "inv_ex": _batches(lambda a: torch.linalg.inv_ex(a).inverse, MATRICES),
    "det": _batches(torch.linalg.det, MATRICES),
    "slogdet": _batches(lambda a: torch.linalg.slogdet(a).logabsdet, MATRICES),
    "cholesky_ex": _batches(lambda a: torch.linalg.cholesky_ex(a).L, POSITIVE),
    "cholesky_inverse": _batches(torch.cholesky_inverse, MATRICES.tril()),
    "matrix_exp": _batches(torch.linalg.matrix_exp, MATRICES / 8),
    "pinv": _batches(torch.linalg.pinv, MATRICES),
    "lu": _batches(lambda a: torch.linalg.lu(a).U, MATRICES),
    "lu_factor_ex": _batches(lambda a: torch.linalg.lu_factor_ex(a).LU, MATRICES),
    "ldl_factor_ex": _batches(lambda a: torch.linalg.ldl_factor_ex(a).LD, POSITIVE),
    "geqrf": _batches(lambda a: torch.geqrf(a).a, MATRICES),
    "eig": _batches(lambda a: torch.linalg.eigvals(a).abs(), POSITIVE),
    "householder_product": _batches(torch.linalg.householder_product, MATRICES, SIDES[..., 0]),
    "solve_ex": _batches(lambda a, b: torch.linalg.solve_ex(a, b).result, MATRICES, SIDES, pending=(SUM,)),
    "solve_triangular": _batches(
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), UPPER, SIDES, pending=(SUM, AVERAGE)
    ),
    "cholesky_solve": _batches(lambda a, b: torch.cholesky_solve(b, a), MATRICES.tril(), SIDES, pending=(SUM,)),
    "lu_solve": _batches(
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(a)[:2], b), MATRICES, SIDES, pending=(SUM,)
    ),
    "ldl_solve": _batches(
        lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor_ex(a)[:2], b), POSITIVE, SIDES, pending=(SUM,)
    ),
    "ormqr": _batches(lambda a, b: torch.ormqr(*torch.geqrf(a), b), MATRICES, SIDES, pending=(SUM,)),
}
"""Operators on batches of matrices."""


def _put(*index: int | None) -> Operator:
    """Return a function that writes its last operand to where its second and third ones say."""

    def written(x: Any, *given: Any) -> Any:
        y = x.clone()
        y[tuple(slice(None) if i is None else given[i] for i in index)] = given[-1]
        return y

    return written


PENDING: Layouts = (SUM, AVERAGE, Partial("max"), Partial("min"))
EACH = classes(3, 4, 3, 5)
BY_INDEX: dict[str, dict[str, Case]] = {
    "read": {
        "index_select": (
            lambda x, i: x.index_select(-1, i),
            (CUBE, INDEX),
            (((COLUMNS, R), COLUMNS), ((R, ROWS), LAST), *(((p, R), p) for p in PENDING)),
        ),
        "rows": (lambda x, i: x[i], (CUBE, INDEX), (((LAST, R), LAST), ((SUM, R), SUM), ((R, ROWS), ROWS))),
        "rows by a matrix": (
            lambda x, i: x[i],
            (CUBE, TABLE),
            (((COLUMNS, R), LAST), ((LAST, R), Shard(3)), ((AVERAGE, R), AVERAGE), ((R, COLUMNS), COLUMNS)),
        ),
        "last by a matrix": (
            lambda x, i: x[..., i],
            (CUBE, TABLE),
            (((ROWS, R), ROWS), ((COLUMNS, R), COLUMNS), ((R, ROWS), LAST), ((R, COLUMNS), Shard(3))),
        ),
        "pairs": (
            lambda x, i, j: x[:, i, j],
            (CUBE, INDEX, OTHER),
            (((ROWS, R, R), ROWS), ((R, ROWS, ROWS), COLUMNS)),
        ),
        "pairs apart": (
            lambda x, i, j: x[i, :, j],
            (CUBE, INDEX, OTHER),
            (((COLUMNS, R, R), COLUMNS), ((R, ROWS, ROWS), ROWS)),
        ),
        "later pairs apart": (
            lambda x, i, j: x[:, i, :, j],
            (MATRICES, INDEX, OTHER),
            (((ROWS, R, R), COLUMNS), ((LAST, R, R), LAST), ((R, ROWS, ROWS), ROWS)),
        ),
        "pairs of unequal dimensions": (
            lambda x, i, j: x[i, j],
            (CUBE, TABLE, OTHER[:2]),
            (((LAST, R, R), LAST), ((R, ROWS, R), ROWS), ((R, COLUMNS, ROWS), COLUMNS)),
        ),
        "pairs with a column": (
            lambda x, i, j: x[i, j],
            (CUBE, TABLE, TABLE[:, :1]),
            (((R, ROWS, ROWS), ROWS), ((R, COLUMNS, R), COLUMNS)),
        ),
        "gather": (
            lambda x, i: x.gather(2, i),
            (CUBE, EACH),
            (((ROWS, ROWS), ROWS), ((COLUMNS, COLUMNS), COLUMNS), ((R, LAST), LAST)),
        ),
        "gather of rows": (lambda x, i: x.gather(0, i), (CUBE, EACH), (((LAST, LAST), LAST), ((R, ROWS), ROWS))),
    },
    "written": {
        "rows": (_put(0), (CUBE, INDEX, floats(3, 3, 5)), (((LAST, R, LAST), LAST),)),
        "columns": (_put(None, 0), (CUBE, INDEX, floats(4, 3, 5)), (((ROWS, R, ROWS), ROWS), ((LAST, R, LAST), LAST))),
        "columns by a matrix": (
            _put(None, 0),
            (CUBE, TABLE, floats(4, 2, 2, 5)),
            (((ROWS, R, ROWS), ROWS), ((LAST, R, Shard(3)), LAST)),
        ),
        "pairs": (_put(0, 1), (CUBE, INDEX, OTHER, floats(3, 5)), (((LAST, R, R, COLUMNS), LAST),)),
        "later pairs": (_put(None, 0, 1), (CUBE, INDEX, OTHER, floats(4, 3)), (((ROWS, R, R, ROWS), ROWS),)),
        "pairs apart": (_put(0, None, 1), (CUBE, INDEX, OTHER, floats(3, 3)), (((COLUMNS, R, R, COLUMNS), COLUMNS),)),
        "later pairs apart": (
            _put(None, 0, None, 1),
            (MATRICES, INDEX, OTHER, floats(3, 2, 3)),
            (((ROWS, R, R, COLUMNS), ROWS), ((LAST, R, R, LAST), LAST)),
        ),
        "rows of one vector": (
            _put(0),
            (CUBE, INDEX, floats(5)),
            (((COLUMNS, R, R), COLUMNS), ((LAST, R, ROWS), LAST)),
        ),
        "rows of one row": (
            _put(0),
            (CUBE, INDEX, floats(1, 5)),
            (((COLUMNS, R, R), COLUMNS), ((LAST, R, COLUMNS), LAST)),
        ),
        "pending rows": (
            lambda x, i, y: x.index_put((i,), y),
            (CUBE, INDEX, floats(3, 3, 5)),
            (((SUM, R, SUM), SUM),),
        ),
        "index_fill": (
            lambda x, i: x.index_fill(1, i, 9.0),
            (CUBE, INDEX[:2]),
            tuple(((p, R), p) for p in PENDING[1:]),
        ),
        "index_fill of a tensor": (
            lambda x, i, y: x.index_fill(1, i, y),
            (CUBE, INDEX[:2], CUBE[0, 0, 1]),
            (((LAST, R, R), LAST), *(((p, R, p), p) for p in PENDING)),
        ),
        "index_reduce": (
            lambda x, i, y: x.index_reduce(1, i, y, "amax"),
            (CUBE, INDEX, CUBE + 1),
            (((ROWS, R, ROWS), ROWS), ((LAST, R, LAST), LAST)),
        ),
        "index_copy": (
            lambda x, i, y: x.index_copy(1, i, y),
            (CUBE, INDEX, CUBE + 1),
            (((LAST, R, LAST), LAST),),
        ),
        **{
            f"scatter over {dim}": (
                lambda x, i, y, dim=dim: x.scatter(dim, i, y),
                (CUBE, EACH, CUBE + 1),
                (((shards,) * 3, shards),),
            )
            for dim, shards in ((0, LAST), (2, COLUMNS))
        },
        "scatter of a number": (
            lambda x, i: x.scatter(1, i, 7.0),
            (CUBE, EACH),
            (((LAST, LAST), LAST),),
        ),
        "scatter_add": (lambda x, i, y: x.scatter_add(-2, i, y), (CUBE, EACH, CUBE + 1), (((LAST,) * 3, LAST),)),
    },
    "scattered": {
        **{
            f"select_scatter over {dim}": (
                lambda x, y, dim=dim: x.select_scatter(y, dim, 1),
                (CUBE, CUBE.select(dim, 0) + 1),
                tuple(((Shard(d), Shard(d - (d > dim % 3))), Shard(d)) for d in range(3) if d != dim % 3),
            )
            for dim in (0, 1, -1)
        },
        **{
            f"slice_scatter over {dim}": (
                lambda x, y, dim=dim: x.slice_scatter(y, dim, 1, 3),
                (CUBE, CUBE.narrow(dim, 0, 2) + 1),
                tuple(((Shard(d), Shard(d)), Shard(d)) for d in range(3) if d != dim % 3),
            )
            for dim in (0, 1, -1)
        },
        **{
            f"diagonal_scatter over {one} and {two}": (
                lambda x, y, one=one, two=two: x.diagonal_scatter(y, 0, one, two),
                (CUBE, CUBE.diagonal(0, one, two) + 1),
                (((Shard(left), ROWS), Shard(left)),),
            )
            for one, two, left in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (-1, 1, 0))
        },
    },
}
"""Operators that read or write by positions."""

X, W, BATCH, OTHERS = floats(4, 6), floats(6, 8), floats(2, 4, 6), floats(2, 6, 8)
PADDED = {(1, 0, 0, 0): COLUMNS, (0, 1): ROWS, (0, 0, 1, 0): LAST, (0, 0, 0, 2): ROWS, (0, 0, 0, 0, 0, 1): LAST}
OF_ROWS: dict[str, dict[str, Case]] = {
    "products": {
        "addmm of a row": (
            lambda a, w, b: torch.addmm(b, a, w),
            (X, W, floats(8)),
            (((R, COLUMNS, ROWS), COLUMNS), ((ROWS, R, R), ROWS), ((COLUMNS, ROWS, SUM), SUM))
            + tuple(x for p in (SUM, AVERAGE) for x in (((p, R, p), p), ((R, p, p), p))),
        ),
        "addmm of a matrix": (
            lambda a, w, b: torch.addmm(b, a, w),
            (X, W, floats(4, 8)),
            (((ROWS, R, ROWS), ROWS), ((R, COLUMNS, COLUMNS), COLUMNS)),
        ),
        "addmm of one row": (
            lambda a, w, b: torch.addmm(b, a, w),
            (X, W, floats(1, 8)),
            (((ROWS, R, R), ROWS), ((R, COLUMNS, COLUMNS), COLUMNS)),
        ),
        "addmm of a column": (
            lambda a, w, b: torch.addmm(b, a, w),
            (X, W, floats(4, 1)),
            (((ROWS, R, ROWS), ROWS), ((R, COLUMNS, R), COLUMNS)),
        ),
        "baddbmm": (
            lambda a, w, b: torch.baddbmm(b, a, w),
            (BATCH, OTHERS, floats(2, 4, 8)),
            (
                ((ROWS,) * 3, ROWS),
                ((COLUMNS, R, COLUMNS), COLUMNS),
                ((R, LAST, LAST), LAST),
                ((LAST, COLUMNS, SUM), SUM),
            ),
        ),
        "baddbmm of a matrix": (
            lambda a, w, b: torch.baddbmm(b, a, w),
            (BATCH, OTHERS, floats(4, 8)),
            (((ROWS, ROWS, R), ROWS), ((COLUMNS, R, ROWS), COLUMNS), ((R, LAST, COLUMNS), LAST)),
        ),
        "baddbmm of one matrix": (
            lambda a, w, b: torch.baddbmm(b, a, w),
            (BATCH, OTHERS, floats(1, 4, 8)),
            (((ROWS, ROWS, R), ROWS), ((COLUMNS, R, COLUMNS), COLUMNS)),
        ),
        "bmm": (
            torch.bmm,
            (BATCH, OTHERS),
            (((COLUMNS, R), COLUMNS), ((R, LAST), LAST), ((LAST, COLUMNS), SUM))
            + tuple(x for p in (SUM, AVERAGE) for x in (((p, R), p), ((R, p), p))),
        ),
        "embedding": (
            lambda w, i: functional.embedding(i, w),
            (W, classes(6, 4, 3)),
            (((R, COLUMNS), COLUMNS), ((COLUMNS, R), LAST)),
        ),
    },
    "others": {
        **{
            f"padding {pad}": (
                lambda x, pad=pad: functional.pad(x, pad, value=2.0),
                (CUBE,),
                (((shards,), shards), ((pending,), pending)),
            )
            for pending, (pad, shards) in zip(PENDING[1:] * 2, PADDED.items(), strict=False)
        },
        "padding by zeros": (lambda x: functional.pad(x, (1, 1, 0, 2)), (CUBE,), tuple(((p,), p) for p in PENDING)),
        "no padding": (lambda x: functional.pad(x, (0, 0), value=2.0), (CUBE,), (((LAST,), LAST), ((SUM,), SUM))),
        "layer_norm": (
            lambda x, w, b: functional.layer_norm(x, (5,), w, b),
            (CUBE, floats(5), floats(5, start=2)),
            (((COLUMNS, R, R), COLUMNS),),
        ),
        "rms_norm": (lambda x, w: functional.rms_norm(x, (5,), w), (CUBE, floats(5)), (((COLUMNS, R), COLUMNS),)),
        "view_as_complex": (
            torch.view_as_complex,
            (floats(4, 6, 2),),
            tuple(((p,), p) for p in (ROWS, COLUMNS, SUM, AVERAGE)),
        ),
        "bucketize": (
            torch.bucketize,
            (CUBE, torch.arange(6).double() * 9),
            (((LAST, R), LAST), ((R, ROWS), SUM), *(((p, R), p) for p in PENDING[2:])),
        ),
        "conversion": (lambda x: x.to(torch.int32), (CUBE,), tuple(((p,), p) for p in (LAST, *PENDING[2:]))),
        "histogram": (lambda x: x.histc(4, 0, 60), (CUBE,), (((LAST,), SUM),)),
        "nll_loss of images": (
            lambda x, t: functional.nll_loss(x, t, reduction="none"),
            (IMAGES, classes(3, 4, 6, 6)),
            (((LAST, COLUMNS), COLUMNS), ((Shard(3), LAST), LAST)),
        ),
        "sum of nll_loss of images": (
            lambda x, t: functional.nll_loss(x, t, reduction="sum"),
            (IMAGES, classes(3, 4, 6, 6)),
            (((LAST, COLUMNS), SUM), ((Shard(3), LAST), SUM)),
        ),
        "maximum": (
            torch.maximum,
            (CUBE, CUBE.flip(0)),
            tuple(x for p in PENDING[2:] for x in (((p, R), p), ((R, p), p))),
        ),
        "logaddexp": (
            torch.logaddexp,
            (CUBE, CUBE.flip(0)),
            tuple(x for p in PENDING[2:] for x in (((p, R), p), ((R, p), p))),
        ),
        "negative": (torch.neg, (CUBE,), (((PENDING[2],), PENDING[3]), ((PENDING[3],), PENDING[2]))),
    },
}
"""Operators on rows, on sides of matrices, or on pending parts."""

CASES: dict[str, tuple[dict[str, Case], bool]] = {
    **{f"images-{kind}": (cases, kind == "back") for kind, cases in OF_IMAGES.items()},
    **{f"along-{kind.replace(' ', '-')}": (cases, False) for kind, cases in _along().items()},
    "matrices": (OF_MATRICES, False),
    **{f"index-{kind}": (cases, False) for kind, cases in BY_INDEX.items()},
    **{f"rows-{kind}": (cases, False) for kind, cases in OF_ROWS.items()},
}


@requirement(
    "TP-FREE-32",
    "An operator leaves its result sharded or pending, without communication, if its inputs allow that.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary; Partial",
)
@requirement(
    "TP-FREE-02",
    "The backward of an operator that treats each shard on its own communicates no more than its forward.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.world(2)
def test_kept(world: World, kind: str) -> None:
    """Shard dimensions that the operator leaves alone, the first, a middle or the last one."""
    cases, back = CASES[kind]
    assert_on_ranks([[]] * world.size, world.run(lambda rank: kept(rank, cases.items(), back=back)))


LINEAR: dict[str, tuple[Operator, torch.Tensor, Layouts]] = {
    **{
        name: (operator, given, (SUM, AVERAGE))
        for name, operator, given in (
            ("max_pool1d", _pool("max_pool1d"), LINE),
            ("max_pool2d", _pool("max_pool2d"), IMAGES),
            ("interpolation", _larger("bilinear"), IMAGES),
            ("product", lambda x: x * whole(CUBE + 1, x), CUBE),
            ("quotient", lambda x: x / whole(CUBE + 1, x), CUBE),
            ("linear", lambda x: functional.linear(x, whole(floats(8, 5), x)), CUBE),
            ("bmm", lambda x: torch.bmm(x, whole(floats(4, 5, 2), x)), CUBE),
            ("padding", lambda x: functional.pad(x, (1, 1)), CUBE),
            ("flip", lambda x: x.flip(1), CUBE),
            ("roll", lambda x: x.roll(1, 1), CUBE),
            ("cat", lambda x: torch.cat([x, -x], 1), CUBE),
            ("stack", lambda x: torch.stack([x, -x]), CUBE),
            ("mean", lambda x: x.mean(1), CUBE),
            ("view", lambda x: x.view(12, 5), CUBE),
            ("columns", lambda x: x[:, 1:], CUBE),
            ("column", lambda x: x[:, 1], CUBE),
            ("conversion", lambda x: x.float(), CUBE),
            ("lerp", lambda x: torch.lerp(x, whole(CUBE + 1, x), 0.5), CUBE),
            ("variance", lambda x: x.var(1), CUBE),
            ("triangle", lambda x: torch.linalg.solve_triangular(whole(UPPER, x), x, upper=True), SIDES),
        )
    },
    **{
        name: (operator, given, (SUM,))
        for name, operator, given in (
            ("embedding", lambda x: functional.embedding(whole(classes(6, 4, 3), x), x), W),
            ("index_select", lambda x: x.index_select(1, whole(INDEX, x)), CUBE),
            ("rows", lambda x: x[whole(INDEX, x)], CUBE),
            ("copies", lambda x: x.unsqueeze(0).expand(2, 4, 3, 5), CUBE),
            ("repeated", lambda x: x.repeat(2, 1, 1), CUBE),
        )
    },
}
"""Operators whose backward is linear, with a whole operand and the placements of the gradient that arrives."""


@requirement(
    "TP-FREE-4200",
    "A pending gradient stays pending, without communication, in the backward of an operator that is linear in it.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary; Partial",
)
@pytest.mark.world(2)
def test_pending_gradients(world: World) -> None:
    """The operand is whole, and the gradient of the result is a pending sum or average."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (operator, given, arriving) in LINEAR.items():
            plain = given.clone().to(rank.device).requires_grad_()
            expected = operator(plain)
            weights = floats(*expected.shape, start=2).to(rank.device, expected.dtype)
            expected.backward(weights)
            for placement in arriving:
                own: Any = distribute_tensor(
                    given.to(rank.device), rank.mesh(), [R], src_data_rank=None
                ).requires_grad_()
                found, gradient = operator(own), placed(weights, placement, rank)
                at = messages.launched()
                found.backward(gradient)
                if (own.grad.placements, messages.launched() - at) != ((placement,), 0):
                    count = messages.launched() - at
                    wrong.append(f"{name} of {placement}: {own.grad.placements} after {count} collectives")
                if not right(plain.grad, own.grad):  # type: ignore[arg-type]
                    wrong.append(f"{name} of {placement}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
