"""Parts that redistribute makes: empty ones and their gradients, those of reductions, and what is kept alive."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from fixtures.operators import Operator, close, distributed, floats, right
from fixtures.placements import MORE_OPERATORS, laid_out
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, requirement

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor.redistribute"
WHOLE, ROWS, COLUMNS, SUM = Replicate(), Shard(0), Shard(1), Partial()
PLACES: tuple[Placement, ...] = (WHOLE, ROWS, COLUMNS)


@requirement(
    "TP-MOVE-4924",
    "The gradient of redistribute is right if there are fewer rows or columns than ranks, so that some have no part.",
    source=f"{SOURCE}; torch.distributed.tensor.distribute_tensor: 'not evenly divisible'",
)
@pytest.mark.parametrize("shape", [(2, 5), (5, 1), (1, 2), (0, 2)], ids=str)
@pytest.mark.world(3)
def test_empty_parts(world: World, shape: tuple[int, int]) -> None:
    """Bring each layout to each other; the gradient arrives in that layout, or whole."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, whole = rank.mesh(), [], numbers(*shape).to(rank.device) * 6
        for source, target, arriving in itertools.product((*PLACES, SUM), PLACES, (False, True)):
            share = rank.size if source.is_partial() else 1
            leaf: Any = DTensor.from_local(
                laid_out(whole, mesh, [source]).contiguous() / share,
                mesh,
                [source],
                shape=whole.shape,
                stride=whole.stride(),
            ).requires_grad_()
            moved = leaf.redistribute(placements=[target])
            weights = laid_out(whole + 1, mesh, [target])
            if arriving:
                (moved.to_local() * weights).sum().backward()
            else:
                moved.backward(distributed(whole + 1, WHOLE, rank, mesh))
            kept = WHOLE if source.is_partial() else source
            case = f"{source} to {target}, {arriving=}"
            if not torch.equal(laid_out(whole, mesh, [target]), moved.to_local()):
                wrong.append(case)
            if not torch.equal(laid_out(whole + 1, mesh, [kept]), leaf.grad.to_local()):
                wrong.append(f"{case}: gradient in {leaf.grad.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


MOVED: dict[str, tuple[Operator, tuple[int, ...]]] = {
    "embedding": (lambda x, w: functional.embedding(x.abs().long(), w), ()),
    "linear": (functional.linear, (1,)),
    "product": (lambda x, w: x @ w, (0,)),
}
"""Functions of an input and a weight, and which size of the weight is the last one of the input."""


@requirement(
    "TP-MOVE-7052",
    "A sharded weight that is redistributed for one operator has the plain gradient in its own placements, whatever "
    "dimension of the input is sharded.",
    source=f"{SOURCE}; torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors",
)
@pytest.mark.parametrize("sizes", [(8, 4), (7, 5)], ids=["even", "uneven"])
@pytest.mark.world(2)
def test_moved_weights(world: World, sizes: tuple[int, int]) -> None:
    """Gather or move a weight, look tokens up in it or multiply by it; the gradient arrives whole."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, ways = rank.mesh(), [], ((ROWS, WHOLE), (COLUMNS, WHOLE), (ROWS, COLUMNS), (COLUMNS, ROWS))
        for (name, (operator, last)), (own, target) in itertools.product(MOVED.items(), ways):
            x = floats(4, 6, *(sizes[i] for i in last)).to(rank.device)
            plain = floats(*sizes, start=1).to(rank.device).requires_grad_()
            expected = operator(x, plain)
            back = floats(*expected.shape, start=2).to(rank.device)
            expected.backward(back)
            for place in (*map(Shard, reversed(range(x.dim()))), WHOLE):
                weight = distributed(plain.detach(), own, rank, mesh).requires_grad_()
                found = operator(distributed(x, place, rank, mesh), weight.redistribute(placements=[target]))
                case = f"{name} of {place} and {own}, moved to {target}"
                if not right(expected.detach(), found.detach()):
                    wrong.append(case)
                found.backward(distributed(back, WHOLE, rank, mesh))
                found_gradient: Any = weight.grad
                if found_gradient.placements != (own,) or not right(plain.grad, found_gradient):  # type: ignore[arg-type]
                    wrong.append(f"{case}: gradient")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


REDUCTIONS: dict[str, Callable[[Any, int], Any]] = {
    **{name: lambda x, dim, name=name: getattr(x, name)(dim) for name in ("sum", "mean", "prod", "amax", "amin")},
    **{
        f"norm {order}": lambda x, dim, order=order: torch.linalg.vector_norm(x, order, dim)
        for order in (0, 0.5, 1, 2, 3, torch.inf, -torch.inf)
    },
    "kept norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim, keepdim=True),
    "kept sum": lambda x, dim: x.sum(dim, keepdim=True),
}


@requirement(
    "TP-MOVE-4926",
    "A reduction over a sharded dimension has the plain values in every placement to which it is redistributed.",
    source=f"{SOURCE}; torch.distributed.tensor.Partial",
)
@pytest.mark.world(2)
def test_reductions(world: World) -> None:
    """Sums, extremes and norms of several orders, of even and uneven sizes, which become whole or sharded."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, rows = rank.mesh(), [], floats(5, 4, 6) / 4 + 2
        whole = rows.to(rank.device)
        dims = itertools.cycle(((0, 0), (-1, 2), (1, 1)))
        for (name, reduce), (dim, shard) in zip(REDUCTIONS.items(), dims, strict=False):
            expected = reduce(whole, dim)
            for target in (WHOLE, *map(Shard, range(expected.dim()))):
                found = reduce(distributed(whole, Shard(shard), rank, mesh), dim).redistribute(placements=[target])
                if not close(laid_out(expected, mesh, [target]), found.to_local()):
                    wrong.append(f"{name} over {dim} of shards along {shard}, redistributed to {target}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


MOVES: dict[str, tuple[Placement, Callable[[Any], Any]]] = {
    **{
        f"{source} to {target}": (source, lambda x, target=target: x.redistribute(placements=[target]))
        for source, target in itertools.product((*PLACES, SUM), PLACES)
        if source != target
    },
    **{f"full_tensor of {source}": (source, lambda x: x.full_tensor()) for source in (ROWS, COLUMNS, SUM)},
    **{f"to_local of {source}": (source, lambda x: x.to_local()) for source in (ROWS, COLUMNS, SUM)},
    "as another dtype": (ROWS, lambda x: x.redistribute(placements=[WHOLE], forward_dtype=torch.float32)),
}


@requirement(
    "TP-MOVE-4925",
    "redistribute, full_tensor and to_local do not keep the DTensor that they read alive until the backward.",
    source=f"{SOURCE}, to_local, full_tensor: backward",
)
@pytest.mark.needs(torch="torch.distributed.tensor.DTensor.redistribute(forward_dtype)")
@pytest.mark.world(2)
def test_kept_alive(world: World) -> None:
    """Only the result is referred to between forward and backward, which still gives the gradient."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, whole = rank.mesh(), [], floats(4, 6).to(rank.device)
        for name, (source, move) in MOVES.items():
            leaf: Any = distributed(whole, source, rank, mesh).requires_grad_()
            read = leaf + leaf
            seen = weakref.ref(read)
            moved = move(read)
            del read
            gc.collect()
            if seen() is not None:
                wrong.append(name)
            moved.sum().backward()
            if leaf.grad is None:
                wrong.append(f"{name}: no gradient")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
