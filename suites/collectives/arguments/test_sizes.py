"""Sizes where protocols switch, and tensors of many dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, Case, inputs, outputs
from harness.stacks.collectives import assert_right, issue
from suites.collectives.cases import every_collective, obstacle

POWERS = range(6, 18)
"""Powers of two of float32 elements: 256 bytes to half a megabyte."""


SHAPES_IN_GROUPS = ((), (1,), (2, 0, 3), (1, 4, 1), (2, 1, 3, 2))


@requirement(
    "COLL-SIZE-01",
    "A collective is correct at each power of two of elements and one element above it, within or across memory pages.",
    source="torch.distributed: its collectives; NVIDIA/nccl#740",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_every_band(world: World, collective: str) -> None:
    """Use 256 bytes to half a megabyte: each power of two of elements, and one element more."""
    cases = [Case(collective, shape=((1 << power) + more,)) for power in POWERS for more in (0, 1)]
    assert_right(world, cases)


@requirement(
    "COLL-SIZE-03",
    "A collective is correct on six, seven or eight ranks, where algorithms differ.",
    source="torch.distributed: its collectives",
)
@pytest.mark.world(6, 7, 8)
def test_more_ranks(world: World) -> None:
    """Call every collective with the last rank as root and 4 * size + 1 elements."""
    cases = every_collective(root=world.size - 1, shape=(4 * world.size + 1,), repeats=2)
    assert_right(world, [*cases, Case("all_reduce", "MAX", torch.int64), Case("all_to_all_single", uneven=True)])


@requirement(
    "COLL-SIZE-02",
    "A collective is correct for tensors of four or five dimensions.",
    source="torch.distributed: its collectives; intel/torch-xpu-ops#3021",
)
@pytest.mark.world(2, 3)
def test_many_dimensions(world: World) -> None:
    """Call every collective with shapes as attention layers exchange them."""
    assert_right(world, [case for shape in ((2, 1, 3, 2), (2, 3, 1, 2, 2)) for case in every_collective(shape=shape)])


@requirement(
    "COLL-SIZE-04",
    "In a subgroup a collective is correct for tensors of any number of dimensions, including empty tensors.",
    source="torch.distributed.new_group",
)
@pytest.mark.parametrize("group", [(1, 2), (0, 2)], ids=str)
@pytest.mark.world(3)
def test_dimensions_in_subgroups(world: World, group: tuple[int, ...]) -> None:
    """Shapes have zero, one, three or four dimensions, or a dimension of size zero."""
    cases = [
        case for shape in SHAPES_IN_GROUPS for case in every_collective(shape=shape, group=group, root=1, repeats=2)
    ]
    assert_right(world, [case for case in cases if not obstacle(case)])


def channels_last(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the channels-last memory format."""
    return [tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors]


@requirement(
    "COLL-LAYOUT-06",
    "A collective reads channels-last tensors by their elements.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in IN_PLACE])
@pytest.mark.world(2)
def test_channels_last(world: World, collective: str) -> None:
    """Inputs have the shape [2, 3, 2, 2], channels last, and outputs are contiguous."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=(2, 3, 2, 2), form="async")
        expected = outputs(case, rank.size, rank.index)
        results = [torch.full_like(right, -1, device=rank.device) for right in expected]
        given = channels_last(moved(inputs(case, rank.size, rank.index), rank.device))
        issue(case, given, results, None).wait()
        for right, out in zip(expected, results, strict=True):
            assert_same(right, out, str(case))

    world.run(body)
