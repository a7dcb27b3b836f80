"""Views of DTensors share their memory, so that what is written to them is in the DTensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fixtures.operators import choices, distributed, floats, right
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)

SHAPES: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    (6,): ((3, 2), (2, 3), (6, 1), (1, 6)),
    (15,): ((3, 5), (5, 3)),
    (24,): ((2, 3, 4), (3, 2, 4), (4, 3, 2)),
    (4, 1): ((4,),),
    (4, 6): ((24,), (4, 2, 3), (4, 3, 2), (2, 2, 6)),
    (5, 3): ((15,), (3, 5)),
    (2, 3, 4): ((6, 4), (2, 12)),
    (3, 2, 4): ((6, 4), (3, 8), (24,)),
}
"""Shapes, and those that a view gives them."""
REGROUPED: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    (4, 6): ((6, 4), (2, 12), (8, 3), (12, 2)),
    (2, 3, 4): ((2, 4, 3), (2, 2, 6)),
}
"""Shapes, and those in which the rows of their last dimension are cut elsewhere."""
WHOLE = ((6,), (3, 2)), ((15,), (3, 5)), ((15,), (5, 3)), ((24,), (3, 2, 4))
"""Shapes of which shards of the first dimension can't be viewed, because a row would be on two ranks."""


@requirement(
    "TP-VIEW-1100",
    "view() of a DTensor shares its memory without communication, or raises an error on every rank.",
    source="torch.Tensor.view: the returned tensor shares the same data; torch.distributed.tensor.DTensor",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensor refuses other views")
@pytest.mark.world(2)
def test_shared_memory(world: World) -> None:
    """Flatten and split dimensions in each placement; write to the view, whose shards may be uneven."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for shape, views in SHAPES.items():
            whole = floats(*shape).to(rank.device)
            for to in views:
                for layout in choices(whole):
                    case = f"{shape} of {layout} to {to}"
                    own, at = distributed(whole.clone(), layout, rank, mesh), messages.launched()
                    try:
                        found = own.view(to)
                    except RuntimeError:
                        if not isinstance(layout, Shard):
                            wrong.append(f"{case}: refused")
                        continue
                    if layout == Shard(0) and (shape, to) in WHOLE:
                        wrong.append(f"{case}: not refused")
                    if messages.launched() != at or not right(whole.view(to), found):
                        wrong.append(f"{case}: {found.placements}")
                    found.zero_()
                    if not right(torch.zeros_like(whole), own):
                        wrong.append(f"{case}: a copy")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-VIEW-1100",
    "view() of a DTensor shares its memory without communication, or raises an error on every rank.",
    source="torch.Tensor.view: the returned tensor shares the same data; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("kind", ["first dimension", "last dimension"])
@pytest.mark.world(2)
def test_regrouped(world: World, kind: str) -> None:
    """Shard the first dimension, or the last one, of which a view cuts the rows elsewhere; write to the view."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, viewed = rank.mesh(), [], 0
        for shape, views in REGROUPED.items():
            whole, layout = floats(*shape).to(rank.device), Shard(0 if kind == "first dimension" else len(shape) - 1)
            for to in views:
                own, at = distributed(whole.clone(), layout, rank, mesh), messages.launched()
                try:
                    found = own.view(to)
                except RuntimeError:
                    continue
                viewed += 1
                if messages.launched() != at or not right(whole.view(to), found):
                    wrong.append(f"{shape} of {layout} as {to}: {found.placements}")
                found.fill_(9)
                if not right(torch.full_like(whole, 9), own):
                    wrong.append(f"{shape} of {layout} as {to}: a copy")
        if not viewed and kind == "first dimension":
            wrong.append("all are refused")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-VIEW-6907",
    "view() and reshape() of a DTensor have the values of the plain tensor's or raise, wherever they cut its rows.",
    source="torch.Tensor.view, reshape; torch.distributed.tensor.DTensor; pytorch/pytorch#179502",
)
@pytest.mark.parametrize("how", ["view", "reshape"])
@pytest.mark.world(2, 3)
def test_values_of_regrouped(world: World, how: str) -> None:
    """Shard each dimension of tensors whose rows are cut elsewhere."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, made = rank.mesh(), [], 0
        for shape, views in {**REGROUPED, (12, 8): [(-1, 6), (16, 6), (-1,), (6, 16), (24, 4)]}.items():
            whole = floats(*shape).to(rank.device)
            for dim, to in itertools.product(range(len(shape)), views):
                try:
                    found = getattr(distributed(whole, Shard(dim), rank, mesh), how)(to)
                except RuntimeError:
                    continue
                made += 1
                if not right(whole.view(to), found):
                    wrong.append(f"{shape} of {Shard(dim)} as {to}: {found.placements}")
        if not made:
            wrong.append("all are refused")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-VIEW-1101",
    "view() of a DTensor as another type of the same size shares its memory, bits and placements.",
    source="torch.Tensor.view(dtype): the returned tensor shares the same data; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64], ids=str)
@pytest.mark.world(2)
def test_other_types(world: World, dtype: torch.dtype) -> None:
    """View replicas and shards of float64, even and uneven ones, as another type, and write zeros to the view."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for shape in (4,), (4, 6), (5, 3):
            whole = floats(*shape).to(rank.device)
            for layout in (Replicate(), *map(Shard, range(whole.dim()))):
                case, own = f"{shape} of {layout}", distributed(whole.clone(), layout, rank, mesh)
                try:
                    found = own.view(dtype)
                except (NotImplementedError, RuntimeError) as e:
                    wrong.append(f"{case}: {str(e).splitlines()[0]}")
                    continue
                if found.placements != (layout,) or not torch.equal(whole.view(dtype), found.full_tensor()):
                    wrong.append(f"{case}: {found.placements}")
                found.zero_()
                if not right(torch.zeros_like(whole), own):
                    wrong.append(f"{case}: a copy")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SIZES = torch.float64, torch.float32, torch.int16, torch.uint8, torch.complex128
"""Types of different sizes."""


@requirement(
    "TP-VIEW-2000",
    "view() of a DTensor as a type of another size has the shape and the bits that it has for a plain tensor.",
    source="torch.Tensor.view(dtype): the size of the last dimension is scaled; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("kind", ["once", "again"])
@pytest.mark.world(2)
def test_other_sizes(world: World, kind: str) -> None:
    """View replicas and shards of rows as each type: a matrix of its own for each type, or all types of one matrix."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for layout, (i, dtype) in itertools.product((Replicate(), Shard(0)), enumerate(SIZES)):
            whole = floats(5, 12 if kind == "again" else 14 + 2 * i).to(rank.device)
            found, expected = distributed(whole, layout, rank, mesh).view(dtype), whole.view(dtype)
            if found.shape != expected.shape or not right(expected, found):
                wrong.append(f"{dtype} of {layout}: has shape {tuple(found.shape)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
