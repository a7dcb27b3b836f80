"""Operators of DTensors that write into other DTensors: products, operators with several results, and assignments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from fixtures.operators import choices, classes, distributed, floats, right
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensor refuses most of these operators")
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)

PRODUCTS: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "mm": (torch.mm, False, False),
    "bmm": (torch.bmm, True, False),
    "addmm": (torch.addmm, False, True),
    "multiples in addmm": (lambda *given, out: torch.addmm(*given, beta=2, alpha=3, out=out), False, True),
    "baddbmm": (torch.baddbmm, True, True),
    "addmm_": (lambda *given, out: out.addmm_(*given), False, False),
    "baddbmm_": (lambda *given, out: out.baddbmm_(*given), True, False),
}
"""Products that write into a tensor, whether they are of batches, and whether they are given a summand."""


@requirement(
    "TP-WRITE-693",
    "A product of matrices that writes into a DTensor writes the plain product, in the placements that this has.",
    source=f"{SOURCE}; torch.mm, bmm, addmm, baddbmm: out; torch.Tensor: addmm_, baddbmm_",
)
@pytest.mark.world(2)
def test_products(world: World) -> None:
    """Shard the result along each dimension, and all factors along one; each call has another size."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, sizes = rank.mesh(), [], itertools.count(3)
        for name, (product, batched, added) in PRODUCTS.items():
            for into, factors in itertools.product((R, ROWS, COLUMNS), repeat=2):
                n, case = next(sizes), f"{name} of {factors} into {into}"
                batch = (3,) if batched else ()
                shapes = [(*batch, n, 4)] * added + [(*batch, n, 7), (*batch, 7, 4)]
                plain = [floats(*shape, start=i).to(rank.device) for i, shape in enumerate(shapes)]
                own = [distributed(x, factors, rank, mesh) for x in plain]
                expected = floats(*batch, n, 4, start=5).to(rank.device)
                out = distributed(expected.clone(), into, rank, mesh)
                product(*plain, out=expected)
                try:
                    found = product(*own, out=out)
                except (NotImplementedError, RuntimeError) as error:
                    return [*wrong, f"{case}: {error!r:.120}"]
                if found is not out or out.placements != (into,) or not right(expected, out):
                    wrong.append(f"{case}: {out.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SEVERAL: dict[str, Callable[[Any, Any], Any]] = {
    "max": lambda x, out: torch.max(x, 1, out=out),
    "min": lambda x, out: torch.min(x, 1, out=out),
    "max of columns": lambda x, out: torch.max(x, 0, out=out),
    "min of columns": lambda x, out: torch.min(x, 0, out=out),
}
"""Operators on a square matrix that write a vector of values and one of positions."""


@requirement(
    "TP-WRITE-694",
    "An operator with two out= tensors writes the plain results into both, in the placements that these have.",
    source=f"{SOURCE}; torch.max, torch.min: out",
)
@pytest.mark.world(2)
def test_several_results(world: World) -> None:
    """Give each call another size, so that nothing is left of one before."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, sizes = rank.mesh(), [], itertools.count(3)
        for (name, operator), of, into in itertools.product(SEVERAL.items(), (R, ROWS, COLUMNS), (R, ROWS)):
            n, case = next(sizes), f"{name} of {of} into {into}"
            whole = (torch.arange(n * n) * 7).remainder(n * n + 1).double().view(n, n).to(rank.device)
            expected = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
            expected = tuple(x.to(rank.device) for x in expected)
            out = tuple(distributed(x.clone(), into, rank, mesh) for x in expected)
            operator(whole, expected)
            operator(distributed(whole, of, rank, mesh), out)
            for what, due, found in zip(("values", "positions"), expected, out, strict=True):
                if found.placements != (into,) or not right(due, found):
                    wrong.append(f"{what} of {case}: {found.placements}, {found.to_local().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


COMPARED = ("lt_", "le_", "gt_", "ge_", "eq_", "ne_", "logical_and_", "logical_or_", "logical_xor_")
"""Names of methods that write ones and zeros; the last three take no numbers."""


@requirement(
    "TP-WRITE-697",
    "An in-place comparison keeps a DTensor's placements, or is refused where a reduction is pending.",
    source=f"{SOURCE}; torch.Tensor: lt_, le_, gt_, ge_, eq_, ne_, logical_and_, logical_or_, logical_xor_",
)
@pytest.mark.world(2)
def test_comparisons(world: World) -> None:
    """Compare with a number, and with a DTensor in each placement."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        x, y = floats(5, 7).to(rank.device), floats(5, 7, start=3).to(rank.device)
        for name, of, by in itertools.product(COMPARED, choices(x), [*choices(y), None]):
            if by is None and name.startswith("logical"):
                continue
            case = f"{name} of {of} by {by or 'a number'}"
            own, expected = distributed(x.clone(), of, rank, mesh), x.clone()
            before = own.to_local().clone()
            getattr(expected, name)(1 if by is None else y)
            try:
                found = getattr(own, name)(1 if by is None else distributed(y, by, rank, mesh))
            except (NotImplementedError, RuntimeError) as error:
                if not of.is_partial() or not torch.equal(before, own.to_local()):
                    return [*wrong, f"{case}: {error!r:.120}"]
                continue
            if of.is_partial() or found is not own or own.placements != (of,) or not right(expected, own):
                wrong.append(f"{case}: {own.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


MATRIX, CUBE = floats(6, 4), floats(4, 5, 6)
ASSIGNED: dict[str, tuple[torch.Tensor, tuple[torch.Tensor | slice, ...], torch.Tensor]] = {
    "rows": (MATRIX, (torch.tensor([0, 4]),), floats(2, 4, start=9)),
    "a row for several": (MATRIX, (torch.tensor([0, 4]),), floats(4, start=9)),
    "one number for each row": (MATRIX, (torch.tensor([0, 4]),), floats(2, 1, start=9)),
    "columns": (MATRIX, (slice(None), torch.tensor([3, 1])), floats(6, 2, start=9)),
    "elements": (MATRIX, (torch.tensor([0, 4, 5]), torch.tensor([3, 1, 0])), floats(3, start=9)),
    "a grid": (MATRIX, (torch.tensor([[0], [4]]), torch.tensor([3, 1])), floats(2, 2, start=9)),
    "around a dimension": (CUBE, (classes(4, 3), slice(None), torch.tensor([3, 1, 0])), floats(3, 5, start=9)),
    "inner rows": (CUBE, (slice(None), torch.tensor([3, 1])), floats(4, 2, 6, start=9)),
}
"""Tensors, an index with positions and all of other dimensions, and values for these."""
WAYS: dict[str, Callable[[Any, tuple[Any, ...], Any], Any]] = {
    "assigned": lambda x, at, v: x.__setitem__(at, v),
    "put": lambda x, at, v: x.index_put_(at, v),
    "added": lambda x, at, v: x.index_put_(at, v, accumulate=True),
}
"""Ways of assigning, of which only the first takes slices."""


@requirement(
    "TP-WRITE-695",
    "Assigning a DTensor to what DTensors of positions select from another one changes that as in plain tensors.",
    source=f"{SOURCE}; torch.Tensor.index_put_",
)
@requirement(
    "TP-WRITE-696",
    "Assignment to positions in dimensions that are not sharded does not communicate if the values are replicated.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary; torch.Tensor.index_put_",
)
@pytest.mark.world(2)
def test_assigned(world: World) -> None:
    """Shard what is assigned to along each dimension; where a position is along it, it may only be refused."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for (name, (whole, at, values)), way in itertools.product(ASSIGNED.items(), WAYS):
            if way != "assigned" and any(isinstance(i, slice) for i in at):
                continue
            for layout in (R, *map(Shard, range(whole.dim()))):
                case = f"{name} of {layout} {way}"
                x, v = whole.to(rank.device).clone(), values.to(rank.device)
                index = [i if isinstance(i, slice) else i.to(rank.device) for i in at]
                own = distributed(x.clone(), layout, rank, mesh)
                before = own.to_local().clone()
                given = [i if isinstance(i, slice) else distributed(i, R, rank, mesh) for i in index]
                mark = messages.launched()
                try:
                    for tensor, where, value in (x, index, v), (own, given, distributed(v, R, rank, mesh)):
                        WAYS[way](tensor, tuple(where), value)
                except (NotImplementedError, RuntimeError) as error:
                    if not _crosses(layout, at) or not torch.equal(before, own.to_local()):
                        return [*wrong, f"{case}: {error!r:.120}"]
                    continue
                if own.placements != (layout,) or not right(x, own):
                    wrong.append(f"{case}: {own.placements}")
                if not _crosses(layout, at) and messages.launched() != mark:
                    wrong.append(f"{case}: {messages.launched() - mark} collectives")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def _crosses(layout: Placement, at: tuple[Any, ...]) -> bool:
    """Return whether a dimension that positions select from is sharded."""
    return isinstance(layout, Shard) and layout.dim < len(at) and not isinstance(at[layout.dim], slice)
