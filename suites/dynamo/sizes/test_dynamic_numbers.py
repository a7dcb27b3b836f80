"""Sizes and numbers that have become dynamic in compiled code are numbers as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import Rank, World, requirement
from harness.stacks.collectives import functional
from suites.dynamo.objects import summed
from suites.dynamo.turns import by_turns


class Batches:
    """Batches of which there are so many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


TRUTHS: dict[str, Callable[[Batches], Any]] = {
    "length": len,
    "bool": bool,
    "not": lambda batches: not batches,
}
"""How code asks whether there are batches."""


@requirement(
    "DYN-NUMBER-3761",
    "Compiled code may ask in whatever way for the truth of an object whose length is a number that differs by call.",
    source="Python: object.__bool__, object.__len__; torch.compile: dynamic shapes",
)
@pytest.mark.parametrize("way", TRUTHS)
@pytest.mark.world(2)
def test_truth(world: World, way: str) -> None:
    """Scale a sum over ranks by what objects with one, two, three and no batches are."""

    def step(x: torch.Tensor, batches: Batches) -> torch.Tensor:
        return summed(x) * (1 + TRUTHS[way](batches))

    makes = [lambda count=count: Batches(count) for count in (1, 2, 3, 0)]
    for wrong in world.run(lambda rank: by_turns(rank, step, makes, name=way)):
        assert not wrong, "\n".join(wrong)


FORMATS: dict[str, Callable[[int], str]] = {
    "plain": lambda size: f"{size} rows",
    "digits": lambda size: f"{size:03d} rows",
    "quotient": lambda size: f"{size / 2:.3f} rows",
}
"""Texts with a size."""


@requirement(
    "DYN-NUMBER-3762",
    "In compiled code, a formatted string has the sizes of this call's tensors, in the format that is asked for.",
    source="Python: formatted string literals; torch.compile: dynamic shapes",
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.world(2)
def test_formats(world: World, form: str) -> None:
    """Write the rows of tensors of several sizes into a text, beside a sum over ranks."""

    def step(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, str]:
        return summed(x), FORMATS[form](rows.shape[0])

    def body(rank: Rank) -> list[str]:
        makes = [lambda size=size: torch.ones(size, device=rank.device) for size in (3, 4, 12)]
        return by_turns(rank, step, makes, name=form)

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _gathered(x: torch.Tensor, number: Any, mesh: DeviceMesh) -> torch.Tensor:
    return functional.all_gather_tensor(x, number, mesh)


def _cut(x: torch.Tensor, number: Any, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(number)]).to_local()


def _signed(x: torch.Tensor, number: Any, mesh: DeviceMesh) -> torch.Tensor:
    return torch.copysign(summed(x) + 1, number)


NUMBERS: dict[str, tuple[Callable[[torch.Tensor, Any, DeviceMesh], torch.Tensor], list[float]]] = {
    "dimension": (_gathered, [1, 2, 3]),
    "shard": (_cut, [1, 2, 3]),
    "zero": (_signed, [0.0, -0.0, 0.0]),
}
"""What code does with a number, and which numbers it is given by turns."""


@requirement(
    "DYN-NUMBER-6750",
    "Compiled code takes the number that it is given at each call, be it a dimension or a zero with its sign.",
    source="torch.distributed.tensor.placement_types.Shard; torch.copysign; torch.compile: dynamic shapes",
)
@pytest.mark.parametrize("use", NUMBERS)
@pytest.mark.world(2)
def test_given(world: World, use: str) -> None:
    """Gather along dimensions, cut along dimensions, and give a sum over ranks the sign of zeros."""

    def body(rank: Rank) -> list[str]:
        function, numbers = NUMBERS[use]
        mesh = rank.mesh(2)

        def step(x: torch.Tensor, number: Any) -> torch.Tensor:
            return function(x.repeat(2, 2, 2, 1), number, mesh)

        return by_turns(rank, step, [lambda number=number: number for number in numbers], name=use)

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
