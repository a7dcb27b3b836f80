"""Tensors that are not dense in memory, and memory that a collective must not change."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import IN_PLACE, Case
from harness.stacks.collectives import assert_right, refusals
from suites.collectives.cases import every_collective

ALL = [case.collective for case in every_collective()]
INPUTS_OUTPUTS = [name for name in ALL if name not in IN_PLACE]
SHAPES = ((5,), (4, 3))


@requirement(
    "COLL-LAYOUT-01",
    "A collective reads an input view by its elements, whatever its strides.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@requirement(
    "COLL-LAYOUT-07",
    "A collective leaves the memory of a strided input unchanged.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed", "expanded"])
@pytest.mark.parametrize("collective", INPUTS_OUTPUTS)
@pytest.mark.world(2)
def test_input(world: World, collective: str, layout: str) -> None:
    """The input is a view of a larger buffer, and the output is contiguous."""
    assert_right(world, [Case(collective, layout=layout, shape=shape, repeats=2) for shape in ((4, 3), (2, 3, 2))])


@requirement(
    "COLL-LAYOUT-02",
    "A collective writes an output view by its elements, whatever its strides.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@requirement(
    "COLL-LAYOUT-08",
    "A collective leaves the memory between the elements of a strided output unchanged.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed"])
@pytest.mark.parametrize("collective", INPUTS_OUTPUTS)
@pytest.mark.world(2)
def test_output(world: World, collective: str, layout: str) -> None:
    """The output is a view of a larger buffer, and the input is contiguous."""
    assert_right(world, [Case(collective, out_layout=layout, shape=shape, repeats=2) for shape in ((4, 3), (2, 3, 2))])


@requirement(
    "COLL-LAYOUT-03",
    "An in-place collective works on a view by its elements, whatever its strides.",
    source="torch.distributed.all_reduce, broadcast, reduce; pytorch/pytorch#192920",
)
@requirement(
    "COLL-LAYOUT-09",
    "An in-place collective leaves the memory between the elements of a strided tensor unchanged.",
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
    "A collective uses the values of a lazily negated tensor, not the memory behind it.",
    source="torch.Tensor.imag: of a conjugated tensor, a view with its negative bit set",
)
@pytest.mark.parametrize("collective", ALL)
@pytest.mark.world(2)
def test_negative_bit(world: World, collective: str) -> None:
    """Tensors have one element, so that strides do not matter."""
    given = torch.float32
    assert_right(world, [Case(collective, layout="negative", dtype=given, shape=(1,), root=0)])


@requirement(
    "COLL-LAYOUT-05",
    "A collective uses the values of a lazily conjugated tensor, or raises an error on every rank.",
    source="torch.Tensor.conj: a view with its conjugate bit set",
)
@pytest.mark.parametrize("collective", [name for name in ALL if name not in ("gather", "scatter")])
@pytest.mark.world(2)
def test_conjugate_bit(world: World, collective: str) -> None:
    """Use complex numbers with distinct imaginary parts."""
    ends = [end for (end,) in world.run(refusals, [Case(collective, layout="conjugate", dtype=torch.complex64)])]
    assert {kind for kind, _ in ends} in ({"right"}, {"refused"}), str(ends)


@requirement(
    "COLL-PURE-01",
    "Under no_grad a collective leaves requires_grad of its tensors unchanged.",
    source="torch.distributed: collectives are no differentiable operations",
)
@pytest.mark.world(2, 3)
def test_requires_grad_stays(world: World) -> None:
    """Every collective gets leaves that require gradients."""
    assert_right(world, every_collective(requires_grad=True, repeats=2))


DENSE: dict[str, torch.memory_format | tuple[int, ...]] = {
    "contiguous": torch.contiguous_format,
    "channels last": torch.channels_last,
    "transposed": (1, 0, 2, 3),
    "reversed": (3, 2, 1, 0),
}
"""Memory formats, or permutations, in which the elements of a tensor lie side by side."""


@requirement(
    "COLL-LAYOUT-4808",
    "An in-place collective accepts parameters in any dense memory format outside of no_grad, and they stay leaves.",
    source="torch.distributed.all_reduce, broadcast, reduce; torch.nn.Parameter; torch.channels_last",
)
@pytest.mark.parametrize("collective", sorted(IN_PLACE))
@pytest.mark.world(2)
def test_parameters_in_any_format(world: World, collective: str) -> None:
    """Call it with parameters that require gradients, of the shape [2, 3, 4, 5], in each format."""

    def body(rank: Rank) -> None:
        for name, layout in DENSE.items():
            own = torch.arange(120.0).reshape(2, 3, 4, 5) + 1000 * rank.index
            laid = (
                own.permute(layout).contiguous().permute([layout.index(dim) for dim in range(4)])
                if isinstance(layout, tuple)
                else own.contiguous(memory_format=layout)
            )
            parameter = torch.nn.Parameter(laid.clone().to(rank.device))
            strides = parameter.stride()
            root: dict[str, int] = {"broadcast": {"src": 1}, "reduce": {"dst": 1}}.get(collective, {})
            getattr(dist, collective)(parameter, **root)
            assert (parameter.is_leaf, parameter.requires_grad, parameter.stride()) == (True, True, strides), name
            if collective != "reduce" or rank.index == 1:
                other = own - 1000 * rank.index + 1000
                right = other if collective == "broadcast" else other + other - 1000
                assert_same(right, parameter.detach(), name)

    world.run(body)
