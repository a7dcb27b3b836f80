"""Operators on shards of which some have another size than the others, or no elements at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operator, close, distributed, floats, right
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


def _tried(operators: dict[str, tuple[Operator, torch.Tensor, Placement]], rank: Rank) -> list[str]:
    """Return the operators of which this rank has not its part of the plain tensor's result."""
    wrong = []
    for name, (operator, given, layout) in operators.items():
        whole = given.to(rank.device)
        own = distributed(whole, layout, rank, rank.mesh())
        try:
            found = operator(own)
        except (IndexError, RuntimeError) as e:
            wrong.append(f"{name} of {layout}: {str(e).splitlines()[0]}")
            continue
        if not right(operator(whole), found):
            wrong.append(f"{name} of {layout}: a part of shape {tuple(found.to_local().shape)}")
    return wrong


def _any_rank(wrong: list[str], rank: Rank) -> bool:
    """Return whether any rank has a wrong result."""
    local = torch.tensor([float(bool(wrong))], device=rank.device)
    return bool(DTensor.from_local(local, rank.mesh(), [Partial("max")]).full_tensor())


REARRANGED: dict[str, dict[str, tuple[Operator, torch.Tensor, Placement]]] = {
    "cut-pixels": {
        "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), floats(1, 4, 5, 4), Shard(2)),
        "pixel_shuffle of three columns": (lambda x: functional.pixel_shuffle(x, 2), floats(1, 4, 2, 3), Shard(3)),
        "pixel_shuffle of channels": (lambda x: functional.pixel_shuffle(x, 2), floats(1, 12, 2, 2), COLUMNS),
        "pixel_unshuffle": (lambda x: functional.pixel_unshuffle(x, 2), floats(1, 1, 4, 10), Shard(3)),
    },
    "others": {
        "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), floats(1, 4, 4, 3), Shard(2)),
        "pixel_shuffle of channels": (lambda x: functional.pixel_shuffle(x, 2), floats(1, 8, 2, 2), COLUMNS),
        "pixel_shuffle of images": (lambda x: functional.pixel_shuffle(x, 2), floats(3, 4, 2, 2), ROWS),
        "pixel_unshuffle": (lambda x: functional.pixel_unshuffle(x, 2), floats(1, 1, 4, 8), Shard(3)),
        "channel_shuffle": (lambda x: functional.channel_shuffle(x, 2), floats(1, 4, 5, 4), Shard(2)),
        "interpolate": (lambda x: functional.interpolate(x, scale_factor=2), floats(1, 3, 5, 4), Shard(2)),
        "repeat": (lambda x: x.repeat(2, 2), floats(3, 5), COLUMNS),
    },
}
"""Operators that move elements to other places, with an operand and its placement on two ranks."""


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", REARRANGED)
@pytest.mark.world(2)
def test_rearranged(world: World, kind: str) -> None:
    """Shards that differ in size, or that have no whole number of the blocks that are moved together."""
    assert_on_ranks([[]] * world.size, world.run(lambda rank: _tried(REARRANGED[kind], rank)))


IMAGES: dict[str, Operator] = {
    "max_pool2d": lambda x: functional.max_pool2d(x, 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 2),
    "adaptive_max_pool2d": lambda x: functional.adaptive_max_pool2d(x, 2),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2),
    "interpolate bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
}
"""Operators on images that treat each channel alone."""

CHANNELS: dict[str, dict[str, tuple[Operator, torch.Tensor, Placement]]] = {
    "a rank has none": {name: (operator, floats(2, 4, 6, 6), COLUMNS) for name, operator in IMAGES.items()},
    "others": {
        **{name: (operator, floats(2, 5, 6, 6), COLUMNS) for name, operator in IMAGES.items()},
        **{f"{name} of rows": (IMAGES[name], floats(4, 2, 6, 6), ROWS) for name in IMAGES if name != "batch_norm"},
        "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, 2), floats(2, 4, 6, 6), COLUMNS),
        "pad": (lambda x: functional.pad(x, (1, 1, 1, 1)), floats(2, 4, 6, 6), COLUMNS),
    },
}
"""Operators with images and their placement on three ranks, which have 2, 2 and 0, or 2, 2 and 1 channels or images."""


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("which", CHANNELS)
@pytest.mark.world(3)
def test_images(world: World, which: str) -> None:
    """Images with fewer channels than three ranks with two each can have."""
    assert_on_ranks([[]] * world.size, world.run(lambda rank: _tried(CHANNELS[which], rank)))


Written = Callable[[Any, Any, Any], Any]
INDICES = torch.tensor([3, 0, 2, 1])
INDEXED: dict[str, dict[str, tuple[Written, tuple[tuple[Placement, Placement], ...]]]] = {
    "rows-by-index": {
        "index_add_": (lambda x, i, y: x.index_add_(0, i, y), ((ROWS, R), (ROWS, ROWS))),
        "index_add_ of columns": (lambda x, i, y: x.index_add_(1, i, y), ((COLUMNS, R), (R, ROWS))),
        "index_copy_": (lambda x, i, y: x.index_copy_(0, i, y), ((ROWS, R), (ROWS, ROWS))),
    },
    "masked-or-divided": {
        "masked_fill_": (lambda x, i, y: x.masked_fill_(y > 4, y.new_tensor(9.0)), ((R, ROWS), (R, COLUMNS))),
        "floor_divide_": (lambda x, i, y: x.copy_((x * 9).long().floor_divide_(i.sum())), ((ROWS, R), (COLUMNS, R))),
    },
    "masked-columns": {
        "index_put": (lambda x, i, y: x.copy_(x.index_put((y > 2,), y.sum())), ((COLUMNS, R), (COLUMNS, COLUMNS))),
    },
    "scattered-rows": {
        "scatter_add_": (lambda x, i, y: x.scatter_add_(0, i.expand(4, 4), y), ((ROWS, R), (ROWS, ROWS))),
        "scatter_add_ of columns": (lambda x, i, y: x.scatter_add_(1, i.expand(4, 4), y), ((COLUMNS, R),)),
    },
    "others": {
        "masked_fill_": (lambda x, i, y: x.masked_fill_(y > 4, y.new_tensor(9.0)), ((ROWS, ROWS), (ROWS, R))),
        "masked_fill_ of a number": (lambda x, i, y: x.masked_fill_(y > 4, 9.0), ((R, ROWS), (ROWS, R))),
        "floor_divide_": (lambda x, i, y: x.copy_((x * 9).long().floor_divide_(i.sum())), ((R, R),)),
        "floor_divide": (lambda x, i, y: x.copy_((x * 9).long().floor_divide(i.sum())), ((R, R), (ROWS, R))),
        "index_add_": (lambda x, i, y: x.index_add_(0, i, y), ((R, R),)),
        "index_copy_": (lambda x, i, y: x.index_copy_(0, i, y), ((R, R),)),
        "index_fill_": (lambda x, i, y: x.index_fill_(0, i[:2], y.sum()), ((R, R), (COLUMNS, R), (ROWS, R))),
        "index_put": (lambda x, i, y: x.copy_(x.index_put((y > 2,), y.sum())), ((R, R), (ROWS, R), (ROWS, ROWS))),
        "index_fill_ of columns": (lambda x, i, y: x.index_fill_(-1, i[:2], y.sum()), ((ROWS, R), (COLUMNS, R))),
        "index_reduce_": (lambda x, i, y: x.index_reduce_(0, i, y, "amax"), ((R, R), (COLUMNS, COLUMNS), (ROWS, R))),
        "index_reduce_ of columns": (lambda x, i, y: x.index_reduce_(1, i, y, "prod"), ((ROWS, ROWS), (COLUMNS, R))),
        "scatter_add_": (lambda x, i, y: x.scatter_add_(0, i.expand(4, 4), y), ((R, R),)),
        "index_add": (lambda x, i, y: x.copy_(x.index_add(0, i, y)), ((ROWS, R), (ROWS, ROWS), (R, ROWS), (R, R))),
        "scatter_add": (lambda x, i, y: x.copy_(x.scatter_add(0, i.expand(4, 4), y)), ((ROWS, R), (ROWS, ROWS))),
    },
}
"""Operators that write by indices or in place, with the placements of what they write into and of what they read."""


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.world(2)
def test_written_by_index(world: World, kind: str) -> None:
    """Write into shards and replicated tensors in place, as which they must stay."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        into, source, index = (x.to(rank.device) for x in (floats(4, 4), floats(4, 4, start=3), INDICES))
        for name, (write, layouts) in INDEXED[kind].items():
            for layout, other in layouts:
                plain = into.clone()
                write(plain, index, source)
                own = distributed(into.clone(), layout, rank, rank.mesh())
                try:
                    indices = distribute_tensor(index, rank.mesh(), [R])
                    write(own, indices, distributed(source, other, rank, rank.mesh()))
                except RuntimeError:  # on every rank
                    continue
                if own.placements != (layout,) or not right(plain, own):
                    wrong.append(f"{name} into {layout}: {tuple(own.to_local().shape)} of {own.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


UNADDED: dict[str, dict[str, tuple[Operator, Callable[..., Any]]]] = {
    "vectors": {
        "addmv": (lambda c, a, b: torch.addmv(c[0], a, b[0], beta=0), lambda a, b: a @ b[0]),
        "addr": (lambda c, a, b: torch.addr(c, a[0], b[0], beta=0), lambda a, b: torch.outer(a[0], b[0])),
    },
    "others": {
        "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0), lambda a, b: a @ b),
        "addmm to a row": (lambda c, a, b: torch.addmm(c[0], a, b, beta=0), lambda a, b: a @ b),
        "baddbmm": (lambda c, a, b: torch.baddbmm(c[None], a[None], b[None], beta=0), lambda a, b: (a @ b)[None]),
        "addmv with a factor": (lambda c, a, b: torch.addmv(b[0], a, b[1], beta=2), lambda a, b: a @ b[1] + 2 * b[0]),
    },
}
"""Operators on a tensor that they ignore, if so told, and two matrices; and what they compute."""


@requirement(
    "TP-OP-3551",
    "With beta=0 a product of DTensors ignores the tensor that it would be added to, in any placements.",
    source=f"{SOURCE}; torch.addmv, addmm, baddbmm, addr: beta: 'If beta is 0, then the content of input will be "
    "ignored, and nan and inf in it will not be propagated'",
)
@pytest.mark.parametrize("kind", UNADDED)
@pytest.mark.world(2)
def test_unadded(world: World, kind: str) -> None:
    """The tensor that is ignored is replicated, and has no numbers; the matrices have each placement."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        x, y = (z.to(rank.device) for z in (floats(4, 4), floats(4, 4, start=3)))
        unused = torch.full_like(x, torch.nan)
        for name, (operator, plain) in UNADDED[kind].items():
            for one, other in itertools.product((R, ROWS, COLUMNS), repeat=2):
                own = [distributed(z, of, rank, rank.mesh()) for z, of in ((unused, R), (x, one), (y, other))]
                try:
                    found = operator(*own)
                except RuntimeError as error:
                    wrong.append(f"{name} of {one} and {other}: {str(error).splitlines()[0]}")
                    continue
                if not right(plain(x, y), found):
                    wrong.append(f"{name} of {one} and {other} is {found.full_tensor().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


FILLED: dict[str, dict[str, Callable[..., Any]]] = {
    "linalg": {
        "matrix_rank": lambda x, y, out: torch.linalg.matrix_rank(x, out=out),
    },
    "others": {
        "mm": lambda x, y, out: torch.mm(x, y, out=out),
        "add": lambda x, y, out: torch.add(x, y, out=out),
        "matmul": lambda x, y, out: torch.matmul(x, y, out=out),
        "without out": lambda x, y, out: out.copy_(torch.linalg.multi_dot([x, y, x])),
        "rank without out": lambda x, y, out: out.copy_(torch.linalg.matrix_rank(x)),
    },
}
"""Operators on two matrices that write what they compute into a tensor."""


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", FILLED)
@pytest.mark.world(2)
def test_out(world: World, kind: str) -> None:
    """Write the result for replicated matrices into a replicated tensor."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        x = (floats(4, 4) + 9 * torch.eye(4, dtype=torch.float64)).to(rank.device)
        y = floats(4, 4, start=2).to(rank.device)
        for name, operator in FILLED[kind].items():
            expected = torch.full(() if "rank" in name else (4, 4), 7, device=rank.device)
            expected = expected.long() if "rank" in name else expected.double()
            given = (expected.clone(), x, y)
            operator(x, y, out=expected)
            out, *own = (distribute_tensor(each.clone(), rank.mesh(), [R]) for each in given)
            try:
                operator(*own, out=out)
            except RuntimeError:  # on every rank
                continue
            if not right(expected, out):
                wrong.append(f"{name} is {out.to_local().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda x, y, out: torch.mm(x, y, out=out),
    "multi_dot": lambda x, y, out: torch.linalg.multi_dot([x, y, x], out=out),
    "add": lambda x, y, out: torch.add(x, y, out=out),
}


@requirement(
    "TP-AGAIN-01",
    "An operator that is called again on a DTensor with other numbers, dimensions or sizes gives the result for these.",
    source=f"{SOURCE}; pytorch/pytorch#149764",
)
@pytest.mark.parametrize(
    ("names", "layouts"),
    [(("mm", "multi_dot"), (COLUMNS, R, ROWS)), (("add",), (R, R))],
    ids=["products-elsewhere", "sums"],
)
@pytest.mark.world(2)
def test_out_again(world: World, names: tuple[str, ...], layouts: tuple[Placement, ...]) -> None:
    """Write into tensors in several placements in turn, which must stay in these."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        x, y = (floats(4, 4, start=start).to(rank.device) for start in (0, 2))
        for name in names:
            for layout in layouts:
                expected = torch.full((4, 4), 7.0, dtype=x.dtype, device=rank.device)
                out = distribute_tensor(expected.clone(), rank.mesh(), [layout])
                PRODUCTS[name](x, y, expected)
                try:
                    PRODUCTS[name](*(distribute_tensor(each, rank.mesh(), [R]) for each in (x, y)), out)
                except RuntimeError:  # on every rank
                    continue
                if out.placements != (layout,) or not right(expected, out):
                    wrong.append(f"{name} into {layout} is {out.to_local().tolist()} in {out.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


EXTREMES: dict[str, Operator] = {
    "amax": torch.amax,
    "amin": torch.amin,
    "max": torch.max,
    "min": torch.min,
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "amax of rows": lambda x: x.amax(0),
    "norm inf of rows": lambda x: torch.linalg.vector_norm(x, float("inf"), 0),
}


@requirement(
    "TP-OP-02",
    "A reduction, scan or sort of a DTensor gives the plain tensor's result for any dimensions, placements or sizes.",
    source=SOURCE,
)
@pytest.mark.parametrize("rows", [1, 3], ids=["a rank has none", "each rank has some"])
@pytest.mark.world(2)
def test_extremes_of_few(world: World, rows: int) -> None:
    """Reduce a matrix of one row, which the second rank has no part of, or of three."""

    def body(rank: Rank) -> list[str]:
        wrong, found = [], {}
        whole = floats(rows, 3, start=1).to(rank.device)
        for name, operator in EXTREMES.items():
            try:
                found[name] = operator(distribute_tensor(whole, rank.mesh(), [ROWS]))
            except (IndexError, RuntimeError) as e:
                wrong.append(f"{name}: {str(e).splitlines()[0]}")
        if not _any_rank(wrong, rank):
            wrong = [name for name, operator in EXTREMES.items() if not right(operator(whole), found[name])]
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("layout", [COLUMNS, ROWS, R], ids=["features", "rows", "replicated"])
@pytest.mark.world(2)
def test_embedding_losses(world: World, layout: Placement) -> None:
    """Compare embeddings, of which ranks have some features or some rows."""
    losses: dict[str, Operator] = {
        reduction: lambda a, b, t, reduction=reduction: functional.cosine_embedding_loss(a, b, t, reduction=reduction)
        for reduction in ("none", "sum")
    }

    def body(rank: Rank) -> list[str]:
        wrong = []
        a, b = (floats(4, 6, start=start).to(rank.device) for start in (0, 3))
        target = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=a.dtype, device=rank.device)
        for name, loss in losses.items():
            own = [distributed(x, layout, rank, rank.mesh()) for x in (a, b)]
            found = loss(*own, distribute_tensor(target, rank.mesh(), [R]))
            if not close(loss(a, b, target), found.full_tensor()):
                wrong.append(f"{name} is {found.full_tensor().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


DIAGONALS: dict[str, dict[str, Operator]] = {
    "trace": {"trace": torch.trace},
    "others": {
        "sum of the diagonal": lambda x: x.diagonal().sum(),
        "sum of the lower triangle": lambda x: x.tril().sum(),
    },
}


@requirement(
    "TP-MODEL-02",
    "An operator gives each DTensor that requires a gradient, alone or with others, the plain tensor's gradient.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", DIAGONALS)
@pytest.mark.world(2)
def test_gradients_of_diagonals(world: World, kind: str) -> None:
    """A square matrix, sharded or not."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, operator in DIAGONALS[kind].items():
            for layout in (R, ROWS, COLUMNS):
                plain = floats(4, 4).to(rank.device).requires_grad_()
                own: Any = distributed(plain.detach().clone(), layout, rank, rank.mesh()).requires_grad_()
                operator(plain).backward()
                try:
                    operator(own).backward()
                except RuntimeError as e:
                    wrong.append(f"{name} of {layout}: {str(e).splitlines()[0]}")
                    continue
                assert plain.grad is not None
                if not right(plain.grad, own.grad):
                    wrong.append(f"{name} of {layout}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
