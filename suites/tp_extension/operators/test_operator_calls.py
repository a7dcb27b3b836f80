"""How operators of DTensors are called: in place, with out=, several times, with lists, without communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operands, Operator, attention, choices, classes, close, distributed, floats, right
from fixtures.placements import MORE_OPERATORS, REDUCED
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import foreach

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"

A, B, CUBE = floats(5, 7), floats(5, 7, start=3), floats(2, 5, 6)
HEADS = floats(2, 4, 5, 4) / 4
ROW, MATRIX = floats(7), floats(7, 4, start=1)

IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "sub_": lambda x, y: x.sub_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, y: x.div_(y.abs() + 1),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ of a row": lambda x, y: x.copy_(y[2]),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 2.0),
    "add_ of a number": lambda x, y: x.add_(1),
    "mul_ by a number": lambda x, y: x.mul_(2),
    "pow_": lambda x, y: x.pow_(2),
    "neg_": lambda x, y: x.neg_(),
    "zero_": lambda x, y: x.zero_(),
    "clamp_": lambda x, y: x.clamp_(max=2),
    "relu_": lambda x, y: x.relu_(),
    "exp_": lambda x, y: x.exp_(),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "operator": lambda x, y: x.__iadd__(y),
    "out of add": lambda x, y: torch.add(y, y, out=x),
    "out of mul": lambda x, y: torch.mul(y, 2, out=x),
    "out of maximum": lambda x, y: torch.maximum(y, y, out=x),
}
"""Functions that change their first tensor and return it."""
NOT_LINEAR = (
    "add_ of a number",
    "addcmul_",
    "lerp_",
    "masked_fill_",
    "pow_",
    "clamp_",
    "relu_",
    "exp_",
    "sigmoid_",
    "out of maximum",
)
"""Those that cannot be computed from the parts of a pending sum."""


@requirement(
    "TP-WRITE-01",
    "An in-place operator, or one with out=, returns the DTensor that it has changed, in the placements that it had.",
    source="torch.Tensor: in-place operators; torch.add: out; pytorch/pytorch#163374",
)
@requirement(
    "TP-WRITE-02",
    "An in-place operator that a DTensor's placements do not allow raises an error on every rank and changes nothing.",
    source="torch.Tensor: in-place operators; pytorch/pytorch#163374",
)
@pytest.mark.world(2)
def test_in_place(world: World) -> None:
    """Give both tensors each placement; a pending sum may refuse a shard, and must refuse what is not linear."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for (name, change), of, by in itertools.product(IN_PLACE.items(), choices(A), choices(B)):
            case = f"{name} of {of} by {by}"
            x, y = (distributed(t.to(rank.device).clone(), p, rank, mesh) for t, p in ((A, of), (B, by)))
            before, other = x.to_local().clone(), y.to_local().clone()
            copied = x.clone()
            kept = copied.to_local().clone()
            expected = change(A.to(rank.device).clone(), B.to(rank.device))
            try:
                found = change(x, y)
            except RuntimeError:
                if not of.is_partial() or not (name in NOT_LINEAR or by.is_shard()):
                    wrong.append(f"{case}: refused")
                if not (torch.equal(before, x.to_local()) and x.placements == (of,)):
                    wrong.append(f"{case}: changed, though refused")
                continue
            if of.is_partial() and name in NOT_LINEAR:
                wrong.append(f"{case}: not refused")
            if found is not x or x.placements != (of,):
                wrong.append(f"{case}: another tensor, or other placements")
            if not right(expected, x):
                wrong.append(case)
            if not (torch.equal(other, y.to_local()) and torch.equal(kept, copied.to_local())):
                wrong.append(f"{case}: changes the other tensor, or a clone")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PARTS: dict[str, tuple[Any, ...]] = {
    "element": (2, 3),
    "elements of a row": (1, slice(2, 5)),
    "rows": (slice(1, 3),),
    "columns": (slice(None), slice(2, 6)),
    "block": (slice(1, 4), slice(2, 6)),
    "every second": (slice(None, None, 2), slice(1, None, 3)),
}
"""Parts of a matrix, by their indices."""


@requirement(
    "TP-WRITE-03",
    "Assigning to a part of a DTensor changes that part of the DTensor, or raises an error on every rank.",
    source="torch.Tensor.copy_; torch.distributed.tensor.DTensor; pytorch/pytorch#139735",
)
@pytest.mark.parametrize("given", ["whole", "sharded"])
@pytest.mark.world(2)
def test_parts(world: World, given: str) -> None:
    """Assign replicas to an element, rows or columns of a sharded matrix, or to parts that shards have as a whole."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, done = rank.mesh(), [], 0
        for of, (name, at) in itertools.product((Replicate(), Shard(0), Shard(1)), PARTS.items()):
            if (given == "whole") == any(of == Shard(dim) and part != slice(None) for dim, part in enumerate(at)):
                continue
            whole = A.to(rank.device).clone()
            x = distributed(whole, of, rank, mesh)
            value = whole[at] - 20
            whole[at] = value
            try:
                x[at] = distributed(value, Replicate(), rank, mesh)
            except (NotImplementedError, RuntimeError, AssertionError):
                continue
            done += 1
            if not right(whole, x):
                wrong.append(f"{name} of {of}")
        assert done, "all are refused"
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


WRITTEN: dict[str, dict[str, tuple[Operator, tuple[torch.dtype, ...]]]] = {
    "one result": {
        "add": (lambda a, out: torch.add(a[0], a[1], out=out[0]), (torch.float64,)),
        "exp": (lambda a, out: torch.exp(a[0] / 4, out=out[0]), (torch.float64,)),
        "sum": (lambda a, out: torch.sum(a, 0, out=out[0]), (torch.float64,)),
        "vector_norm": (lambda a, out: torch.linalg.vector_norm(a, dim=0, out=out[0]), (torch.float64,)),
    },
    "a reduction": {
        "amax": (lambda a, out: torch.amax(a, 0, out=out[0]), (torch.float64,)),
        "amin": (lambda a, out: torch.amin(a, 0, out=out[0]), (torch.float64,)),
        "mean": (lambda a, out: torch.mean(a, 0, out=out[0]), (torch.float64,)),
        "prod": (lambda a, out: torch.prod(a, 0, out=out[0]), (torch.float64,)),
        "any": (lambda a, out: torch.any(a > 15, 0, out=out[0]), (torch.bool,)),
    },
    "two results": {
        "min": (lambda a, out: torch.min(a, 0, out=out), (torch.float64, torch.int64)),
        "max": (lambda a, out: torch.max(a, 0, out=out), (torch.float64, torch.int64)),
    },
}
"""Functions of a matrix that write into a tuple of vectors of these types."""


@requirement(
    "TP-WRITE-333",
    "An operator with out= writes the plain result into a DTensor, whatever the placements of an earlier call's.",
    source="torch.add: out; torch.min: out; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.world(2)
def test_written_elsewhere(world: World, family: str) -> None:
    """Write into replicas, then into shards, and into replicas again; no value occurs twice in a column."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        whole = (torch.arange(20).remainder(7) * 3).double().view(4, 5).to(rank.device)
        written = WRITTEN[family] if family != "two results" or runs_with(">=2.13") else {}  # no rules before
        for (name, (operator, types)), of in itertools.product(written.items(), (Replicate(), Shard(1))):
            expected = tuple(torch.zeros(5, dtype=t, device=rank.device) for t in types)
            operator(whole, expected)
            for into in Replicate(), Shard(0), Replicate():
                out = tuple(distributed(torch.zeros_like(x), into, rank, mesh) for x in expected)
                operator(distributed(whole.clone(), of, rank, mesh), out)
                if not all(right(x, y) for x, y in zip(expected, out, strict=True)):
                    wrong.append(f"{name} of {of} into {into}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


ROWS: dict[str, dict[str, Operator]] = {
    "elements": {
        "add": lambda a, out: torch.add(a[0], a[1], out=out),
        "exp": lambda a, out: torch.exp(a[0] / 4, out=out),
        "maximum": lambda a, out: torch.maximum(a[0], a[1], out=out),
        "where": lambda a, out: torch.where(a[0] > 6, a[0], a[1], out=out),
    },
    "reductions": {
        "amax": lambda a, out: torch.amax(a, 0, out=out),
        "amin": lambda a, out: torch.amin(a, 0, out=out),
        "mean": lambda a, out: torch.mean(a, 0, out=out),
        "prod": lambda a, out: torch.prod(a, 0, out=out),
        "any": lambda a, out: torch.any(a > 15, 0, out=out),
        "std": lambda a, out: torch.std(a, 0, out=out),
    },
    "sums": {
        "sum": lambda a, out: torch.sum(a, 0, out=out),
        "vector_norm": lambda a, out: torch.linalg.vector_norm(a, dim=0, out=out),
        "mv": lambda a, out: torch.mv(a.t(), a[:, 0], out=out),
    },
}
"""Functions of a matrix that write into a vector."""


@requirement(
    "TP-WRITE-453",
    "An operator with out= that is given a row of a DTensor writes into that DTensor, or all ranks raise an error.",
    source="torch.add: out; torch.amax: out; torch.Tensor.select; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("family", ROWS)
@pytest.mark.world(2)
def test_written_rows(world: World, family: str) -> None:
    """The middle one of three rows is given, of replicas or of shards of columns; an error changes nothing."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, done = rank.mesh(), [], 0
        whole = (torch.arange(20).remainder(7) * 3).double().view(4, 5).to(rank.device)
        for (name, operator), of in itertools.product(ROWS[family].items(), (Replicate(), Shard(0), Shard(1))):
            row = operator(whole, None)
            expected = torch.stack([torch.zeros_like(row), row, torch.zeros_like(row)])
            for into in Replicate(), Shard(1):
                case = f"{name} of {of} into {into}"
                table = distributed(torch.zeros_like(expected), into, rank, mesh)
                try:
                    operator(distributed(whole.clone(), of, rank, mesh), table[1])
                except RuntimeError:
                    if family == "elements" or not right(torch.zeros_like(expected), table):
                        wrong.append(f"{case}: refused, or changed though refused")
                    continue
                done += 1
                if not right(expected, table):
                    wrong.append(case)
        assert done, "all are refused"
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


KEPT: dict[str, Callable[[Any], Any]] = {
    "t": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1),
    "slice": lambda x: x[..., ::2],
    "select": lambda x: x[..., 1],
    "split": lambda x: x.split(2, 2)[1],
    "mT": lambda x: x.mT,
    "view": lambda x: x.view(3, 2, 4, 3, 2),
    "flattened": lambda x: x.flatten(2),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "alias": lambda x: x[:],
}
"""Views of a tensor of four dimensions, or three, that leave the first one, or move it whole."""


@requirement(
    "TP-VIEW-01",
    "A view of a DTensor has the shape, stride and contiguity of the plain tensor's view.",
    source="torch.Tensor: stride, is_contiguous; torch.distributed.tensor.DTensor",
)
@requirement(
    "TP-VIEW-02",
    "A view that keeps the sharded dimension shares the memory of its DTensor, whatever the sizes of shards.",
    source="torch.Tensor.view; torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@requirement(
    "TP-VIEW-03",
    "contiguous() of a DTensor is contiguous, on each rank as in the whole, and its gradient is that of the tensor.",
    source="torch.Tensor.contiguous; torch.distributed.tensor.DTensor",
)
@requirement(
    "TP-VIEW-7903",
    "A view of a DTensor leaves the DTensor itself as it was, which can be viewed or redistributed as before.",
    source="torch.distributed.tensor.DTensor; pytorch/pytorch#179318",
)
@pytest.mark.world(2)
def test_views(world: World) -> None:
    """Three, one or no rows are not divided evenly; a rank's part may be empty."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for rows, placement, (name, view) in itertools.product(
            (3, 4, 1), (Replicate(), Shard(0), Partial()), KEPT.items()
        ):
            if name == "split" and rows == 1 and runs_with(">=2.14"):  # which gathers a row that a rank lacks
                continue
            whole = floats(rows, 4, 6).to(rank.device)
            if name == "view":
                view = lambda x, rows=rows: x.view(rows, 2, 2, 3, 2)  # noqa: E731
            case = f"{name} of {rows} rows, {placement}"
            x = distributed(whole, placement, rank, mesh)
            at = messages.launched()
            expected, found = view(whole), view(x)
            if (found.shape, found.stride(), found.is_contiguous()) != (
                expected.shape,
                expected.stride(),
                expected.is_contiguous(),
            ):
                wrong.append(f"{case}: stride {found.stride()}")
            local, own = found.to_local(), x.to_local()
            if local.untyped_storage().data_ptr() != own.untyped_storage().data_ptr() or messages.launched() != at:
                wrong.append(f"{case}: copied")
            if not right(expected, found):
                wrong.append(case)
            if local.numel():
                packed = found.contiguous()
                if not (packed.is_contiguous() and packed.to_local().is_contiguous() and right(expected, packed)):
                    wrong.append(f"{case}: contiguous")
            if rows == 3 and not (right(expected, view(x)) and right(whole, x.redistribute(mesh, [Shard(1)]))):
                wrong.append(f"{case}: changed")
        for placement in Replicate(), Shard(0), Shard(1), Shard(2):
            whole = floats(3, 5, 6).to(rank.device)
            x = distributed(torch.zeros_like(whole), placement, rank, mesh).requires_grad_()
            x.transpose(0, 2).contiguous().backward(distributed(whole.transpose(0, 2), Replicate(), rank, mesh))
            if x.grad is None or not right(whole, x.grad):  # type: ignore[arg-type]
                wrong.append(f"gradient of contiguous, {placement}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-VIEW-34",
    "as_strided of a DTensor with its own size and strides gives it back without communication, but raises an "
    "error on every rank for others.",
    source="torch.Tensor.as_strided; torch.distributed.tensor.DTensor; test_view_ops.py: test_as_strided_fake_impl",
)
@pytest.mark.world(2)
def test_as_strided(world: World) -> None:
    """Give contiguous and transposed tensors in each placement other sizes, strides or a later beginning."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for placement, turned in itertools.product((Replicate(), Shard(0), Shard(1), Partial()), (False, True)):
            whole = A.to(rank.device)
            x = distributed(whole, placement, rank, mesh).requires_grad_()
            given, whole = (x.t(), whole.t()) if turned else (x, whole)
            case, at = f"{placement}, {turned=}", messages.launched()
            again = given.as_strided(whole.shape, whole.stride())
            if again.placements != given.placements or not torch.equal(again.to_local(), given.to_local()):
                wrong.append(f"{case}: its own")
            for size, stride, *offset in ((7, 5), (1, 5)), ((5, 7), (5, 1)), ((2, 3), (7, 1)), ((5, 7), (7, 1), 1):
                if (tuple(size), tuple(stride), offset) == (tuple(whole.shape), whole.stride(), []):
                    continue
                try:
                    given.as_strided(size, stride, *offset)  # type: ignore[arg-type]
                except RuntimeError:
                    continue
                wrong.append(f"{case}: {size}, {stride}, {offset} is not refused")
            if messages.launched() != at:
                wrong.append(f"{case}: communicates")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SQUEEZED: tuple[tuple[int, ...] | None, ...] = (None, (0,), (1,), (-1,), (0, -1))
"""Dimensions that squeeze is given, or none."""


@requirement(
    "TP-VIEW-274",
    "squeeze of a DTensor removes dimensions of one element of the whole, and none that has one element on each rank.",
    source="torch.Tensor.squeeze; torch.distributed.tensor.DTensor; pytorch/pytorch#166124",
)
@requirement(
    "TP-VIEW-275",
    "squeeze or squeeze_ that would remove the sharded dimension is right, or is refused and changes nothing.",
    source="torch.Tensor: squeeze, squeeze_; torch.distributed.tensor.DTensor; pytorch/pytorch#174136",
)
@requirement(
    "TP-VIEW-1400",
    "squeeze_ of a dimension before the sharded one gives a DTensor the plain tensor's shape, sharded one dimension "
    "earlier for each that is gone.",
    source="torch.Tensor.squeeze_; torch.distributed.tensor.DTensor; pytorch/pytorch#174136",
)
@pytest.mark.world(2)
def test_squeezed(world: World) -> None:
    """Shard dimensions of one, two or four elements. In place, remove what is sharded, one before it, or nothing."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        shapes = ((2, 4, 1), (1, 2, 2), (1, 4), (2, 1), (2, 2), (1, 1, 2))
        ways = (False, True) if runs_with(">=2.13") else (False,)  # before, squeeze_ leaves other placements
        for shape, dims, in_place in itertools.product(shapes, SQUEEZED, ways):
            whole = floats(*shape).to(rank.device)
            given = () if dims is None else dims if len(dims) == 1 else (dims,)
            removed = {i for i, n in enumerate(shape) if n == 1 and (dims is None or {i, i - len(shape)} & {*dims})}
            for placement in choices(whole):
                case = f"{dims} of {shape}, {placement}, {in_place=}"
                sole = isinstance(placement, Shard) and placement.dim in removed
                earlier = [i for i in removed if isinstance(placement, Shard) and i < placement.dim]
                if in_place and removed and not sole and not earlier:
                    continue  # as in dtensor_squeezed_in_place.py
                x = distributed(whole.clone(), placement, rank, mesh)
                before = x.to_local().clone()
                try:
                    found = x.squeeze_(*given) if in_place else x.squeeze(*given)
                except RuntimeError:
                    if not sole or x.shape != whole.shape or not torch.equal(before, x.to_local()):
                        wrong.append(f"{case}: refused, or changed")
                    continue
                if not right(whole.squeeze(*given), found):
                    wrong.append(f"{case}: {tuple(found.shape)}, {found.placements}")
                kept = [Shard(placement.dim - len(earlier))] if isinstance(placement, Shard) else [placement]
                if not sole and list(found.placements) != kept:
                    wrong.append(f"{case}: {found.placements} and not {kept}")
                if in_place and found is not x:
                    wrong.append(f"{case}: another DTensor")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_squeezed_in_place(world: World) -> None:
    """Remove the last of two dimensions, which has one element, from replicas and shards."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for placement, given in itertools.product((Replicate(), Shard(0)), ((), (1,), (-1,))):
            whole = floats(4, 1).to(rank.device)
            x = distributed(whole.clone(), placement, rank, mesh)
            x.squeeze_(*given)
            if x.shape != (4,) or not right(whole.squeeze(), x):
                wrong.append(f"{given} of {placement}: has shape {tuple(x.shape)}, locally {tuple(x.to_local().shape)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


AGAIN: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "sum": (lambda x, a: x.sum(*a), ((0,), (1,), ((0, 1),), (0, True), (-1,))),
    "max": (lambda x, a: x.max(a).values, (0, 1, -1)),
    "aminmax": (lambda x, a: torch.stack(torch.aminmax(x, dim=a)), (None, 1, 0)),
    "std": (lambda x, a: x.std(0, correction=a), (1, 0, 2)),
    "norm": (lambda x, a: torch.linalg.vector_norm(x, *a), ((2,), (1,), (2, 0), (2, 1))),
    "softmax": (lambda x, a: x.softmax(a), (0, 1)),
    "cumsum": (lambda x, a: x.cumsum(a), (1, 0)),
    "sort": (lambda x, a: x.sort(a[0], descending=a[1]).values, ((0, False), (1, False), (0, True))),
    "topk": (lambda x, a: x.topk(*a).values, ((2, 0), (2, 1), (2, 0, False))),
    "argmax": (lambda x, a: (x * 7 + x.cumsum(1)).argmax(a), (1, 0)),
    "roll": (lambda x, a: x.roll(*a), ((1, 0), (2, 0), (1, 1), (3,))),
    "flip": (lambda x, a: x.flip(a), (0, 1, (0, 1))),
    "triu": (lambda x, a: x.triu(a), (0, 1, -1)),
    "diagonal": (lambda x, a: x.diagonal(a), (0, 2)),
    "slice": (lambda x, a: x[a], (slice(1, 3), slice(2, 4), slice(0, 4, 2), (slice(None), slice(1, 3)))),
    "select": (lambda x, a: x.select(*a), ((0, 1), (0, 2), (1, 2), (1, -1))),
    "narrow": (lambda x, a: x.narrow(*a), ((0, 0, 2), (0, 1, 2), (1, 1, 2))),
    "chunk": (lambda x, a: x.chunk(*a)[1], ((2, 0), (3, 0), (2, 1))),
    "unsafe_chunk": (lambda x, a: torch.unsafe_chunk(x, *a)[1], ((2, 0), (3, 0), (2, 1))),
    "split": (lambda x, a: x.split(*a)[1], ((2, 0), ([1, 4], 0), ([3, 2], 0), (2, 1))),
    "unbind": (lambda x, a: x.unsqueeze(-1).expand(5, 7, 3).unbind(2)[a], (0, 2)),
    "cat": (lambda x, a: torch.cat([x, x], a), (0, 1)),
    "stack": (lambda x, a: torch.stack([x, x], a), (0, 1, 2)),
    "transpose": (lambda x, a: x.unsqueeze(0).transpose(*a), ((1, 2), (0, 1), (0, 2))),
    "permute": (lambda x, a: x.unsqueeze(0).permute(a), ((0, 2, 1), (2, 1, 0), (1, 0, 2))),
    "unsqueeze": (lambda x, a: x.unsqueeze(a), (0, 1, 2)),
    "expand": (lambda x, a: x.expand(a, 5, 7), (2, 3)),
    "repeat": (lambda x, a: x.unsqueeze(0).repeat(a), ((2, 1, 1), (3, 1, 1))),
    "view": (lambda x, a: x.unsqueeze(0).view(a), ((5, 7), (1, 5, 7), (5, 1, 7))),
    "pad": (
        lambda x, a: functional.pad(x, *a),
        (((1, 1),), ((2, 0),), ((0, 0, 1, 1),), ((1, 1), "constant", 2.0), ((1, 1), "constant", 3.0)),
    ),
    "clamp": (lambda x, a: x.clamp(*a), ((-1, 1), (-2, 1), (None, 3))),
    "add": (lambda x, a: torch.add(x, 1, alpha=a), (1, 2, -1)),
    "add of both": (lambda x, a: torch.add(x, x, alpha=a), (1, 2)),
    "pow": (lambda x, a: x**a, (2, 3)),
    "lerp": (lambda x, a: torch.lerp(x, x * 2, a), (0.5, 0.25)),
    "masked_fill": (lambda x, a: x.masked_fill(x > 0, a), (1.0, 2.0)),
    "leaky_relu": (lambda x, a: functional.leaky_relu(x, a), (0.5, 0.25)),
    "gelu": (lambda x, a: functional.gelu(x, approximate=a), ("none", "tanh")),
    "conversion": (lambda x, a: x.to(a), (torch.int32, torch.bool, torch.float32)),
    "empty_like": (lambda x, a: torch.empty_like(x, dtype=a).zero_(), (None, torch.int32)),
    "fill_": (lambda x, a: x.clone().fill_(a), (2.0, 3.0)),
    "full_like": (lambda x, a: torch.full_like(x, a), (2.0, 3.0)),
    "new_full": (lambda x, a: x.new_full(*a), (((5, 7), 2.0), ((3, 2), 2.0), ((5, 7), 3.0), ((7,), 3.0))),
    "new_zeros": (lambda x, a: x.new_zeros(a), ((5, 7), (2,))),
    "new_empty_strided": (lambda x, a: x.new_empty_strided(*a).zero_(), (((5, 7), (7, 1)), ((5, 3), (3, 1)))),
    "histc": (lambda x, a: x.histc(*a), ((4, -5, 5), (4, -3, 3))),
    "one_hot": (lambda x, a: functional.one_hot(x.abs().long(), a), (6, 8)),
    "layer_norm": (lambda x, a: functional.layer_norm(x, *a), (((7,),), ((5, 7),), ((7,), None, None, 1.0))),
    "group_norm": (lambda x, a: functional.group_norm(x[:4, :6], a), (2, 3)),
    "cross_entropy": (
        lambda x, a: functional.cross_entropy(x, (x[:, 0] > 0).long(), ignore_index=a, reduction="sum"),
        (-100, 1, 0),
    ),
    "einsum": (lambda x, a: torch.einsum(a, x, x), ("ij,ij->i", "ij,ij->j", "ij,kj->ik", "ij,ik->jk")),
    "interpolate": (lambda x, a: functional.interpolate(x[None, None], scale_factor=a), (2, 3)),
    "max_pool2d": (lambda x, a: functional.max_pool2d(x[None, None], a), (2, 3)),
    "gather": (lambda x, a: x.gather(a, (x > 0).long()), (0, 1)),
    "index_select": (lambda x, a: x.index_select(a, (x[:3, 0] > 0).long()), (0, 1)),
    "scatter": (lambda x, a: x.scatter(a[0], (x > 0).long(), a[1]), ((0, 1.0), (1, 1.0), (0, 2.0))),
    "embedding": (lambda x, a: functional.embedding((x[0] > 0).long(), x, padding_idx=a), (None, 0, 1)),
}
"""Functions of a matrix and of an argument that is no tensor, with its values."""
COUNTS: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "topk": (lambda x, a: x.topk(a, 0).values, (2, 3)),
    "histc": (lambda x, a: x.histc(a, -5, 5), (4, 5)),
}
"""Functions that return as many elements as their argument says."""


def _again(rank: Rank, functions: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]]) -> list[str]:
    """Call each function with its arguments one after the other, and with the first one again: what is wrong."""
    mesh, wrong, whole = rank.mesh(), [], A.to(rank.device)
    for placement, (name, (function, arguments)) in itertools.product((Shard(0), Shard(1)), functions.items()):
        x = distributed(whole, placement, rank, mesh)
        for argument in (*arguments, arguments[0]):
            case = f"{name} of {placement} with {argument}"
            try:
                if not right(function(whole, argument), function(x, argument)):
                    wrong.append(case)
            except (NotImplementedError, RuntimeError, AssertionError, IndexError) as error:
                wrong.append(f"{case}: {type(error).__name__}")
    return wrong


@requirement(
    "TP-AGAIN-01",
    "An operator that is called again on a DTensor with other numbers, dimensions or sizes gives the result for these.",
    source=f"{SOURCE}; pytorch/pytorch#149764",
)
@pytest.mark.world(2)
def test_again(world: World) -> None:
    """Operators whose argument is a number, a dimension, a size, a dtype or a mode."""

    def body(rank: Rank) -> list[str]:
        return _again(rank, AGAIN)

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-AGAIN-01",
    "An operator that is called again on a DTensor with other numbers, dimensions or sizes gives the result for these.",
    source=f"{SOURCE}; pytorch/pytorch#149764",
)
@pytest.mark.world(2)
def test_counts_again(world: World) -> None:
    """Another number of largest elements, or of bins."""

    def body(rank: Rank) -> list[str]:
        return _again(rank, COUNTS)

    assert_on_ranks([[]] * world.size, world.run(body))


FORMATTED: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "copied": {
        "clone": lambda x, a: x.clone(memory_format=a),
        "contiguous": lambda x, a: x.contiguous(memory_format=a),
    },
    "made-or-converted": {
        "empty_like": lambda x, a: torch.empty_like(x, memory_format=a).fill_(2),
        "zeros_like": lambda x, a: torch.zeros_like(x, memory_format=a),
        "ones_like": lambda x, a: torch.ones_like(x, memory_format=a),
        "full_like": lambda x, a: torch.full_like(x, 2.0, memory_format=a),
        "to": lambda x, a: x.to(torch.float32, memory_format=a),
        "half": lambda x, a: x.half(memory_format=a),
    },
}
"""Functions of images and of a memory format."""


@requirement(
    "TP-AGAIN-2700",
    "A DTensor that is made like another one, copied or converted has the memory format asked for, whichever was "
    "asked for before.",
    source="torch: empty_like, zeros_like, ones_like, full_like; torch.Tensor: to, clone, contiguous: memory_format",
)
@pytest.mark.parametrize("kind", FORMATTED)
@pytest.mark.world(2)
def test_formats_again(world: World, kind: str) -> None:
    """Ask for contiguous images, for channels last, and for contiguous ones again."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, whole = rank.mesh(), [], floats(4, 2, 4, 6).to(rank.device)
        for placement, (name, function) in itertools.product(
            (Replicate(), Shard(0), Shard(2)), FORMATTED[kind].items()
        ):
            x = distributed(whole, placement, rank, mesh)
            for asked in torch.contiguous_format, torch.channels_last, torch.contiguous_format:
                expected, found = function(whole, asked), function(x, asked)
                if not right(expected, found) or found.stride() != expected.stride():
                    wrong.append(f"{name} of {placement}, {asked}: strides {found.stride()}")
                assert found.to_local().is_contiguous(memory_format=asked), f"{name} of {placement}"
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


BY_NUMBERS: dict[str, dict[str, Operator]] = {
    "sums": {
        "sum": torch.add,
        "sum with it": lambda x, a: a + x,
        "sum of a multiple": lambda x, a: torch.add(x, a, alpha=2),
        "difference": torch.sub,
    },
    "others": {
        "difference from it": lambda x, a: a - x,
        "product": torch.mul,
        "product in place": lambda x, a: x.clone().mul_(a),
        "quotient": torch.div,
        "quotient of it": lambda x, a: a / x,
        "power": torch.pow,
        "power of it": lambda x, a: a**x,
        "remainder": torch.remainder,
        "comparison": torch.gt,
        "equality": torch.eq,
        "minimum": lambda x, a: x.clamp(min=a),
        "choice": lambda x, a: torch.where(x > 1, x, a),
        "masked_fill": lambda x, a: x.masked_fill(x > 1, a),
        "lerp": lambda x, a: torch.lerp(x, x * 2, a),
    },
}
"""Functions of a matrix and of a number, which may be a tensor without dimensions."""


@requirement(
    "TP-AGAIN-2000",
    "An operator on a DTensor gives the same for a number as for such a tensor, whichever it was given before.",
    source=f"{SOURCE}; pytorch/pytorch#163193",
)
@pytest.mark.parametrize("kind", BY_NUMBERS)
@pytest.mark.world(2)
def test_numbers_after_tensors(world: World, kind: str) -> None:
    """Give a replicated tensor without dimensions and a number, one after the other; the matrix has each placement."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        two = torch.tensor(2.0, dtype=torch.float64, device=rank.device)
        for number_first, (name, function) in itertools.product((False, True), BY_NUMBERS[kind].items()):
            whole = floats(3, 8 if number_first else 9, start=1).to(rank.device)
            for layout in choices(whole):
                x, tensor = distributed(whole, layout, rank, mesh), distributed(two, Replicate(), rank, mesh)
                for given in (2.0, tensor) if number_first else (tensor, 2.0):
                    kind_given = "a tensor" if given is tensor else "a number"
                    case = f"{name} of {layout} with {kind_given}, {number_first=}"
                    try:
                        if not close(function(whole, 2.0), function(x, given).full_tensor()):
                            wrong.append(case)
                    except (AttributeError, RuntimeError) as e:
                        wrong.append(f"{case}: {type(e).__name__}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


APART, BOTH, ALL = Shard(0), (Shard(0), Shard(0)), (Shard(0), Replicate())
FREE: dict[str, tuple[Operator, Operands, tuple[Placement, ...], bool]] = {
    "layer_norm": (
        lambda a, w, b: functional.layer_norm(a, (7,), w, b),
        (A, ROW, ROW + 1),
        (APART, Replicate(), Replicate()),
        True,
    ),
    "rms_norm": (lambda a, w: functional.rms_norm(a, (7,), w), (A, ROW), ALL, True),
    "attention of heads": (attention, (HEADS, HEADS + 1, HEADS), (Shard(1),) * 3, True),
    "linear of sequences": (
        functional.linear,
        (CUBE, floats(7, 6), ROW),
        (Shard(1), Replicate(), Replicate()),
        True,
    ),
    "linear by columns": (functional.linear, (CUBE, floats(7, 6), ROW), (Replicate(), APART, APART), True),
    "linear by rows": (functional.linear, (CUBE, floats(7, 6)), (Shard(2), Shard(1)), True),
    "mm by rows": (torch.mm, (A, MATRIX), (Shard(1), APART), True),
    "bmm": (torch.bmm, (CUBE, floats(2, 6, 3)), BOTH, True),
    "cross_entropy": (
        lambda a, i: functional.cross_entropy(a, i, reduction="none"),
        (A, classes(7, 5)),
        BOTH,
        True,
    ),
    "sum of cross_entropy": (
        lambda a, i: functional.cross_entropy(a, i, reduction="sum"),
        (A, classes(7, 5)),
        BOTH,
        False,
    ),
    "mean of cross_entropy": (functional.cross_entropy, (A[:4], classes(7, 4)), BOTH, False),
    **{
        f"{reduction} of nll_loss{kind}": (
            lambda a, i, reduction=reduction: functional.nll_loss(a, i, reduction=reduction),
            (given, targets),
            BOTH,
            True,
        )
        for reduction in ("sum", "none")
        for kind, given, targets in (("", A, classes(7, 5)), (" of images", floats(4, 6, 2, 2), classes(6, 4, 2, 2)))
    },
    "weighted sum of nll_loss": (
        lambda a, i, w: functional.nll_loss(a, i, w, reduction="sum", ignore_index=2),
        (A, classes(7, 5), ROW.abs()),
        (*BOTH, Replicate()),
        True,
    ),
    "mse_loss": (lambda a, b: functional.mse_loss(a, b, reduction="sum"), (A, B), BOTH, True),
    "dist": (torch.dist, (A, B), BOTH, False),
    "histogram of a range": (lambda a: a.histc(4, -5, 5), (A,), (APART,), True),
    "softmax": (lambda a: a.softmax(1), (A,), (APART,), True),
    "cumsum": (lambda a: a.cumsum(1), (A,), (APART,), True),
    "topk": (lambda a: a.topk(2, 1).values, (A,), (APART,), True),
    "roll": (lambda a: a.roll(2, 1), (A,), (APART,), True),
    "flip": (lambda a: a.flip(1), (A,), (APART,), True),
    "pad": (lambda a: functional.pad(a, (1, 1), value=2.0), (A,), (APART,), True),
    "cat": (lambda a, b: torch.cat([a, b], 1), (A, B), BOTH, True),
    "stack": (lambda a, b: torch.stack([a, b]), (A, B), BOTH, True),
    "repeat": (lambda a: a.repeat(1, 2), (A,), (APART,), True),
    "glu": (functional.glu, (floats(5, 6),), (APART,), True),
    "where of numbers": (lambda a: torch.where(a > 0, 1, 0), (A,), (APART,), True),
    "one_hot": (lambda i: functional.one_hot(i, 7), (classes(7, 5),), (APART,), True),
    "embedding of a batch": (functional.embedding, (classes(7, 5), MATRIX), ALL, True),
    "embedding of columns": (functional.embedding, (classes(7, 5), MATRIX), (Replicate(), Shard(1)), True),
    "columns by index": (lambda a, i: a[:, i], (A, classes(7, 3)), ALL, True),
    "rows by a sharded index": (lambda a, i: a[i], (A, classes(5, 3)), (Replicate(), APART), False),
    "gather": (lambda a, i: a.gather(1, i), (A, classes(7, 5, 2)), BOTH, True),
    "scatter": (lambda a, i, b: a.scatter(1, i, b), (A, classes(7, 5, 2), floats(5, 2)), (APART,) * 3, False),
    "max_pool2d": (lambda a: functional.max_pool2d(a, 2), (floats(3, 2, 4, 4),), (APART,), True),
    "interpolate": (lambda a: functional.interpolate(a, scale_factor=2), (floats(3, 2, 4, 4),), (APART,), True),
    "conv2d": (functional.conv2d, (floats(3, 2, 4, 4), floats(2, 2, 3, 3)), ALL, True),
    "group_norm": (
        lambda a, w, b: functional.group_norm(a, 2, w, b),
        (floats(4, 6, 3), floats(6), floats(6, start=1)),
        (APART, Replicate(), Replicate()),
        False,  # PyTorch 2.13 gives the backward of a shard the size of the whole
    ),
    "group_norm without weights": (lambda a: functional.group_norm(a, 2), (floats(4, 6, 3),), (APART,), False),
    "product with a transposed weight": (lambda a, w: a @ w.t(), (A, floats(4, 7)), ALL, True),
    "product with a copy of a transposed weight": (lambda a, w: a @ w.t().contiguous(), (A, floats(4, 7)), ALL, True),
    "product with a permuted weight": (
        lambda a, w: torch.einsum("ij,kj->ik", a, w.permute(1, 0).contiguous()),
        (A, MATRIX),
        ALL,
        True,
    ),
    "fft2": (lambda a: torch.fft.fft2(a).abs(), (torch.complex(CUBE, CUBE + 1),), (APART,), True),
    "new_full": (lambda a: a.new_full((5, 7), 2.0), (A,), (APART,), True),
    "new_zeros": (lambda a: a.new_zeros((2, 3)), (A,), (APART,), True),
    "sum of pending sums": (lambda a, b: (a + b) * 2 - a, (A, B), (Partial(), Partial()), True),
    "split of a pending sum": (lambda a: a.split(3, 1)[2].t(), (A,), (Partial(),), False),
    "padded pending sum": (lambda a: functional.pad(a, (1, 1)), (A,), (Partial(),), True),
    "product with a pending sum": (torch.mm, (A, MATRIX), (Partial(), Replicate()), False),
    **{
        name: (operator, (A,), (APART,), True)
        for name, operator in {
            "columns": lambda a: a[:, 1:4],
            "last columns": lambda a: a[..., -2:],
            "every second column": lambda a: a[:, ::2],
            "column": lambda a: a[:, 3],
            "columns behind a new dimension": lambda a: a[:, None, 1:3],
            "two cuts joined": lambda a: torch.cat([a[:, :2], a[:, 4:]], 1),
            "all parts of a split": lambda a: torch.stack([part.sum(1) for part in a.split([2, 5], 1)]),
            "copies along a new dimension": lambda a: a.unsqueeze(1).expand(5, 3, 7),
            "differences": torch.diff,
            "largest of each row": lambda a: a.max(1).values,
            "sum of each row": lambda a: a.sum(1),
            "deviation of each row": lambda a: a.std(1),
            "logsumexp of each row": lambda a: a.logsumexp(1),
        }.items()
    },
}
"""Operators with their operands and these operands' placements; last, whether the backward is free as well."""
if runs_with("<2.13"):  # which has no backward of the one, and gathers the others
    del FREE["interpolate"], FREE["scatter"], FREE["largest of each row"]
    FREE = {name: operator for name, operator in FREE.items() if "nll_loss" not in name}  # whose backward it adds up
if runs_with(">=2.14"):  # which counts the targets of all ranks first, and gathers what a distance is of
    del FREE["mean of cross_entropy"], FREE["dist"]


@requirement(
    "TP-FREE-01",
    "An operator that treats each shard on its own, or is linear in pending sums, does not communicate.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@requirement(
    "TP-FREE-02",
    "The backward of an operator that treats each shard on its own communicates no more than its forward.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.world(2)
def test_free(world: World) -> None:
    """Count collectives of uneven shards' operators; the gradient of weights is left pending."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given, placements, back) in FREE.items():
            own = [distributed(x.to(rank.device), p, rank, mesh) for x, p in zip(given, placements, strict=True)]
            for x in own[:1] if "weighted" in name else own:
                x.requires_grad_(x.is_floating_point() or x.is_complex())
            at = messages.launched()
            found = operator(*own)
            if messages.launched() != at:
                wrong.append(f"{name}: {messages.launched() - at} collectives")
            if found.requires_grad and back:
                kept = [Replicate() if p.is_partial() else p for p in found.placements]
                gradient = distribute_tensor(torch.ones(found.shape, dtype=found.dtype), mesh, kept, src_data_rank=None)
                at = messages.launched()
                found.backward(gradient)
                if messages.launched() != at:
                    wrong.append(f"backward of {name}: {messages.launched() - at} collectives")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PAIRS: dict[str, Operator] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b + 100),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mm": lambda a, b: a @ b.t(),
    "bmm": lambda a, b: torch.bmm(a[None], b.t()[None]),
    "addmm": lambda a, b: torch.addmm(a[:, :5], a, b.t()),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "comparison": lambda a, b: a > b,
    "equal": lambda a, b: torch.tensor(torch.equal(a, b)),
    "copy_": lambda a, b: torch.zeros_like(a).copy_(b),
    "out": lambda a, b: torch.add(a, b, out=torch.zeros_like(a)),
    "dist": torch.dist,
    "squared differences": lambda a, b: functional.mse_loss(a, b, reduction="sum"),
}
MADE: dict[str, Operator] = {
    "split": lambda a, b: a.split(3, 1)[2],
    "uneven split": lambda a, b: a.split([2, 3], 0)[1],
    "view": lambda a, b: a.view(35),
    "pad": lambda a, b: functional.pad(a, (1, 1)),
    "pad with a number": lambda a, b: functional.pad(a, (1, 1), value=2.0),
    "pad below with a number": lambda a, b: functional.pad(a, (0, 0, 0, 1), value=2.0),
    "roll": lambda a, b: a.roll(1, 0),
    "tril": lambda a, b: a.tril(),
    "diff": lambda a, b: torch.diff(a),
    "sort": lambda a, b: a.sort(0).values,
    "conversion": lambda a, b: a.float(),
    "conversion to whole numbers": lambda a, b: (a / 4).to(torch.int32),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 1.0),
    "abs": lambda a, b: a.abs(),
    "plain number added": lambda a, b: a + torch.tensor(3.0, dtype=torch.float64),
    "plain number subtracted from": lambda a, b: torch.tensor(3.0, dtype=torch.float64) - a,
    "plain number multiplied": lambda a, b: a * torch.tensor(-3.0, dtype=torch.float64),
    "cat": lambda a, b: torch.cat([a, a]),
    "stack": lambda a, b: torch.stack([a, a], 1),
}


@requirement(
    "TP-PEND-01",
    "An operator on two DTensors with pending reductions, equal or different ones, gives what it gives on the results.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@requirement(
    "TP-PEND-02",
    "A maximum of pending maxima, or minimum of pending minima, stays pending without communication.",
    source="torch.distributed.tensor.Partial: reduce_op; pytorch/pytorch#170430",
)
@pytest.mark.world(2)
def test_two_pending(world: World) -> None:
    """Combine tensors that are pending with each reduction, with the same or with a sum; reshape or cut one of them."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        parts = torch.stack([A, B]).to(rank.device), torch.stack([B + 1, A * 2]).to(rank.device)
        for op in REDUCED:
            for other in dict.fromkeys((op, "sum")):
                wholes = REDUCED[op](parts[0], 0), REDUCED[other](parts[1], 0)
                for name, operator in (PAIRS | MADE if other == op else PAIRS).items():
                    case = f"{name} of {op} and {other}"
                    a, b = (
                        DTensor.from_local(own[rank.index].clone(), mesh, [Partial(kind)])
                        for own, kind in zip(parts, (op, other), strict=True)
                    )
                    at = messages.launched()
                    found = operator(a, b)
                    if f"{name} {op} {other}" in ("maximum max max", "minimum min min") and messages.launched() != at:
                        wrong.append(f"{case}: communicates")
                    expected = operator(*wholes)
                    if not (right(expected, found) if isinstance(found, DTensor) else close(expected, found)):
                        wrong.append(case)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


LISTS: dict[str, Callable[[list[Any], list[Any]], Any]] = {
    "add": lambda a, b: foreach("add")(a, b, alpha=3),
    "sub": lambda a, b: foreach("sub")(a, b),
    "mul": lambda a, b: foreach("mul")(a, b),
    "div": lambda a, b: foreach("div")(a, [x.abs() + 1 for x in b]),
    "add of a number": lambda a, b: foreach("add")(a, 2.0),
    "mul by a number": lambda a, b: foreach("mul")(a, 2.0),
    "mul by numbers": lambda a, b: foreach("mul")(a, [1.0, -2.0, 3.0]),
    "mul by a tensor": lambda a, b: foreach("mul")(a, torch.tensor(3.0, dtype=torch.float64)),
    "neg": lambda a, b: foreach("neg")(a),
    "abs": lambda a, b: foreach("abs")(a),
    "norm": lambda a, b: foreach("norm")(a),
    "norm of order 1": lambda a, b: foreach("norm")(a, 1),
    "addcmul": lambda a, b: foreach("addcmul")(a, b, b, 2.0),
    "lerp": lambda a, b: foreach("lerp")(a, b, 0.5),
    "maximum": lambda a, b: foreach("maximum")(a, b),
    "pow": lambda a, b: foreach("pow")(a, 2.0),
    "add_": lambda a, b: foreach("add_")(a, b) or a,
    "mul_": lambda a, b: foreach("mul_")(a, 0.5) or a,
}
"""Functions of lists."""
if runs_with(">=2.13"):  # before, DTensor has few of them
    LISTS |= {
        **{
            f"{name} of numbers": lambda a, b, name=name: foreach(name)(a, [1.0, -2.0, 3.0])
            for name in ("add", "sub", "div", "pow", "clamp_max", "clamp_min")
        },
        **{f"{name} by a number": lambda a, b, name=name: foreach(name)(a, 1.0) for name in ("clamp_max", "clamp_min")},
        **{
            f"{name} by tensors": lambda a, b, name=name: foreach(name)(a, b)
            for name in ("clamp_max", "clamp_min", "minimum")
        },
        "lerp of numbers": lambda a, b: foreach("lerp")(a, b, [0.5, 0.25, 2.0]),
        "lerp of tensors": lambda a, b: foreach("lerp")(a, b, [x * 2 for x in b]),
    }


@requirement(
    "TP-FOREACH-01",
    "A foreach function of DTensors, one sharded, one replicated and one pending, treats each as alone, on its mesh.",
    source="torch: Foreach Operations; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(4)
def test_lists(world: World) -> None:
    """Put all tensors of a list on the same mesh of two ranks, or on different ones, in turn in each placement."""

    def body(rank: Rank) -> list[str]:
        deep, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        firsts, seconds = (A, CUBE, B), (B, CUBE - 1, A)
        layouts = (Replicate(), Shard(0), Shard(1), Partial())
        for turn, (name, function) in itertools.product(range(4), LISTS.items()):
            meshes = [deep[("dp", "tp")[(turn * i) % 2]] for i in range(3)]
            if name == "mul by a tensor":  # which is on one mesh
                meshes = meshes[:1] * 3
            lists = []
            for tensors in firsts, seconds:
                own = []
                for i, (tensor, mesh) in enumerate(zip(tensors, meshes, strict=True)):
                    layout = layouts[(turn + i) % 4]
                    whole = tensor.to(rank.device).clone()
                    if layout.is_partial():
                        part = whole - 1 if mesh.get_local_rank() == 0 else torch.ones_like(whole)
                        own.append(DTensor.from_local(part, mesh, [layout]))
                    else:
                        own.append(distribute_tensor(whole, mesh, [layout], src_data_rank=None))
                lists.append(own)
            case = f"{name}, {turn}"
            expected = function(*([tensor.to(rank.device).clone() for tensor in x] for x in (firsts, seconds)))
            found = function(*lists)
            for i, (one, due) in enumerate(zip(found, expected, strict=True)):
                if one.device_mesh != meshes[i] or not right(due, one):
                    wrong.append(f"{case}: tensor {i}, {layouts[(turn + i) % 4]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-FOREACH-01",
    "A foreach function of DTensors, one sharded, one replicated and one pending, treats each as alone, on its mesh.",
    source="torch: Foreach Operations; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_one_factor(world: World) -> None:
    """Multiply a replicated, a sharded and a pending tensor, in any order."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, factor = rank.mesh(), [], torch.tensor(5.0, dtype=torch.float64, device=rank.device)
        for order in itertools.permutations((Replicate(), Shard(1), Partial())):
            own = [distributed(A.to(rank.device), placement, rank, mesh) for placement in order]
            found = foreach("mul")(own, distributed(factor, Partial(), rank, mesh))
            for placement, one in zip(order, found, strict=True):
                if not right(A.to(rank.device) * 5, one):
                    wrong.append(f"{placement} in {', '.join(map(str, order))}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


BOTH_PENDING: dict[str, dict[str, tuple[tuple[int, int], tuple[int, int], Any, Any]]] = {
    "others": {
        "the same positions": ((8, 4), (8, 4), [1, 5, 7], [1, 5, 7]),
        "other numbers of rows": ((8, 4), (6, 4), [1, 5, 7], [3, 2, 0]),
        "other widths": ((8, 4), (8, 6), [1, 5, 7], [3, 6, 0]),
        "other numbers of positions": ((8, 4), (8, 4), [1, 5, 7], [3, 6]),
    },
    "same-shapes": {"other positions": ((8, 4), (8, 4), [1, 5, 7], [3, 6, 0])},
}
"""Shapes of two tables and the positions that are looked up in each."""


@requirement(
    "TP-READ-182",
    "The result of a lookup in a sharded DTensor may be pending while others are looked up.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional.embedding; pytorch/pytorch#131264",
)
@pytest.mark.parametrize("lookup", ["embedding", "gather"])
@pytest.mark.parametrize("kind", BOTH_PENDING)
@pytest.mark.world(2)
def test_two_lookups(world: World, kind: str, lookup: str) -> None:
    """Look up rows, or an element of each column, in two tables that are sharded by rows, and then read both."""

    def found(table: Any, positions: Any) -> Any:
        if lookup == "embedding":
            return functional.embedding(positions, table)
        return table.gather(0, positions[None])

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (first, second, *positions) in BOTH_PENDING[kind].items():
            tables = [floats(*shape, start=i).to(rank.device) for i, shape in enumerate((first, second))]
            at = [torch.tensor(each, device=rank.device) for each in positions]
            own = [distributed(x, Shard(0), rank, mesh) for x in tables]
            results = [found(x, distributed(i, Replicate(), rank, mesh)) for x, i in zip(own, at, strict=True)]
            for result, table, i in zip(results, tables, at, strict=True):
                if not close(found(table, i), result.full_tensor()):
                    wrong.append(name)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PENDING: dict[str, tuple[Operator, Operands]] = {
    "sum": (lambda x, i: x.sum(0), (A, classes(5, 3))),
    "product": (lambda x, i: x.t() @ x, (A, classes(5, 3))),
    "embedding": (lambda x, i: functional.embedding(i, x), (A, classes(5, 3))),
    "gather": (lambda x, i: x.gather(0, i), (A, classes(5, 1, 7))),
}
"""Operators on a matrix of which each rank has rows, and on positions; PyTorch leaves their results pending."""


@requirement(
    "TP-READ-01",
    "full_tensor() of an operator's result gives the same whole each time, and the result can be used afterwards.",
    source="torch.distributed.tensor.DTensor.full_tensor",
)
@pytest.mark.parametrize("name", PENDING)
@pytest.mark.world(2)
def test_read_twice(world: World, name: str) -> None:
    """Read a result of which each rank has a part twice, and then its double."""

    def body(rank: Rank) -> list[Any]:
        operator, (whole, positions) = PENDING[name]
        own = distributed(whole.to(rank.device), Shard(0), rank, rank.mesh())
        found = operator(own, distributed(positions.to(rank.device), Replicate(), rank, rank.mesh()))
        first = found.full_tensor().tolist()
        return [first, found.full_tensor().tolist(), (found * 2).full_tensor().tolist()]

    operator, (whole, positions) = PENDING[name]
    expected = operator(whole, positions)
    due = [expected.tolist(), expected.tolist(), (expected * 2).tolist()]
    assert_on_ranks([due] * world.size, world.run(body))
