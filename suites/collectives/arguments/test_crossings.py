"""Combinations of arguments, for defects that appear only if two arguments come together.

By default, any two values of two arguments occur together in some case. With ``--thorough``, all combinations occur.
"""

from __future__ import annotations

import pytest
import torch

from harness import World, requirement
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, REDUCING, Case
from harness.stacks.collectives import assert_right
from suites.collectives.cases import COALESCED, FUNCTIONAL, crossing

BETWEEN = [name for name in COLLECTIVES if name not in IN_PLACE]
"""Collectives with an input and an output."""
STRIDED = ("column", "transposed", "expanded")
"""Layouts of inputs that are not contiguous."""


@requirement(
    "COLL-CROSS-01",
    "Repeated calls of a collective are correct for any combination of op, dtype, group, form, shape, root and "
    "offset in memory.",
    source="torch.distributed: its collectives",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(3, 4)
@pytest.mark.each_choice
def test_dense(world: World, collective: str, thorough: bool) -> None:
    """Calls are synchronous, asynchronous or, where supported, coalesced."""
    forms = ["sync", "async", *(["coalesced"] if collective in COALESCED else [])]
    assert_right(world, crossing(collective, world.size, thorough, forms=forms))


@requirement(
    "COLL-CROSS-02",
    "Repeated calls of a collective on a strided input are correct for any combination of op, dtype, group, form, "
    "shape and root.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("collective", BETWEEN)
@pytest.mark.world(3)
def test_strided_input(world: World, collective: str, layout: str, thorough: bool) -> None:
    """The output is contiguous or has an offset. Each layout has its part of the cases that cross all arguments."""
    cases = crossing(collective, world.size, thorough, layouts=[layout] if thorough else STRIDED)
    # The last two are contiguous: no rank leaves before the others, even where all calls before are refused.
    assert_right(world, [case for case in cases if case.layout in (layout, "contiguous")])


@requirement(
    "COLL-CROSS-03",
    "Repeated calls of a collective into a strided output are correct for any combination of op, dtype, group, "
    "form, shape and root.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["column", "transposed"])
@pytest.mark.parametrize("collective", BETWEEN)
@pytest.mark.world(3)
@pytest.mark.each_choice
def test_strided_output(world: World, collective: str, layout: str, thorough: bool) -> None:
    """The input is contiguous or has an offset."""
    assert_right(world, crossing(collective, world.size, thorough, out_layouts=[layout]))


@requirement(
    "COLL-CROSS-04",
    "Repeated calls of an in-place collective on a strided tensor are correct for any combination of op, dtype, "
    "group, form, shape and root.",
    source="torch.distributed.all_reduce, broadcast, reduce",
)
@pytest.mark.parametrize("layout", ["column", "transposed"])
@pytest.mark.parametrize("collective", sorted(IN_PLACE))
@pytest.mark.world(3)
@pytest.mark.each_choice
def test_strided_in_place(world: World, collective: str, layout: str, thorough: bool) -> None:
    """All ranks use the same strides."""
    assert_right(world, crossing(collective, world.size, thorough, layouts=[layout]))


@requirement(
    "COLL-CROSS-05",
    "Repeated calls of a functional collective are correct for any combination of op, dtype, group, strides and shape.",
    source="torch.distributed._functional_collectives: its functions",
)
@pytest.mark.parametrize("collective", FUNCTIONAL)
@pytest.mark.world(4)
def test_functional(world: World, collective: str, thorough: bool) -> None:
    """Inputs have every layout that the collective accepts."""
    layouts = ["contiguous", "offset", "column", "transposed", *(["expanded"] if collective not in IN_PLACE else [])]
    assert_right(world, crossing(collective, world.size, thorough, layouts=layouts, forms=["functional"]))


@requirement(
    "COLL-CROSS-06",
    "In subgroups, a collective is correct for large tensors of any dtype, form or op.",
    source="torch.distributed.new_group",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(4)
def test_large_in_subgroups(world: World, collective: str) -> None:
    """Call synchronously, asynchronously or functionally with about 1 MiB, in groups without rank 0 or with gaps."""
    drawn: list[tuple[tuple[int, ...], str, torch.dtype, str]] = [
        ((1, 2, 3), "MAX", torch.int64, "async"),
        ((1, 3), "SUM", torch.float32, "sync"),
        ((0, 2, 3), "MIN", torch.float16, "functional" if collective in FUNCTIONAL else "async"),
    ]
    assert_right(
        world,
        [
            Case(
                collective,
                op if collective in REDUCING else "SUM",
                dtype,
                ((1 << 20) // dtype.itemsize + 1,),
                group=group,
                root=1,
                form=form,
            )
            for group, op, dtype, form in drawn
        ],
    )
