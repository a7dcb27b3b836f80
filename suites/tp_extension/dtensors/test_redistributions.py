"""redistribute on meshes of several dimensions, to and from partial values, without waiting, and for other dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.placements import MORE_OPERATORS, REDUCED, laid_out, part
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.collectives import flattened, unwaited
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import StridedShard

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor.redistribute"
WHOLE, ROWS, COLUMNS, SLICES, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
TARGETS: tuple[Placement, ...] = (WHOLE, ROWS, COLUMNS, SLICES)
SHAPES = (4, 8, 4), (5, 3, 6)
Layout = tuple[Placement, ...]


def given(whole: torch.Tensor, mesh: Any, placements: Layout) -> DTensor:
    """Return a DTensor of this rank's part; each rank has an equal part of a sum."""
    shares = 1
    for i, placement in enumerate(placements):
        shares *= mesh.size(i) if placement.is_partial() else 1
    local = laid_out(whole, mesh, placements).contiguous() / shares
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def pairs(dims: int, every: int) -> Iterator[tuple[Layout, Layout]]:
    """Yield layouts with a part of those that they could be brought to, another part for each."""
    targets = list(itertools.product(TARGETS, repeat=dims))
    for i, source in enumerate(itertools.product((*TARGETS, SUM), repeat=dims)):
        yield from ((source, target) for target in targets[i % every :: every])


@requirement(
    "TP-MOVE-10",
    "redistribute between any two layouts of several mesh dimensions gives each rank its part of the value, and over "
    "a last dimension of one rank communicates nothing.",
    source=f"{SOURCE}: either on 1-D or N-D DeviceMesh",
)
@pytest.mark.world(4)
def test_several_dimensions(world: World) -> None:
    """Bring even and uneven tensors of three dimensions from each layout to some, on a plain or a flattened mesh."""

    def body(rank: Rank) -> None:
        square, deep = rank.mesh(2, 2, names=("a", "b")), rank.mesh(2, 1, 2, names=("c", "d", "e"))
        strided = [(StridedShard(dim, split_factor=2), Shard(dim)) for dim in (0, 1)]
        nested = [move for layout in strided for move in (((WHOLE, WHOLE), layout), (layout, (WHOLE, WHOLE)))]
        for mesh, moves in (square, [*pairs(2, 7), *nested * 2]), (deep, list(pairs(3, 61))[::5]):
            for i, (source, target) in enumerate(moves):
                if i == len(moves) // 2:
                    flattened(mesh, "all")
                whole = numbers(*SHAPES[i % 2]).to(rank.device) * 8
                moved = given(whole, mesh, source).redistribute(placements=target, async_op=i % 3 == 0)
                what = f"{source} to {target} of {tuple(whole.shape)}"
                assert (moved.placements, moved.shape) == (target, whole.shape), what
                assert_same(laid_out(whole, mesh, target), moved.to_local() + 0, what)
        whole = numbers(*SHAPES[1]).to(rank.device) * 8
        for source in (WHOLE, WHOLE), (SLICES, ROWS), (SUM, COLUMNS):
            moved = given(whole, square, source).redistribute(placements=[Shard(-3), Shard(-1)])
            assert moved.placements == (ROWS, SLICES)
            assert_same(laid_out(whole, square, (ROWS, SLICES)), moved.to_local(), f"{source}, counted from the end")
        alone = rank.mesh(rank.size, 1, names=("f", "g"))
        for i, (outer, inner, target) in enumerate(itertools.product((ROWS, SUM), (*TARGETS, SUM), TARGETS)):
            whole = numbers(*SHAPES[i % 2]).to(rank.device) * 8
            start, end = (outer, inner), (outer, target)
            tensor, at = given(whole, alone, start), messages.mark()
            moved = tensor.redistribute(placements=end)
            assert not messages.since(at), f"{start} to {end}"
            assert moved.placements == end
            assert_same(laid_out(tensor.to_local(), alone, (WHOLE, target)), moved.to_local(), f"{start} to {end}")

    world.run(body)


@requirement(
    "TP-MOVE-375",
    "redistribute from strided shards gives each rank its part of the value in any other shards.",
    source=f"{SOURCE}; torch/distributed/tensor/placement_types.py: _StridedShard",
)
@pytest.mark.parametrize("to", ["others", "the other mesh dimension"])
@pytest.mark.world(4)
def test_strided_shards(world: World, to: str) -> None:
    """Shard the same dimension over the other mesh dimension alone, or shard in any other way."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("a", "b")), []
        whole = numbers(8, 12).to(rank.device)
        for dim, beside in itertools.product((0, 1), (WHOLE, ROWS, COLUMNS)):
            layout = StridedShard(dim, split_factor=2), beside
            for target in itertools.product((WHOLE, ROWS, COLUMNS), repeat=2):
                alone = beside != Shard(dim) and target[0] != Shard(dim) and target[1] == Shard(dim)
                if alone != (to == "the other mesh dimension"):
                    continue
                given = distribute_tensor(whole, mesh, layout, src_data_rank=None)
                found, due = given.redistribute(placements=target), laid_out(whole, mesh, target)
                if found.placements != target or not torch.equal(due, found.to_local()):
                    wrong.append(f"{layout} to {target}: {tuple(found.to_local().shape)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


MERGED: list[tuple[Layout, Layout]] = [
    *(((Partial(op), Partial(op)), (WHOLE, WHOLE)) for op in REDUCED),
    ((SUM, Partial("avg")), (WHOLE, WHOLE)),
    *(((SUM, SUM), (by, by)) for by in (ROWS, COLUMNS)),
    *(((by, by), (WHOLE, WHOLE)) for by in (ROWS, COLUMNS)),
]
"""Moves that take the same collective over each mesh dimension."""
APART: list[tuple[Layout, Layout]] = [
    ((SUM, SUM), (ROWS, COLUMNS)),
    ((ROWS, COLUMNS), (WHOLE, WHOLE)),
    ((SUM, ROWS), (WHOLE, WHOLE)),
    ((COLUMNS, SUM), (WHOLE, WHOLE)),
]
"""Moves that take another collective over each."""


@requirement(
    "TP-MOVE-11",
    "Once mesh dimensions are flattened into one, redistribute takes one collective where it took the same over each.",
    source="torch/distributed/tensor/_redistribute.py: one collective over several mesh dimensions",
)
@pytest.mark.world(4)
def test_collectives_over_flattened_dimensions(world: World) -> None:
    """Moves that take other collectives over each dimension stay two; two of three dimensions may be flattened."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("a", "b"))
        whole = numbers(8, 8).to(rank.device) * 4
        for flat in False, True:
            if flat:
                flattened(mesh, "all")
            for moves, count in (MERGED, 1 if flat else 2), (APART, 2):
                for source, target in moves:
                    what = f"{source} to {target}, {flat=}"
                    local = laid_out(whole, mesh, source).contiguous()
                    tensor = DTensor.from_local(local, mesh, source, shape=whole.shape, stride=whole.stride())
                    at = messages.mark()
                    moved = tensor.redistribute(placements=target)
                    assert len(messages.since(at)) == count, what
                    assert moved.placements == target, what
        deep = rank.mesh(1, 2, 2, names=("c", "d", "e"))
        for flat, outer in itertools.product((False, True), (WHOLE, ROWS, COLUMNS)):
            if flat and outer == WHOLE:
                flattened(deep["d", "e"], "inner")
            for moves, count in (MERGED, 1 if flat else 2), (APART, 2):
                for source, target in moves:
                    what = f"{source} to {target} beside {outer}, {flat=}"
                    tensor = given(whole, deep, (outer, *source))
                    at = messages.mark()
                    moved = tensor.redistribute(placements=(outer, *target))
                    assert len(messages.since(at)) == count, what
                    assert moved.placements == (outer, *target), what

    world.run(body)


def check_made_partial(tensor: DTensor, target: Sequence[Placement]) -> None:
    """Assert that redistribute is refused without communication, or gives parts of the same values, as since 2.14."""
    what = f"{tensor.placements} to {target}"
    at = messages.mark()
    try:
        moved = tensor.redistribute(placements=target)
    except RuntimeError:
        assert not messages.since(at), what
        return
    assert runs_with(">=2.14"), f"{what}: not refused"
    assert moved.placements == tuple(target), what
    assert_same(tensor.full_tensor() + 0, moved.full_tensor() + 0, what)


@requirement(
    "TP-MOVE-12",
    "redistribute refuses to make values partial, before it communicates, or gives parts of the same values, and keeps "
    "partial ones with their gradient.",
    source=f"{SOURCE}: redistributing to Partial is for internal use only",
)
@pytest.mark.world(2)
def test_partial_values(world: World) -> None:
    """Try each layout with each partial one, alone and beside a mesh dimension that changes."""

    def body(rank: Rank) -> None:
        flat, deep = rank.mesh(), rank.mesh(1, 2, names=("a", "b"))
        whole = numbers(4, 6).to(rank.device) * 4
        partial: list[Placement] = [Partial(op) for op in REDUCED]
        for source, target in itertools.product((WHOLE, ROWS, COLUMNS, *partial), partial):
            tensor = DTensor.from_local(part(whole, rank, source).clone(), flat, [source]).requires_grad_()
            at = messages.mark()
            if source != target:
                check_made_partial(tensor.detach(), [target])
                continue
            for late, arriving in itertools.product((False, True), (target, WHOLE)):
                same = tensor.redistribute(placements=[target], async_op=late)
                assert same.placements == (target,)
                assert_same(tensor.to_local().detach(), same.to_local().detach(), f"{target}")
                tensor.grad = None
                same.backward(DTensor.from_local(whole + rank.index, flat, [arriving]))
                gradient: Any = tensor.grad
                if runs_with(">=2.14") and gradient.placements != (arriving,):  # which may reduce it, as since 2.15
                    arrived = DTensor.from_local(whole + rank.index, flat, [arriving])
                    assert_same(arrived.full_tensor() + 0, gradient.full_tensor() + 0, f"gradient of {target}")
                    at = messages.mark()
                    continue
                assert gradient.placements == (arriving,), f"gradient of {target} as {arriving}"
                assert_same(whole + rank.index, gradient.to_local(), f"gradient of {target} as {arriving}")
            assert not messages.since(at), f"{target}"
        for start, end in itertools.product(itertools.product((WHOLE, ROWS, SUM), repeat=2), repeat=2):
            tensor = DTensor.from_local(laid_out(whole, deep, start).contiguous(), deep, start)
            if any(new.is_partial() and new != old for old, new in zip(start, end, strict=True)):
                check_made_partial(tensor, end)
            else:
                moved = tensor.redistribute(placements=end)
                assert moved.placements == end
                assert_same(tensor.full_tensor() + 0, moved.full_tensor() + 0, f"{start} to {end}")

    world.run(body)


@requirement(
    "TP-MOVE-2300",
    "The gradient of redistribute has the DTensor's placements, but where the DTensor is pending, is replicated if it "
    "arrives as a whole or in shards.",
    source=f"{SOURCE}; torch.distributed.tensor.DTensor.from_local: gradient placement guarantees",
)
@pytest.mark.world(2)
def test_placements_of_gradients(world: World) -> None:
    """Bring a leaf from each layout to each other or the same; its gradient arrives in each layout, or pending."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, whole = rank.mesh(), [], numbers(5, 3).to(rank.device) * 4
        places: tuple[Placement, ...] = (WHOLE, ROWS, COLUMNS)
        for source, target, arriving in itertools.product((*places, SUM), places, (*places, SUM)):
            if source.is_partial() and arriving.is_partial():
                continue
            leaf: Any = given(whole, mesh, (source,)).requires_grad_()
            leaf.redistribute(placements=[target]).backward(given(whole + 4, mesh, (arriving,)))
            kept = WHOLE if source.is_partial() else source
            if leaf.grad.placements != (kept,) or not torch.equal(
                laid_out(whole + 4, mesh, (kept,)), leaf.grad.to_local()
            ):
                wrong.append(f"{source} to {target}, arriving as {arriving}: {leaf.grad.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


MOVES: list[tuple[Placement, Placement]] = [(ROWS, WHOLE), (SUM, WHOLE), (Partial("max"), WHOLE), (SUM, ROWS)]
"""Moves that consist of a collective, without an operation after it that would wait."""


@requirement(
    "TP-MOVE-13",
    "redistribute with async_op=True leaves waiting to the first use of the data, and without it, as in full_tensor, "
    "waits.",
    source=f"{SOURCE}: async_op; torch.distributed.tensor.DTensor: to_local, full_tensor",
)
@pytest.mark.world(2)
def test_waiting(world: World) -> None:
    """Take views of what is not there, which do not wait, then compute; with and without gradients."""

    def body(rank: Rank) -> None:
        whole = numbers(4, 6).to(rank.device) * 4
        for (source, target), grad in itertools.product(MOVES, (False, True)):
            what = f"{source} to {target}, {grad=}"
            local = part(whole, rank, source).clone()
            if source == Partial("max"):
                local = whole - rank.index
            right = part(whole, rank, target)
            tensor = DTensor.from_local(local, rank.mesh(), [source]).requires_grad_(grad)
            assert unwaited() == 0, what
            late: Any = tensor.redistribute(placements=[target], async_op=True)
            viewed = late.view(late.shape).to_local()
            line = viewed.view(-1)
            assert unwaited() == 1, f"{what}: nothing has used it"
            used = line + 1
            assert unwaited() == 0, f"{what}: something has used it"
            assert type(used) is torch.Tensor, what
            assert_same(right.reshape(-1) + 1, used.detach(), what)
            for again in tensor.redistribute(placements=[target]).to_local(), tensor.full_tensor():
                assert unwaited() == 0, what
                assert type(again) is torch.Tensor, what
            assert_same(right, tensor.redistribute(placements=[target]).to_local().detach(), what)

    world.run(body)


BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
DTYPES = (torch.complex64, torch.complex128, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


@requirement(
    "TP-MOVE-14",
    "redistribute keeps values and gradients of complex numbers, half precision, integers or truth values, whatever "
    "the operation that reduces them.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_other_dtypes(world: World) -> None:
    """Bring uneven tensors from each layout to each other; one rank has all of a sum."""

    def body(rank: Rank) -> None:
        places: tuple[Placement, ...] = (WHOLE, ROWS, COLUMNS)
        for dtype, source, target in itertools.product(DTYPES, (*places, SUM), places):
            what = f"{dtype}, {source} to {target}"
            whole = (numbers(5, 3) % 7).to(rank.device).to(dtype)
            whole = whole * (2 - 3j) + 1j if dtype.is_complex else whole
            own = part(whole, rank, source).clone() if source != SUM else whole * (rank.index == 0)
            grad = dtype.is_floating_point or dtype.is_complex
            tensor = DTensor.from_local(own, rank.mesh(), [source], shape=whole.shape, stride=whole.stride())
            moved = tensor.requires_grad_(grad).redistribute(placements=[target])
            assert moved.dtype == dtype, what
            assert_same(part(whole, rank, target), moved.to_local().detach(), what)
            if grad:
                moved.backward(distribute_tensor(whole, rank.mesh(), [target], src_data_rank=None))
                gradient: Any = tensor.grad
                assert_same(whole, gradient.full_tensor(), f"gradient of {what}")
                if source != SUM:
                    tensor.grad = None
                    tensor.full_tensor(grad_placements=[SUM]).backward(whole * (rank.index == 0))
                    gradient = tensor.grad
                    assert_same(whole, gradient.full_tensor(), f"gradient of {what}, in parts")
        for (op, combine), dtype, target in itertools.product(BITWISE.items(), (torch.int64, torch.uint8), places):
            own = [(numbers(5, 3) * times).to(rank.device).to(dtype) for times in (3, 5)]
            moved = DTensor.from_local(own[rank.index], rank.mesh(), [Partial(op)]).redistribute(placements=[target])
            assert_same(part(combine(*own), rank, target), moved.to_local() + 0, f"{op} of {dtype} to {target}")

    world.run(body)


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NEUTRAL = {"sum": -0.0, "max": -torch.inf, "min": torch.inf, "product": 1.0}
"""What a rank has of a pending reduction that changes no element of another rank's part."""


@requirement(
    "TP-MOVE-9173",
    "redistribute keeps infinities, elements that are no numbers and the signs of zeros, also in gradients, whatever "
    "the operation that reduces them.",
    source=SOURCE,
)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d)[6:]
)
@pytest.mark.world(2)
def test_unusual_numbers(world: World, dtype: torch.dtype) -> None:
    """Bring uneven tensors from each layout to each other; one rank has all of what is pending, or each the average."""
    inf, real = torch.inf, torch.finfo(dtype)
    rows = [[inf, -inf, torch.nan], [0.0, -0.0, 4.0], [real.max / 2, real.min / 2, real.smallest_normal]]

    def body(rank: Rank) -> None:
        given = torch.tensor(rows, dtype=dtype, device=rank.device)
        places: tuple[Placement, ...] = (WHOLE, ROWS, COLUMNS)
        for source, target in itertools.product((*places, *map(Partial, ("avg", *NEUTRAL))), places):
            what, reduction = f"{source} to {target}", getattr(source, "reduce_op", "")
            whole = given.nan_to_num(1.0, inf, -inf) if reduction in ("max", "min") else given
            own = part(whole, rank, source) if reduction == "" else whole
            if rank.index == 0 and reduction in NEUTRAL:
                own = torch.full_like(whole, NEUTRAL[reduction])
            tensor: Any = DTensor.from_local(own.clone(), rank.mesh(), [source], shape=whole.shape, stride=(3, 1))
            moved = tensor.requires_grad_().redistribute(placements=[target])
            assert_same(part(whole, rank, target), moved.to_local().detach(), what)
            moved.backward(distribute_tensor(given, rank.mesh(), [target], src_data_rank=None))
            assert_same(given, tensor.grad.full_tensor(), f"gradient of {what}")

    world.run(body)
