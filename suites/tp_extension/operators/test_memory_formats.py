"""How the dimensions of DTensors lie in memory where operators are asked for a memory format."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fixtures.operators import floats, right
from fixtures.placements import MORE_OPERATORS, laid_out
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
FORMATS: dict[int, tuple[torch.memory_format, ...]] = {
    4: (torch.preserve_format, torch.channels_last, torch.contiguous_format),
    5: (torch.preserve_format, torch.channels_last_3d, torch.contiguous_format),
}
"""Memory formats of tensors of so many dimensions."""
Function = Callable[[Any, torch.memory_format], Any]
COPIES: dict[str, Function] = {
    "clone": lambda x, f: x.clone(memory_format=f),
    "clone of a view": lambda x, f: x.transpose(2, 3).clone(memory_format=f),
    "contiguous": lambda x, f: x.contiguous(memory_format=f) if f != torch.preserve_format else x,
}
MADE: dict[str, Function] = {
    "conversion": lambda x, f: x.to(torch.float32, memory_format=f),
    "empty_like": lambda x, f: torch.empty_like(x, memory_format=f).fill_(2),
    "zeros_like": lambda x, f: torch.zeros_like(x, memory_format=f),
    "ones_like": lambda x, f: torch.ones_like(x, memory_format=f),
    "full_like": lambda x, f: torch.full_like(x, 2.0, memory_format=f),
}
"""Functions of a tensor and a memory format."""


def differs(
    rank: Rank, whole: torch.Tensor, layout: Placement, function: Function, *formats: torch.memory_format
) -> str:
    """Return how the result for a DTensor differs from the plain one, if each lies in one format and is asked for."""
    given, asked = formats
    plain, mesh = whole.to(rank.device).contiguous(memory_format=given), rank.mesh()
    part = laid_out(plain, mesh, [layout]).contiguous(memory_format=given)
    own = DTensor.from_local(part, mesh, [layout], shape=plain.shape, stride=plain.stride())
    expected, found = function(plain, asked), function(own, asked)
    if not right(expected, found):
        return "values"
    if found.stride() != expected.stride():
        return f"strides {found.stride()} and not {expected.stride()}"
    if asked != torch.preserve_format and not found.to_local().is_contiguous(memory_format=asked):
        return f"strides {found.to_local().stride()} on a rank"
    return ""


@requirement(
    "TP-FORMAT-2300",
    "A copy of a DTensor in a memory format has the plain copy's strides, whatever format an earlier copy had.",
    source="torch.clone: memory_format; torch.Tensor.contiguous: memory_format; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_copies(world: World) -> None:
    """Copy dense tensors in one order or the other to each format, and to the first one again."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for dims, layout, (name, function) in itertools.product(
            FORMATS, (Replicate(), Shard(0), Shard(1)), COPIES.items()
        ):
            for formats in itertools.product(FORMATS[dims][1:], (*FORMATS[dims], FORMATS[dims][0])):
                whole = floats(4, 6, 2, 3, 2)[(..., *[0] * (5 - dims))]
                if found := differs(rank, whole, layout, function, *formats):
                    wrong.append(f"{name} of {dims} dimensions, {layout}, {formats}: {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-FORMAT-2301",
    "A DTensor that is made like another one or converted has the plain tensor's strides for any memory format.",
    source="torch.zeros_like: memory_format; torch.Tensor.to: memory_format; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_made(world: World) -> None:
    """Each format has a size of its own."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for layout, (name, function) in itertools.product((Replicate(), Shard(0), Shard(1)), MADE.items()):
            for i, formats in enumerate(itertools.product(FORMATS[4][1:], FORMATS[4])):
                if found := differs(rank, floats(4, 6, 2, 3 + i), layout, function, *formats):
                    wrong.append(f"{name} of {layout}, {formats}: {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-LAY-4203",
    "A tensor gathered from shards has the strides of the DTensor, of which a shard that was cut keeps the memory of "
    "its elements alone.",
    source="torch.distributed.tensor.DTensor.full_tensor, redistribute; torch.Tensor.stride",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a gathered tensor has the strides of its padding")
@pytest.mark.world(2)
def test_memory_of_parts(world: World) -> None:
    """Shard each dimension, evenly or not, with data of the first rank or each rank's own, or cut replicas."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for shape in (4, 6), (5, 7), (3, 5, 7):
            whole = floats(*shape).to(rank.device)
            for dim, source in itertools.product(range(len(shape)), (0, None)):
                x = distribute_tensor(whole, rank.mesh(), [Shard(dim)], src_data_rank=source)
                replicas = DTensor.from_local(whole, rank.mesh(), [Replicate()])
                parts = {"cut": replicas.redistribute(placements=[Shard(dim)]).to_local()}
                if source is None:  # of the first rank's data, a smaller part may lie in the memory of a larger one
                    parts["part"] = x.to_local()
                if x.full_tensor().stride() != whole.stride():
                    wrong.append(f"{shape} over {dim}, {source=}: strides {x.full_tensor().stride()}")
                for name, part in parts.items():
                    kept = part.untyped_storage().nbytes()
                    if kept > part.numel() * part.element_size() or not part.is_contiguous():
                        wrong.append(f"{shape} over {dim}, {source=}: {name} keeps {kept} bytes")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
