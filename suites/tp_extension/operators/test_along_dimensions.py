"""Operators of DTensors along dimensions: counted from the end, padded on either side, or pooled without a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operator, distributed, floats, right
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensors have fewer of these operators")
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
CUBE = (torch.arange(4 * 6 * 4) * 7).remainder(101).double().view(4, 6, 4)
"""Different numbers."""
INDEX = torch.tensor([2, 0, 1])


def whole(tensor: torch.Tensor, x: Any) -> Any:
    """Return a tensor as a replicated DTensor, if the other one is a DTensor."""
    tensor = tensor.to(x.device)
    return (
        distribute_tensor(tensor, x.device_mesh, [Replicate()], src_data_rank=None)
        if isinstance(x, DTensor)
        else tensor
    )


Along = Callable[[Any, int], Any]
ALONG: dict[str, dict[str, Along]] = {
    "reduced": {
        **{
            name: lambda x, dim, name=name: getattr(torch, name)(x, dim)
            for name in ("sum", "mean", "prod", "amax", "amin", "std", "var", "logsumexp", "argmax", "argmin", "nansum")
        },
        **{
            f"{name}, kept": lambda x, dim, name=name: getattr(torch, name)(x, dim, keepdim=True)
            for name in ("sum", "amax", "var", "argmax")
        },
        **{
            name: lambda x, dim, name=name: getattr(torch, name)(x, dim).values
            for name in ("max", "min", "median", "mode")
        },
        **{
            f"{name}, kept": lambda x, dim, name=name: getattr(torch, name)(x, dim, keepdim=True).values
            for name in ("max", "min", "median", "mode")
        },
        "vector_norm": lambda x, dim: torch.linalg.vector_norm(x, 3, dim),
        "kthvalue": lambda x, dim: x.kthvalue(2, dim).values,
        "any": lambda x, dim: (x > 97).any(dim),
        "count_nonzero": lambda x, dim: (x > 50).count_nonzero(dim),
    },
    "turned": {
        **{
            name: lambda x, dim, name=name: getattr(torch, name)(x, dim)
            for name in ("softmax", "log_softmax", "cummax", "cummin")
        },
        "flip": lambda x, dim: x.flip(dim),
        "flip of two": lambda x, dim: x.flip(-3, dim),
        "diff": lambda x, dim: x.diff(dim=dim),
        "topk": lambda x, dim: x.topk(2, dim).values,
        "argsort": lambda x, dim: x.argsort(dim),
        "roll": lambda x, dim: x.roll(1, dim),
        "fft": lambda x, dim: torch.fft.fft(x, dim=dim).abs(),
        "renormalized": lambda x, dim: functional.normalize(x, dim=dim),
        "glu": lambda x, dim: functional.glu(x / 100, dim),
    },
    "taken": {
        "select": lambda x, dim: x.select(dim, 1),
        "narrow": lambda x, dim: x.narrow(dim, 1, 2),
        "split": lambda x, dim: x.split(3, dim)[1],
        "chunk": lambda x, dim: x.chunk(2, dim)[1],
        "cat": lambda x, dim: torch.cat([x, x * 2], dim),
        "stack": lambda x, dim: torch.stack([x, x * 2], dim),
        "index_select": lambda x, dim: x.index_select(dim, whole(INDEX, x)),
        "index_fill": lambda x, dim: x.index_fill(dim, whole(INDEX[:2], x), 9.0),
        "index_add": lambda x, dim: x.index_add(dim, whole(INDEX[:2], x), x.narrow(dim, 0, 2)),
        "gather": lambda x, dim: x.gather(dim, x.argsort(dim)),
        "scatter": lambda x, dim: x.scatter(dim, x.argsort(dim), x * 2),
        "unsqueeze": lambda x, dim: x.unsqueeze(dim),
        "transpose": lambda x, dim: x.transpose(dim, 0),
        "movedim": lambda x, dim: x.movedim(dim, 0),
        "unflatten": lambda x, dim: x.unflatten(dim, (2, -1)),
        "tensor_split": lambda x, dim: x.tensor_split(2, dim)[0],
    },
}
"""Operators along one dimension of a cube."""


@requirement(
    "TP-ALONG-4920",
    "An operator along a dimension that is counted from the end gives a DTensor the plain result.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", ALONG)
@pytest.mark.world(2)
def test_from_the_end(world: World, kind: str) -> None:
    """Shard that dimension and another one, of the last two."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, x = rank.mesh(), [], CUBE.to(rank.device)
        cases = itertools.cycle((((-1, 2), (-2, 2)), ((-2, 1), (-1, 1))))
        for (name, operator), (dim, shard) in ((o, c) for o in ALONG[kind].items() for c in next(cases)):
            expected, found = operator(x, dim), operator(distributed(x, Shard(shard), rank, mesh), dim)
            if isinstance(expected, tuple):
                expected, found = expected[0], found[0]
            if not right(expected, found):
                wrong.append(f"{name} along {dim} of shards along {shard}: {found.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def _at(x: Any, dim: int, index: Any) -> Any:
    """Index a dimension, and take all of the others."""
    return x[(slice(None),) * dim + (index,)]


TAKEN: dict[str, Along] = {
    "first": lambda x, dim: _at(x, dim, 0),
    "second": lambda x, dim: _at(x, dim, 1),
    "last": lambda x, dim: _at(x, dim, -1),
    "select": lambda x, dim: x.select(dim, 2),
    "slice": lambda x, dim: _at(x, dim, slice(1, 3)),
    "step": lambda x, dim: _at(x, dim, slice(None, None, 2)),
    "narrow": lambda x, dim: x.narrow(dim, 1, 2),
    "split": lambda x, dim: torch.cat(x.split(2, dim)[::-1], dim),
    "chunk": lambda x, dim: torch.cat(x.chunk(2, dim)[::-1], dim),
    "tensor_split": lambda x, dim: x.tensor_split(2, dim)[1],
    "index_select": lambda x, dim: x.index_select(dim, whole(INDEX, x)),
    "indices": lambda x, dim: _at(x, dim, whole(INDEX, x)),
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "diff": lambda x, dim: x.diff(dim=dim),
    "topk": lambda x, dim: x.topk(2, dim).values,
}
"""Operators that take a part of one dimension, or change its order."""


@requirement(
    "TP-ALONG-7051",
    "A part of a sharded dimension can be taken with the plain result and gradient, whether or not ranks divide its "
    "size.",
    source=f"{SOURCE}; torch.distributed.tensor.distribute_tensor: 'not evenly divisible'",
)
@pytest.mark.world(2, 3)
def test_taken_of_uneven_shards(world: World) -> None:
    """Take rows, columns or layers of sizes 3, 5 and 4, of which the last of three ranks has none."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, cube = rank.mesh(), [], CUBE.flatten()[:60].view(3, 5, 4).to(rank.device)
        for (name, operator), dim in itertools.product(TAKEN.items(), range(3)):
            x = cube.clone().requires_grad_()
            own = distributed(cube, Shard(dim), rank, mesh).requires_grad_()
            expected, case = operator(x, dim), f"{name} along {dim}"
            try:
                found = operator(own, dim)
                weights = floats(*expected.shape, start=2).to(rank.device)
                expected.backward(weights)
                found.backward(distributed(weights, Replicate(), rank, mesh))
            except (RuntimeError, NotImplementedError, IndexError) as error:
                wrong.append(f"{case}: {error!r:.150}")
                continue
            if not right(expected.detach(), found.detach()):
                wrong.append(case)
            if not right(x.grad, own.grad):  # type: ignore[arg-type]
                wrong.append(f"gradient of {case}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PADS = [
    pad for side in ((2, 0), (0, 1), (1, 2), (-1, 0), (-1, 1)) for pad in (side, (0, 0, *side), (*side, *side[::-1]))
]
"""What is added on each side of the last dimension, or of that before it."""


@requirement(
    "TP-ALONG-4921",
    "pad gives a DTensor the plain result, whichever side of which dimension it lengthens or shortens.",
    source=f"{SOURCE}; torch.nn.functional.pad",
)
@pytest.mark.world(2)
def test_padding(world: World) -> None:
    """Pad the last dimension, that before it, or both, on one side or both."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, x = rank.mesh(), [], CUBE.to(rank.device)
        for layout, pad in itertools.product((Shard(0), Shard(1), Shard(2)), PADS):
            value = 2.0 * (pad[0] > 0)
            found = functional.pad(distributed(x, layout, rank, mesh), pad, value=value)
            if not right(functional.pad(x, pad, value=value), found):
                wrong.append(f"{layout} padded by {pad} with {value}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def _pools(rank: int) -> dict[str, Operator]:
    pools: dict[str, Operator] = {
        f"{name}, {kernel} by {stride}": lambda x, name=name, kernel=kernel, stride=stride: getattr(functional, name)(
            x, kernel, stride, kernel // 2
        )
        for name in (f"max_pool{rank}d", f"avg_pool{rank}d")
        for kernel, stride in ((3, 1), (2, 2))
    }
    for name in f"adaptive_avg_pool{rank}d", f"adaptive_max_pool{rank}d":
        pools[name] = lambda x, name=name: getattr(functional, name)(x, 2)
    return pools


@requirement(
    "TP-ALONG-4922",
    "Pooling of a DTensor gives the plain result, with a batch or without, whichever dimension is sharded.",
    source=f"{SOURCE}; torch.nn.functional.max_pool2d, avg_pool2d, adaptive_avg_pool2d: minibatch",
)
@pytest.mark.parametrize("rank_of", [1, 2, 3])
@pytest.mark.world(2)
def test_pooling(world: World, rank_of: int) -> None:
    """Windows that overlap, or that fill a dimension without a rest."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for batch, (name, operator) in itertools.product(((), (2,)), _pools(rank_of).items()):
            x = floats(*batch, 2, *[6, 4, 4][:rank_of]).to(rank.device)
            layouts = (Replicate(), *map(Shard, range(x.dim())))
            wrong += [
                f"{name} of {tuple(x.shape)} in {layout}"
                for layout in layouts
                if not right(operator(x), operator(distributed(x, layout, rank, mesh)))
            ]
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
