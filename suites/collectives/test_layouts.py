"""Tensors that do not lie densely in memory, and what a collective must leave alone."""

from __future__ import annotations

import pytest
import torch

from harness import World, requirement
from harness.oracles.collectives import IN_PLACE, Case
from harness.stacks.collectives import assert_right, refusals
from suites.collectives.cases import every_collective

ALL = [case.collective for case in every_collective()]
INPUTS_OUTPUTS = [name for name in ALL if name not in IN_PLACE]
SHAPES = ((5,), (4, 3))


@requirement(
    "COLL-LAYOUT-01",
    "A collective reads the elements of a view, whatever its strides, and leaves its memory as it was.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed", "expanded"])
@pytest.mark.parametrize("collective", INPUTS_OUTPUTS)
@pytest.mark.world(2)
def test_input(world: World, collective: str, layout: str) -> None:
    """Input as a view of a larger buffer; the output is contiguous."""
    assert_right(world, [Case(collective, layout=layout, shape=shape, repeats=2) for shape in ((4, 3), (2, 3, 2))])


@requirement(
    "COLL-LAYOUT-02",
    "A collective writes the elements of a view, whatever its strides, and none between them.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed"])
@pytest.mark.parametrize("collective", INPUTS_OUTPUTS)
@pytest.mark.world(2)
def test_output(world: World, collective: str, layout: str) -> None:
    """Output as a view of a larger buffer; the input is contiguous."""
    assert_right(world, [Case(collective, out_layout=layout, shape=shape, repeats=2) for shape in ((4, 3), (2, 3, 2))])


@requirement(
    "COLL-LAYOUT-03",
    "A collective in place works on the elements of a view, whatever its strides, and on none between them.",
    source="torch.distributed.all_reduce, broadcast, reduce; pytorch/pytorch#192920",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed"])
@pytest.mark.parametrize("collective", sorted(IN_PLACE))
@pytest.mark.world(2)
def test_in_place(world: World, collective: str, layout: str) -> None:
    """The tensor is a view of a larger buffer on every rank."""
    assert_right(world, [Case(collective, layout=layout, shape=shape, repeats=2) for shape in ((4, 3), (2, 3, 2))])


@requirement(
    "COLL-LAYOUT-04",
    "A lazily negated tensor takes part with the values that it shows.",
    source="torch.Tensor.imag: of a conjugated tensor, a view with its negative bit set",
)
@pytest.mark.parametrize("collective", ALL)
@pytest.mark.world(2)
def test_negative_bit(world: World, collective: str) -> None:
    """One element, so that strides do not matter."""
    given = torch.float32
    assert_right(world, [Case(collective, layout="negative", dtype=given, shape=(1,), root=0)])


@requirement(
    "COLL-LAYOUT-05",
    "A lazily conjugated tensor takes part with the values that it shows, or every rank raises an error.",
    source="torch.Tensor.conj: a view with its conjugate bit set",
)
@pytest.mark.parametrize("collective", [name for name in ALL if name not in ("gather", "scatter")])
@pytest.mark.world(2)
def test_conjugate_bit(world: World, collective: str) -> None:
    """Complex numbers with distinct imaginary parts."""
    ends = [end for (end,) in world.run(refusals, [Case(collective, layout="conjugate", dtype=torch.complex64)])]
    assert {kind for kind, _ in ends} in ({"right"}, {"refused"}), str(ends)


@requirement(
    "COLL-PURE-01",
    "Under no_grad a collective leaves requires_grad of the tensors that it is given as it was.",
    source="torch.distributed: collectives are no differentiable operations",
)
@pytest.mark.world(2, 3)
def test_requires_grad_stays(world: World) -> None:
    """Every collective, on leaves that require gradients."""
    assert_right(world, every_collective(requires_grad=True, repeats=2))
