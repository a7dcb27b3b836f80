"""Every argument together with every other: what is right alone and wrong together is found here.

By default any two values of two arguments are in some case together; with ``--thorough`` all combinations are there.
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


@requirement(
    "COLL-CROSS-01",
    "A collective is right for any op and dtype with any group, form, shape, root and offset in memory, twice.",
    source="torch.distributed: its collectives",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(3, 4)
def test_dense(world: World, collective: str, thorough: bool) -> None:
    """Synchronous, asynchronous and, where it can be, coalesced."""
    forms = ["sync", "async", *(["coalesced"] if collective in COALESCED else [])]
    assert_right(world, crossing(collective, world.size, thorough, forms=forms))


@requirement(
    "COLL-CROSS-02",
    "Inputs of any strides are right for any op and dtype with any group, form, shape and root, twice.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["column", "transposed", "expanded"])
@pytest.mark.parametrize("collective", BETWEEN)
@pytest.mark.world(3)
def test_strided_input(world: World, collective: str, layout: str, thorough: bool) -> None:
    """Into contiguous outputs and ones with an offset."""
    assert_right(world, crossing(collective, world.size, thorough, layouts=[layout]))


@requirement(
    "COLL-CROSS-03",
    "Outputs of any strides are right for any op and dtype with any group, form, shape and root, twice.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["column", "transposed"])
@pytest.mark.parametrize("collective", BETWEEN)
@pytest.mark.world(3)
def test_strided_output(world: World, collective: str, layout: str, thorough: bool) -> None:
    """From contiguous inputs and ones with an offset."""
    assert_right(world, crossing(collective, world.size, thorough, out_layouts=[layout]))


@requirement(
    "COLL-CROSS-04",
    "What is reduced or broadcast in place may have any strides, with any op, dtype, group, form, shape, root, twice.",
    source="torch.distributed.all_reduce, broadcast, reduce",
)
@pytest.mark.parametrize("layout", ["column", "transposed"])
@pytest.mark.parametrize("collective", sorted(IN_PLACE))
@pytest.mark.world(3)
def test_strided_in_place(world: World, collective: str, layout: str, thorough: bool) -> None:
    """Alike on all ranks."""
    assert_right(world, crossing(collective, world.size, thorough, layouts=[layout]))


@requirement(
    "COLL-CROSS-05",
    "A functional collective is right for any op and dtype with any group, strides and shape, twice.",
    source="torch.distributed._functional_collectives: its functions",
)
@pytest.mark.parametrize("collective", FUNCTIONAL)
@pytest.mark.world(4)
def test_functional(world: World, collective: str, thorough: bool) -> None:
    """Every layout that the collective can be given."""
    layouts = ["contiguous", "offset", "column", "transposed", *(["expanded"] if collective not in IN_PLACE else [])]
    assert_right(world, crossing(collective, world.size, thorough, layouts=layouts, forms=["functional"]))


@requirement(
    "COLL-CROSS-06",
    "Large tensors of any width and form are right in subgroups, reduced by other ops than SUM as well.",
    source="torch.distributed.new_group",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(4)
def test_large_in_subgroups(world: World, collective: str) -> None:
    """About 1 MiB, without rank 0 and with gaps, synchronous, asynchronous and functional."""
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
