"""Operators of transformers, convolutional and recommendation models take DTensors in all of their placements.

Operators that PyTorch decomposes into others are among them, as are those of which an operand may be pending. Sizes are
not divisible by the world size, but for dimensions that a view joins or splits, which PyTorch refuses to do unevenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operands, Operator, attention, choices, classes, combinations, distributed, floats, right
from fixtures.placements import MORE_OPERATORS, laid_out
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"

A, B = floats(5, 7) / 3, floats(5, 7, start=3)
ABOVE = A.abs() + 1
ROW, COLUMN, MATRIX, CUBE = floats(7), floats(5, start=1), floats(7, 4, start=1), floats(2, 5, 6)
EVEN = floats(2, 4, 6)
QUERIES, KEYS, VALUES = (floats(2, 4, 5, 4, start=start) / 4 for start in (0, 3, 5))
IMAGES, KERNELS = floats(3, 4, 6, 6), floats(4, 4, 3, 3, start=2)
SQUARE = floats(4, 4) + 9 * torch.eye(4, dtype=torch.float64)
SYMMETRIC = SQUARE @ SQUARE.T
COMPLEX = torch.complex(A, B)
LABELS, ROWS, COLUMNS = classes(7, 5), classes(5, 3), classes(7, 4)


def _loss(name: str, reduction: str) -> Operator:
    return lambda found, due: getattr(functional, name)(found, due, reduction=reduction)


def _joined(*factors: Any) -> Any:
    """Return the matrix of singular vectors and values, or of eigenvalues and their vectors."""
    if len(factors) == 3:
        left, values, vectors = factors
        return (left * values) @ vectors
    values, vectors = factors
    return (vectors * values) @ vectors.mT


def _parts(result: Any) -> Any:
    return torch.view_as_real(result)


FAMILIES: dict[str, dict[str, tuple[Operator, Operands]]] = {
    "activations": {
        **{
            name: (getattr(functional, name), (A,))
            for name in ("gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "mish", "leaky_relu", "selu", "softsign")
        },
        "approximate gelu": (lambda a: functional.gelu(a, approximate="tanh"), (A,)),
        "glu": (functional.glu, (floats(5, 6) / 3,)),
        "swiglu": (lambda a, b: functional.silu(a) * b, (A, B)),
        "softmax in another dtype": (lambda a: a.float().softmax(1, dtype=torch.float64), (B,)),
        **{name: (getattr(torch, name), (ABOVE,)) for name in ("log", "sqrt", "rsqrt", "log1p", "reciprocal")},
        **{
            name: (getattr(torch, name), (A,))
            for name in ("exp", "sin", "cos", "erf", "abs", "square", "round", "sign")
        },
        "isnan": (torch.isnan, (A,)),
        "logical_and": (torch.logical_and, (A, B)),
        "pow": (torch.pow, (ABOVE, B)),
        "minimum": (torch.minimum, (A, B)),
        "clamp by a tensor": (lambda a, b: torch.clamp(a, min=b), (A, B)),
        "addcmul": (torch.addcmul, (A, B, B)),
        "where of numbers": (lambda a: torch.where(a > 0, 1, 0), (A,)),
        "where of a number": (lambda a: torch.where(a > 0, a, 0.0), (A,)),
        "where of a row": (lambda a, b: torch.where(a > 0, b, 1.0), (A, ROW)),
        "masked_fill by a row": (lambda a, b: a.masked_fill(b > 0, 2), (A, ROW)),
        "eq": (torch.eq, (B, B + (B > 3))),
    },
    "attention": {
        "attention": (attention, (QUERIES, KEYS, VALUES)),
        "attention with a mask": (attention, (QUERIES, KEYS, VALUES, floats(5, 5))),
        "scores": (lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k), (QUERIES, KEYS)),
        "rotation": (
            lambda x, c, s: x * c + torch.cat([-x[..., 2:], x[..., :2]], -1) * s,
            (QUERIES, floats(5, 4) / 3, floats(5, 4, start=2) / 3),
        ),
        "layer_norm": (lambda a, w, b: functional.layer_norm(a, (7,), w, b), (A, ROW, ROW + 1)),
        "layer_norm of positions": (lambda a, w, b: functional.layer_norm(a, (5, 6), w, b), (CUBE, CUBE[0], CUBE[1])),
        "rms_norm": (lambda a, w: functional.rms_norm(a, (7,), w), (A, ROW)),
        "heads": (lambda x: x.unflatten(-1, (2, 3)).transpose(1, 2), (CUBE,)),
        "heads joined": (lambda x: x.transpose(1, 2).flatten(2), (QUERIES,)),
        "last token": (lambda x: x[:, -1], (CUBE,)),
        "logits": (lambda x, w: x @ w.t(), (CUBE, floats(7, 6))),
    },
    "products": {
        "linear": (functional.linear, (CUBE, floats(7, 6), ROW)),
        "linear of a matrix": (functional.linear, (A, floats(3, 7), floats(3))),
        "matmul by a matrix": (torch.matmul, (CUBE, floats(6, 3))),
        "matmul of batches": (torch.matmul, (CUBE, floats(2, 6, 3))),
        "baddbmm": (torch.baddbmm, (floats(2, 5, 3), CUBE, floats(2, 6, 3))),
        "baddbmm without the first": (
            lambda c, a, b: torch.baddbmm(c, a, b, beta=0, alpha=0.5),
            (floats(2, 5, 3), CUBE, floats(2, 6, 3)),
        ),
        **{
            f"addmm to {name}": (torch.addmm, (bias, A, MATRIX))
            for name, bias in {
                "a matrix": floats(5, 4),
                "one row": floats(1, 4),
                "one column": floats(5, 1),
                "a number": torch.tensor(3.0, dtype=torch.float64),
            }.items()
        },
        "addmv": (torch.addmv, (COLUMN, A, ROW)),
        "dot": (torch.dot, (ROW, ROW + 1)),
        "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([0], [0])), (A, B)),
        "einsum of a sum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), (A, B)),
        "product over nothing": (torch.mm, (floats(5, 0), floats(0, 4))),
        "product of one row": (torch.mm, (A[:1], MATRIX)),
    },
    "views": {
        "joined": (lambda x: x.reshape(8, 6), (EVEN,)),
        "joined at the end": (lambda x: x.reshape(2, 24), (EVEN,)),
        "joined to one": (lambda x: x.reshape(-1), (EVEN,)),
        "split": (lambda x: x.view(2, 2, 2, 2, 3), (EVEN,)),
        "joined and split": (lambda x: x.reshape(4, 12), (EVEN,)),
        "with a first dimension": (lambda x: x.view(1, 2, 5, 6), (CUBE,)),
        "ravel": (torch.ravel, (EVEN,)),
        "permute": (lambda x: x.permute(-1, -3, 1), (CUBE,)),
        "movedim": (lambda x: x.movedim((1, 2), (0, 1)), (CUBE,)),
        "mT": (lambda x: x.mT, (CUBE,)),
        "t of a vector": (lambda x: x.t(), (ROW,)),
        "atleast_2d": (torch.atleast_2d, (ROW,)),
        "atleast_3d": (torch.atleast_3d, (A,)),
        "broadcast_to": (lambda x: torch.broadcast_to(x, (3, 5, 7)), (A,)),
        "repeat": (lambda x: x.repeat(2, 1, 2), (EVEN[0],)),
        "tile": (lambda x: torch.tile(x, (2, 2)), (EVEN[0],)),
        "diagonal": (lambda x: x.diagonal(1, 0, 2), (CUBE,)),
        "diag": (torch.diag, (ROW,)),
        "diag_embed": (torch.diag_embed, (A,)),
        "roll over all": (lambda x: x.roll(3), (A,)),
        "roll over both": (lambda x: x.roll((1, 2), (0, 1)), (A,)),
        "flip of both": (lambda x: x.flip(0, 1), (A,)),
        "triu": (lambda x: x.triu(1), (CUBE,)),
        "meshgrid": (lambda a, b: torch.stack(torch.meshgrid(a, b, indexing="ij")), (ROW, COLUMN)),
        "column_stack": (lambda a, b: torch.column_stack([a, b]), (A, COLUMN)),
        "cat with nothing": (lambda a, b: torch.cat([a, b]), (A, A[:0])),
        "pad with a number": (lambda x: functional.pad(x, (1, 2), value=3.0), (A,)),
        "pad above": (lambda x: functional.pad(x, (0, 0, 1, 2)), (A,)),
        "pad by less": (lambda x: functional.pad(x, (-1, 1)), (A,)),
        "alias": (lambda x: x[:9, :], (A,)),
        "none and ellipsis": (lambda x: x[None, ..., 0], (CUBE,)),
        "all of three chunks": (lambda x: torch.stack(x.chunk(3, -1)), (CUBE,)),
    },
    "indexing": {
        "rows": (lambda x, i: x[i], (A, ROWS)),
        "rows by a matrix": (lambda x, i: x[i], (A, classes(5, 2, 3))),
        "columns": (lambda x, i: x[:, i], (A, COLUMNS)),
        "last dimension": (lambda x, i: x[..., i], (CUBE, classes(6, 4))),
        "elements": (lambda x, i, j: x[i, j], (A, ROWS, classes(7, 3))),
        "grid": (lambda x, i, j: x[i, j], (A, ROWS[:, None], COLUMNS[None])),
        "around a dimension": (lambda x, i, j: x[i, :, j], (CUBE, classes(2, 3), classes(6, 3))),
        "index_select": (lambda x, i: x.index_select(1, i), (A, COLUMNS)),
        "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), (A, classes(7, 5, 3))),
        "gather of one": (lambda x, i: x.gather(1, i), (A, classes(7, 5, 1))),
        "index_add": (lambda x, i, v: x.index_add(0, i, v), (A, torch.tensor([1, 1, 4]), floats(3, 7))),
        "index_add to columns": (
            lambda x, i, v: x.index_add(1, i, v, alpha=2),
            (A, torch.tensor([0, 6, 0]), floats(5, 3)),
        ),
        "index_copy": (lambda x, i, v: x.index_copy(0, i, v), (A, torch.tensor([0, 3]), floats(2, 7))),
        "index_fill": (lambda x, i: x.index_fill(1, i, 3.0), (A, COLUMNS)),
        "index_put": (lambda x, i, v: torch.index_put(x, [i], v), (A, torch.tensor([0, 3]), floats(2, 7))),
        "index_put of a row": (lambda x, i, v: torch.index_put(x, [i], v), (A, torch.tensor(2), ROW)),
        "index_put of a number": (
            lambda x, i, j, v: torch.index_put(x, [i, j], v),
            (A, torch.tensor(2), torch.tensor(3), torch.tensor(9.0, dtype=torch.float64)),
        ),
        "accumulating index_put": (
            lambda x, i, v: torch.index_put(x, [i], v, accumulate=True),
            (A, torch.tensor([1, 1, 4]), floats(3, 7)),
        ),
        "accumulating index_put of elements": (
            lambda x, i, j, v: torch.index_put(x, [i, j], v, accumulate=True),
            (A, torch.tensor([1, 1, 4]), torch.tensor([2, 2, 0]), floats(3)),
        ),
        "slice_scatter": (lambda x, v: torch.slice_scatter(x, v, 1, 2, 5), (A, floats(5, 3))),
        "select_scatter": (lambda x, v: torch.select_scatter(x, v, 0, 2), (A, ROW)),
        "diagonal_scatter": (lambda x, v: torch.diagonal_scatter(x, v, 1), (A, floats(5, start=2))),
        "one_hot": (lambda i: functional.one_hot(i, 7), (classes(7, 5, 2),)),
        "bucketize": (torch.bucketize, (A, torch.tensor([-1.0, 0.0, 0.5], dtype=torch.float64))),
        "embedding with negative padding": (lambda i, w: functional.embedding(i, w, padding_idx=-1), (LABELS, MATRIX)),
    },
    "convolutions": {
        "conv2d": (lambda a, w, b: functional.conv2d(a, w, b, padding=1), (IMAGES, KERNELS, floats(4))),
        "conv2d with a stride": (lambda a, w: functional.conv2d(a, w, stride=2), (IMAGES, KERNELS)),
        "conv2d of groups": (lambda a, w: functional.conv2d(a, w, groups=4), (IMAGES, floats(4, 1, 3, 3))),
        "conv_transpose2d": (lambda a, w: functional.conv_transpose2d(a, w, stride=2), (IMAGES, KERNELS)),
    },
    "images": {
        "batch_norm": (
            lambda a, w, b: functional.batch_norm(a, None, None, w, b, training=True),
            (IMAGES, floats(4), floats(4, start=2)),
        ),
        "batch_norm for inference": (
            lambda a, m, v: functional.batch_norm(a.detach(), m.detach(), v.detach()),
            (IMAGES, floats(4), floats(4).abs() + 1),
        ),
        "group_norm without weights": (lambda a: functional.group_norm(a.detach(), 2), (IMAGES,)),
        "group_norm with a weight": (
            lambda a, w: functional.group_norm(a.detach(), 2, w.detach()),
            (IMAGES, IMAGES[0, :, 0, 0]),
        ),
        "max_pool2d": (lambda a: functional.max_pool2d(a, 2), (IMAGES,)),
        "adaptive_avg_pool2d": (lambda a: functional.adaptive_avg_pool2d(a, 2), (IMAGES,)),
        "adaptive_avg_pool2d to one": (lambda a: functional.adaptive_avg_pool2d(a, 1), (IMAGES,)),
        "max_pool1d": (lambda a: functional.max_pool1d(a, 2), (CUBE,)),
        **{
            f"interpolate {mode}": (
                lambda a, mode=mode: functional.interpolate(a, scale_factor=2, mode=mode),
                (IMAGES,),
            )
            for mode in ("nearest", "bilinear", "bicubic")
        },
        "pixel_shuffle": (lambda a: functional.pixel_shuffle(a, 2), (IMAGES,)),
        "channel_shuffle": (lambda a: functional.channel_shuffle(a, 2), (IMAGES,)),
        "grid_sample": (functional.grid_sample, (IMAGES, floats(3, 2, 2, 2) / 6)),
        "patches": (lambda a: a.unflatten(3, (2, 3)).unflatten(2, (2, 3)).permute(0, 2, 4, 1, 3, 5), (IMAGES,)),
        "mean of positions": (lambda a: a.mean((2, 3)), (IMAGES,)),
        "normalize": (lambda a: functional.normalize(a.detach(), dim=1), (IMAGES,)),
    },
    "losses": {
        **{
            f"{name} {reduction}": (
                _loss(name, reduction),
                (A.sigmoid(), B.clamp(0, 1)),
            )
            for name, reduction in {
                "smooth_l1_loss": "sum",
                "mse_loss": "none",
                "kl_div": "sum",
                "binary_cross_entropy": "sum",
            }.items()
        },
        **{
            f"{name} {reduction} of {len(operands[0])} rows": (
                _loss(name, reduction),
                operands,
            )
            for name, reduction, operands in (
                ("cross_entropy", "none", (A, LABELS)),
                ("cross_entropy", "sum", (floats(4, 6, 2), classes(6, 4, 2))),
                ("cross_entropy", "none", (floats(4, 6, 2), classes(6, 4, 2))),
                ("nll_loss", "none", (A, LABELS)),
                ("nll_loss", "sum", (A, LABELS)),
            )
        },
        "cross_entropy of probabilities": (functional.cross_entropy, (A, (B / 3).softmax(1))),
        "cross_entropy with smoothing": (
            lambda a, i: functional.cross_entropy(a, i, label_smoothing=0.1),
            (floats(6, 7), classes(7, 6)),
        ),
        "batch mean of kl_div": (lambda a, b: functional.kl_div(a, b, reduction="batchmean"), (A, ABOVE)),
        "with logits": (
            lambda a, b: functional.binary_cross_entropy_with_logits(a, b, reduction="sum"),
            (A, B.clamp(0, 1)),
        ),
        "pairwise_distance": (functional.pairwise_distance, (A, B)),
        "dist": (lambda a, b: torch.dist(a, b, 1), (A, B)),
        "aminmax": (lambda a: torch.stack(torch.aminmax(a)), (A,)),
        "diff": (lambda a: torch.diff(a, dim=0), (A,)),
        "nanmean": (torch.nanmean, (A,)),
        "log_softmax of sequences": (lambda a: functional.log_softmax(a, -1), (CUBE,)),
    },
    "linalg": {
        **{name: (getattr(torch.linalg, name), (SQUARE,)) for name in ("svdvals", "inv", "det", "pinv")},
        **{name: (getattr(torch.linalg, name), (SYMMETRIC,)) for name in ("eigvalsh", "cholesky")},
        "svd": (lambda a: torch.linalg.svd(a, full_matrices=False).S, (A,)),
        "singular vectors": (lambda a: _joined(*torch.linalg.svd(a, full_matrices=False)), (A,)),
        "eigenvectors": (lambda a: _joined(*torch.linalg.eigh(a.detach())), (SYMMETRIC,)),
        "qr": (lambda a: torch.linalg.qr(a).R, (torch.cat([SQUARE, floats(1, 4)]),)),
        "eigh": (lambda a: torch.linalg.eigh(a).eigenvalues, (SYMMETRIC,)),
        "slogdet": (lambda a: torch.linalg.slogdet(a).logabsdet, (SQUARE,)),
        "solve": (torch.linalg.solve, (SQUARE, floats(4, 3))),
        "solve_triangular": (
            lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
            (SQUARE.triu(), floats(4, 3)),
        ),
        "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), (SQUARE,)),
        "norm of all": (lambda a: torch.linalg.norm(a.detach()), (A,)),
        "matrix_norm": (lambda a: torch.linalg.matrix_norm(a.detach(), 1), (A,)),
        "nuclear norm": (lambda a: torch.linalg.matrix_norm(a, "nuc"), (A,)),
        "cross": (torch.linalg.cross, (floats(5, 3), floats(5, 3, start=4))),
        "vecdot": (torch.linalg.vecdot, (A, B)),
        "trace": (lambda a: torch.trace(a.detach()), (SQUARE,)),
        "inverses": (torch.linalg.inv, (torch.stack([SQUARE, SQUARE + 1, SQUARE.T]),)),
    },
    "complex": {
        "fft": (lambda a: _parts(torch.fft.fft(a)), (COMPLEX,)),
        "fft of rows": (lambda a: _parts(torch.fft.fft(a, dim=0)), (COMPLEX,)),
        "rfft": (lambda a: _parts(torch.fft.rfft(a)), (A,)),
        "irfft": (torch.fft.irfft, (COMPLEX,)),
        "fft2": (lambda a: _parts(torch.fft.fft2(a)), (torch.complex(CUBE, CUBE + 1),)),
        "rfft2": (lambda a: _parts(torch.fft.rfft2(a)), (CUBE,)),
        "fftshift": (torch.fft.fftshift, (A,)),
        "to complex and back": (lambda a: _parts(torch.view_as_complex(a)), (floats(5, 3, 2),)),
        "rotation": (
            lambda a, c: _parts(torch.view_as_complex(a) * c),
            (floats(5, 3, 2), COMPLEX[:, :3].contiguous()),
        ),
        "conj": (lambda a: _parts(a.conj() + 1), (COMPLEX,)),
        "abs": (torch.abs, (COMPLEX,)),
        "angle": (lambda a: torch.angle(a.detach()), (COMPLEX,)),
        "real": (lambda a: a.real + 0, (COMPLEX,)),
        "imag": (lambda a: a.imag * 2, (COMPLEX,)),
        "polar": (lambda a, b: _parts(torch.polar(a.detach(), b.detach())), (ABOVE, B)),
        "of two parts": (lambda a, b: _parts(torch.complex(a, b)), (A, B)),
        "product": (lambda a, b: _parts(a @ b), (COMPLEX, torch.complex(MATRIX, MATRIX + 1))),
        "sum": (lambda a: _parts(a.sum(0)), (COMPLEX,)),
    },
}
"""Operators by family, each with its name, a function, and the operands, which it takes in any placements."""
if runs_with("<2.13"):  # which refuses them
    del FAMILIES["views"]["joined and split"]
    for name in [name for name in FAMILIES["images"] if name.startswith(("group_norm", "interpolate"))]:
        del FAMILIES["images"][name]

ONLY: dict[str, tuple[Placement, ...]] = {
    "convolutions": (Replicate(), Shard(0)),
    "images": (Replicate(), Shard(0), Shard(1), Partial()),
}
"""The placements of the first operand in families whose other operands are replicated."""


def _combined(operands: Operands) -> Iterator[tuple[Placement, ...]]:
    """Yield every combination for which all other operands are replicated, then those of one placement for all."""
    for placements in combinations(operands) if len(operands) < 3 else ():
        if sum(not placement.is_replicate() for placement in placements) < 2 or len(set(placements)) == 1:
            yield placements
    if len(operands) < 3:
        return
    yield (Replicate(),) * len(operands)
    for i, operand in enumerate(operands):
        for placement in choices(operand)[1:]:
            yield tuple(placement if i == j else Replicate() for j in range(len(operands)))
    for dim in range(min(operand.dim() for operand in operands)):
        yield (Shard(dim),) * len(operands)


WITHOUT_GRADIENT = ("index_put", "index_put of a row", "slice_scatter", "select_scatter", "diagonal_scatter")
"""Operators whose backward PyTorch 2.13 refuses, even for replicas."""


@requirement(
    "TP-MODEL-01",
    "An operator of transformers, convolutional or recommendation models takes DTensors in any placements and gives "
    "the plain tensor's result.",
    source=SOURCE,
)
@requirement(
    "TP-MODEL-02",
    "An operator gives each DTensor that requires a gradient, alone or with others, the plain tensor's gradient.",
    source=SOURCE,
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.world(2)
def test_taken(world: World, family: str) -> None:
    """In every second case, give an operand after the other a gradient, or all; gradients arrive in any layout."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for at, (name, (operator, given)) in enumerate(FAMILIES[family].items()):
            operands = tuple(operand.to(rank.device) for operand in given)
            floating = [i for i, x in enumerate(operands) if x.is_floating_point() or x.is_complex()]
            chosen = itertools.cycle([floating, *([i] for i in floating)] if floating[1:] else [floating])
            expected = operator(*operands)
            arriving = itertools.cycle([Replicate(), *(Shard(i) for i, n in enumerate(expected.shape) if n > 1)])
            weights = floats(*expected.shape, start=2).to(rank.device)
            of = ONLY.get(family)
            layouts = [(p, *[Replicate()] * (len(operands) - 1)) for p in of] if of else _combined(operands)
            for i, placements in enumerate(layouts, at):
                case = f"{name} of {', '.join(map(str, placements))}"
                training = next(chosen) if i % 2 == 0 and name not in WITHOUT_GRADIENT else []
                plain, own = [], []
                for j, (operand, placement) in enumerate(zip(operands, placements, strict=True)):
                    plain.append(operand.clone().requires_grad_(j in training))
                    own.append(distributed(operand.clone(), placement, rank, mesh).requires_grad_(j in training))
                try:
                    found = operator(*own)
                    if not right(expected, found.detach()):
                        wrong.append(case)
                    if not found.requires_grad:
                        continue
                    operator(*plain).backward(weights)
                    back = next(arriving)
                    found.backward(distributed(weights, back, rank, mesh))
                except (NotImplementedError, RuntimeError, AssertionError, IndexError) as error:
                    wrong.append(f"{case}: {type(error).__name__}")
                    continue
                for j in training:
                    gradient, due = own[j].grad, plain[j].grad
                    if (gradient is None) != (due is None):
                        wrong.append(f"{case}: a gradient of operand {j}, or none")
                    elif due is not None and not right(due, gradient):  # type: ignore[arg-type]
                        wrong.append(f"{case}: gradient of operand {j}, {back} on the way back")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


EXPANDED: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...], Placement]]] = {
    "others": {
        "a new dimension": ((4, 6), (3, 4, 6), Shard(0)),
        "a new dimension before one row": ((1, 6), (3, 1, 6), Shard(0)),
        "a row in shards of columns": ((1, 6), (4, 6), Shard(1)),
        "a column in shards of rows": ((4, 1), (4, 6), Shard(0)),
        "a replicated row": ((1, 6), (4, 6), Replicate()),
    },
    "the-sharded": {
        "a row": ((1, 6), (4, 6), Shard(0)),
        "a row to as many as ranks": ((1, 6), (2, 6), Shard(0)),
        "a column": ((4, 1), (4, 6), Shard(1)),
    },
}
"""Shapes before and after expand, with a placement, by whether the dimension that is expanded is the sharded one."""


@requirement(
    "TP-MODEL-01",
    "An operator of transformers, convolutional or recommendation models takes DTensors in any placements and gives "
    "the plain tensor's result.",
    source=SOURCE,
)
@pytest.mark.parametrize("dimension", EXPANDED)
@pytest.mark.world(2)
def test_expanded(world: World, dimension: str) -> None:
    """Expand rows and columns, of which only the first rank has the sharded ones."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (before, after, placement) in EXPANDED[dimension].items():
            whole = floats(*before).to(rank.device)
            try:
                if not right(whole.expand(after), distributed(whole, placement, rank, mesh).expand(after)):
                    wrong.append(name)
            except (NotImplementedError, RuntimeError, AssertionError) as error:
                wrong.append(f"{name}: {error!r:.40}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


WRITTEN: dict[str, dict[str, Operator]] = {
    "added": {
        "accumulating index_put": lambda x, v, i: torch.index_put(x, (i,), v, accumulate=True),
        "index_copy": lambda x, v, i: x.index_copy(0, i, v),
        "masked_fill": lambda x, v, i: x.masked_fill(x > 0, 2.0) + v.sum(),
    },
    "replaced": {
        "index_put": lambda x, v, i: torch.index_put(x, (i,), v),
        "slice_scatter": lambda x, v, i: x.slice_scatter(v, 0, 1, 3),
        "select_scatter": lambda x, v, i: x.select_scatter(v[0], 0, 1),
    },
}
"""Operators that write rows into a matrix or add to it, by how they do it, each of a matrix, rows and positions."""


@requirement(
    "TP-MODEL-02",
    "An operator gives each DTensor that requires a gradient, alone or with others, the plain tensor's gradient.",
    source=SOURCE,
)
@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.world(2)
def test_written_rows(world: World, how: str) -> None:
    """Write rows into replicas or shards of columns; the matrix requires a gradient, and the rows with it or not."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        values, positions, weights = floats(2, 7, start=1), torch.tensor([1, 3]), floats(5, 7, start=2)
        for (name, operator), placement, both in itertools.product(
            WRITTEN[how].items(), (Replicate(), Shard(1)), (False, True)
        ):
            plain = [x.to(rank.device) for x in (A.clone(), values.clone(), positions, weights)]
            own = [
                distributed(x, p, rank, mesh) for x, p in zip(plain, (placement,) * 2 + (Replicate(),) * 2, strict=True)
            ]
            for x, v, *_ in plain, own:
                x.requires_grad_()
                v.requires_grad_(both)
            try:
                for x, v, i, weight in plain, own:
                    (operator(x, v, i) * weight).sum().backward()
            except (NotImplementedError, RuntimeError, AssertionError) as error:
                wrong.append(f"{name} of {placement}: {error!r:.120}")
                continue
            for x, y in zip(plain[: 1 + both], own, strict=False):
                if y.grad is None or not right(x.grad, y.grad):  # type: ignore[arg-type]
                    wrong.append(f"{name} of {placement}, {both=}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


NUMBERS: dict[str, dict[str, Operator]] = {
    "arithmetic": {
        "product": lambda a: a * (1 + 2j),
        "sum": lambda a: a + 2j,
        "quotient": lambda a: a / 2j,
        "where": lambda a: torch.where(a.real > 1, a, 1j),
        "fill_": lambda a: a.clone().fill_(1j),
        "full_like": lambda a: torch.full_like(a, 1j),
    },
    "powers and masks": {
        "power": lambda a: (a + 9) ** (1 + 2j),
        "masked_fill": lambda a: a.masked_fill(a.real > 1, 1j),
        "angle": lambda a: torch.angle(a + 9),
    },
}
"""Operators that take a complex number, or whose gradient does."""


@requirement(
    "TP-MODEL-366",
    "Operators on DTensors take complex numbers as those on plain tensors do, forward or backward.",
    source=f"{SOURCE}; torch.pow: exponent; torch.angle; torch.Tensor.masked_fill: value",
)
@pytest.mark.parametrize("family", NUMBERS)
@pytest.mark.world(2)
def test_complex_numbers(world: World, family: str) -> None:
    """The operand is replicated or sharded; results that depend on it have a gradient."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, whole = rank.mesh(), [], COMPLEX.to(rank.device)
        for (name, operator), of in itertools.product(NUMBERS[family].items(), (Replicate(), Shard(0), Shard(1))):
            plain = whole.clone().requires_grad_()
            own = distributed(whole.clone(), of, rank, mesh).requires_grad_()
            try:
                expected, found = operator(plain), operator(own)
                if not right(expected.detach(), found.detach()):
                    wrong.append(f"{name} of {of}")
                if expected.requires_grad and name != "fill_":
                    expected.abs().sum().backward()
                    found.abs().sum().backward()
                    if not right(plain.grad, own.grad):  # type: ignore[arg-type]
                        wrong.append(f"{name} of {of}: gradient")
            except (RuntimeError, TypeError) as error:
                wrong.append(f"{name} of {of}: {str(error).splitlines()[0]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


CONJUGATES: dict[str, dict[str, Operator]] = {
    "biases": {
        "addmm": lambda c, a, b: torch.addmm(c.conj(), a, b),
        "baddbmm": lambda c, a, b: torch.baddbmm(c.conj().unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0)),
        "linear": lambda c, a, b: functional.linear(a, b, c[0].conj()),
    },
    "factors": {
        "by a conjugate": lambda c, a, b: a @ b.conj(),
        "of a conjugate": lambda c, a, b: a.conj() @ b,
        "of batches": lambda c, a, b: a.unsqueeze(0) @ b.unsqueeze(0).conj(),
    },
    "adjoints": {
        "by an adjoint": lambda c, a, b: a @ b.mH,
        "of an adjoint": lambda c, a, b: a.mH @ b,
        "of a vector": lambda c, a, b: a.mH @ b[0],
        "dot": lambda c, a, b: torch.dot(a[0], b[0].conj()),
        "vdot": lambda c, a, b: torch.vdot(a[0], b[0]),
    },
    "others": {
        "sum": lambda c, a, b: a.conj() + b,
        "resolved": lambda c, a, b: a @ b.conj().resolve_conj(),
        "of rows": lambda c, a, b: a.conj().sum(0) * b,
        "cat": lambda c, a, b: torch.cat([a.conj(), b]),
        "where": lambda c, a, b: torch.where(a.real > 1, a, b.conj()),
        "cumsum": lambda c, a, b: a.conj().cumsum(0) - b,
    },
}
"""Operators on a bias and two matrices, of which one is a view with its conjugate bit set."""


@requirement(
    "TP-MODEL-3550",
    "An operator on lazily conjugated DTensors gives the result of lazily conjugated plain tensors.",
    source=f"{SOURCE}; torch.Tensor.conj: a view with its conjugate bit set",
)
@pytest.mark.parametrize("family", CONJUGATES)
@pytest.mark.world(2)
def test_conjugates(world: World, family: str) -> None:
    """Operands are replicated, or have their rows or columns sharded."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        bias, x, y = (torch.complex(floats(4, 4, start=i), floats(4, 4, start=i + 1)).to(rank.device) for i in range(3))
        layouts = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
        for (name, operator), (one, other) in itertools.product(CONJUGATES[family].items(), layouts):
            operands = [distributed(z, of, rank, mesh) for z, of in ((bias, Replicate()), (x, one), (y, other))]
            try:
                found = operator(*operands)
                if not right(operator(bias, x, y), found):
                    wrong.append(f"{name}, {one} and {other}: conjugate or value is wrong")
            except RuntimeError as error:
                wrong.append(f"{name}, {one} and {other}: {str(error).splitlines()[0]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


DEEP: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Partial(), Shard(0)),
    (Shard(1), Partial()),
    (Replicate(), Shard(1)),
    (Partial(), Partial()),
)
"""Placements on a mesh of two dimensions."""
CUTS: dict[str, tuple[Operator, Operands]] = {
    "range": (lambda x: x[1:4], (A,)),
    "step": (lambda x: x[::2, 1:], (A,)),
    "row": (lambda x: x[3], (A,)),
    "column": (lambda x: x[:, -1], (A,)),
    "cat": (lambda x, y: torch.cat([x, y]), (A, B)),
    "stack": (lambda x, y: torch.stack([x, y], -1), (A, B)),
    "flip": (lambda x: x.flip(0, 1), (A,)),
    "cumsum": (lambda x: x.cumsum(0), (A,)),
}
"""Operators that gather what they cut or join, each of which is tried with all of these."""
FLAT = ("activations", "products", "indexing", "losses")
"""Families of which every second operator is tried with these."""


def _deep(operand: torch.Tensor, placements: Sequence[Placement], rank: Rank, mesh: Any) -> DTensor:
    """Lay a tensor out on a mesh of two dimensions; the first of the ranks that have parts of a sum has another one."""
    pending = [i for i, placement in enumerate(placements) if placement.is_partial()]
    if not pending:
        return distribute_tensor(operand, mesh, placements, src_data_rank=None)
    others = math.prod(mesh.size(i) for i in pending) - 1
    first = not any(mesh.get_local_rank(i) for i in pending)
    part = laid_out(operand - others if first else torch.ones_like(operand), mesh, placements).contiguous()
    return DTensor.from_local(part, mesh, placements, shape=operand.shape, stride=operand.stride())


@requirement(
    "TP-MODEL-03",
    "An operator on a DTensor that each of two mesh dimensions shards or leaves pending gives the plain tensor's "
    "result and gradient.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_two_dimensions(world: World) -> None:
    """Each operator gets one placement, the next one another; its other operands are replicated."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        rows = [row for family in FLAT for row in [*FAMILIES[family].items()][::2]]
        rows += [row for row in CUTS.items() for _ in DEEP]
        for count, (name, (operator, given)) in enumerate(rows):
            operands = tuple(operand.to(rank.device) for operand in given)
            i = next((i for i, x in enumerate(operands) if x.is_floating_point() or x.is_complex()), 0)
            layouts = [p for p in DEEP if all(not isinstance(x, Shard) or x.dim < operands[i].dim() for x in p)]
            if operands[i].dim() and operands[i].size(0) < 4:  # which PyTorch 2.13 cannot join if a rank has none
                layouts = [p for p in layouts if p != (Shard(0), Shard(0))]
            if not (operands[i].is_floating_point() or operands[i].is_complex()):
                layouts = [p for p in layouts if not any(x.is_partial() for x in p)]
            placements = layouts[count % len(layouts)]
            case = f"{name} of {', '.join(map(str, placements))}"
            training = operands[i].is_floating_point() and name not in WITHOUT_GRADIENT
            plain = [x.clone().requires_grad_(training and i == j) for j, x in enumerate(operands)]
            own = [
                _deep(x.clone(), placements if i == j else (Replicate(),) * 2, rank, mesh).requires_grad_(
                    training and i == j
                )
                for j, x in enumerate(operands)
            ]
            try:
                expected, found = operator(*plain), operator(*own)
                if not right(expected.detach(), found.detach()):
                    wrong.append(case)
                if not found.requires_grad:
                    continue
                weights = floats(*expected.shape, start=2).to(rank.device)
                expected.backward(weights)
                found.backward(_deep(weights, (Replicate(),) * 2, rank, mesh))
                if not right(plain[i].grad, own[i].grad):  # type: ignore[arg-type]
                    wrong.append(f"gradient of {case}")
            except (NotImplementedError, RuntimeError, AssertionError, IndexError) as error:
                wrong.append(f"{case}: {error!r:.150}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MODEL-03",
    "An operator on a DTensor that each of two mesh dimensions shards or leaves pending gives the plain tensor's "
    "result and gradient.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_batch_over_both(world: World) -> None:
    """Multiply a batch of two or six by a matrix, which PyTorch does for all rows of the batch at once."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        for batch, matrix in ((CUBE, floats(6, 3)), (floats(6, 5, 4), floats(4, 3))):
            x, y = batch.to(rank.device), matrix.to(rank.device)
            own = _deep(x, (Shard(0), Shard(0)), rank, mesh)
            case = f"batch of {len(batch)}"
            try:
                if not right(x @ y, own @ _deep(y, (Replicate(), Replicate()), rank, mesh)):
                    wrong.append(case)
            except (NotImplementedError, RuntimeError, AssertionError) as error:
                wrong.append(f"{case}: {error!r:.150}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MODEL-03",
    "An operator on a DTensor that each of two mesh dimensions shards or leaves pending gives the plain tensor's "
    "result and gradient.",
    source=SOURCE,
)
@pytest.mark.parametrize("sharded", ["once", "twice"])
@pytest.mark.world(4)
def test_sequences_over_both(world: World, sharded: str) -> None:
    """Apply a linear layer to sequences that one mesh dimension shards by position, or both."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        whole, matrix = floats(2, 8, 3).to(rank.device), floats(5, 3).to(rank.device)
        by = _deep(matrix, (Replicate(), Replicate()), rank, mesh)
        once = (Shard(0), Shard(1)), (Replicate(), Shard(1)), (Shard(1), Replicate())
        for placements in once if sharded == "once" else ((Shard(1), Shard(1)),):
            case = ", ".join(map(str, placements))
            try:
                if not right(
                    functional.linear(whole, matrix), functional.linear(_deep(whole, placements, rank, mesh), by)
                ):
                    wrong.append(case)
            except (NotImplementedError, RuntimeError, AssertionError) as error:
                wrong.append(f"{case}: {error!r:.80}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MODEL-03",
    "An operator on a DTensor that each of two mesh dimensions shards or leaves pending gives the plain tensor's "
    "result and gradient.",
    source=SOURCE,
)
@pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: 2.11 refuses products of inputs sharded inside")
@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.world(4)
def test_later_dimensions_over_both(world: World, order: str) -> None:
    """Apply a linear layer to batches of four dimensions, of which two are sharded, the later one last or first."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        whole, matrix = floats(2, 4, 2, 3).to(rank.device), floats(5, 3).to(rank.device)
        by = _deep(matrix, (Replicate(), Replicate()), rank, mesh)
        for pair in (Shard(0), Shard(1)), (Shard(0), Shard(2)), (Shard(1), Shard(2)):
            placements = pair if order == "ascending" else pair[::-1]
            case = f"{order}: {placements[0]}, {placements[1]}"
            try:
                found = functional.linear(_deep(whole, placements, rank, mesh), by)
                if not right(functional.linear(whole, matrix), found):
                    wrong.append(f"{case}: values")
            except (NotImplementedError, RuntimeError, AssertionError) as error:
                wrong.append(f"{case}: {error!r:.80}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MODEL-04",
    "An operator on DTensors gives the same result in inference mode, in which PyTorch does not split it into others.",
    source="torch.inference_mode; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_inference(world: World) -> None:
    """Shard one operand of each operator, in each of its dimensions."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given) in FAMILIES["products"].items():
            operands = tuple(operand.to(rank.device) for operand in given)
            with torch.inference_mode():
                expected = operator(*operands)
                for i, dim in ((i, dim) for i, operand in enumerate(operands) for dim in range(operand.dim())):
                    placements = [Shard(dim) if i == j else Replicate() for j in range(len(operands))]
                    own = [distributed(x, p, rank, mesh) for x, p in zip(operands, placements, strict=True)]
                    try:
                        if not right(expected, operator(*own)):
                            wrong.append(f"{name} of {', '.join(map(str, placements))}")
                    except (NotImplementedError, RuntimeError, AssertionError, IndexError) as error:
                        wrong.append(f"{name} of {', '.join(map(str, placements))}: {type(error).__name__}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


READ_FOR_INFERENCE: dict[str, dict[str, Operator]] = {
    "views": {
        "t": lambda x: x.t(),
        "transpose": lambda x: x.transpose(0, 1),
        "row": lambda x: x[1],
        "columns": lambda x: x[:, 2:4],
        "view": lambda x: x.view(2, 2, 6),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "split": lambda x: x.split(2, 1)[1],
        "detach": lambda x: x.detach(),
    },
    "results": {
        "sum": lambda x: x + x,
        "product of a number": lambda x: x * 2,
        "reduction": lambda x: x.sum(1),
        "linear": lambda x: functional.linear(x, x),
        "clone": lambda x: x.clone(),
        "softmax": lambda x: x.softmax(1),
    },
}
"""Functions of a matrix."""


@requirement(
    "TP-MODEL-04",
    "An operator on DTensors gives the same result in inference mode, in which PyTorch does not split it into others.",
    source="torch.inference_mode; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("kind", READ_FOR_INFERENCE)
@pytest.mark.world(2)
def test_made_before_inference(world: World, kind: str) -> None:
    """Read in inference mode what was distributed before, with and without a gradient."""

    def body(rank: Rank) -> list[str]:
        wrong, whole = [], floats(4, 6).to(rank.device)
        for layout, trained in itertools.product((Replicate(), Shard(0)), (False, True)):
            own = distributed(whole, layout, rank, rank.mesh()).requires_grad_(trained)
            for name, operator in READ_FOR_INFERENCE[kind].items():
                case = f"{name} of {layout}"
                with torch.inference_mode():
                    try:
                        if not right(operator(whole), operator(own)):
                            wrong.append(case)
                    except RuntimeError as error:
                        wrong.append(f"{case}: {str(error).splitlines()[0]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
