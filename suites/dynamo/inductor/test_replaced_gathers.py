"""Gathers that Inductor replaces by sums of smaller products, and those that it leaves alone.

Graphs are changed by Inductor's passes and executed as they are, without generating code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.stacks import compiling, dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.tracing import Tracer

pytestmark = pytest.mark.needs(torch=compiling.DECOMPOSES)
SOURCE = "torch/_inductor/config.py: aten_distributed_optimizations"
ROWS, COLUMNS = 2, 3

Group = Any


def own(y: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the rows of this rank."""
    return torch.split(y, ROWS)[dist.get_rank(group)]


def whole(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather the rows of all ranks."""
    return functional.all_gather_tensor(x, 0, group)


def iterated(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Multiply twice by products of the transposed matrix with itself, as Newton-Schulz does."""
    y = whole(x, group)
    for _ in range(2):
        y = y @ (y.t() @ y) - y
    return [own(y, group)]


def twice(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Use two products of one matrix in one dimension's order, written in two ways."""
    y = whole(x, group)
    z = y @ (y.transpose(0, 1) @ y)
    return [own(z @ (z.permute(1, 0) @ z) * 2, group)]


def normed(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Divide by a norm before, and multiply by a sum and by sums of rows."""
    y = whole(x, group)
    y = y / y.norm()
    y = y @ (y.t() @ y)
    y = y * y.sum() * y.sum(1, keepdim=True)
    return [own(y @ (y.t() @ y), group)]


def by_column(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Multiply by the sum of each column."""
    y = whole(x, group)
    y = y @ (y.t() @ y) * y.sum(0)
    return [own(y @ (y.t() @ y), group)]


def single(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Use one product alone."""
    y = whole(x, group)
    return [own(y @ (y.t() @ y), group)]


def largest(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Divide by the largest number, which no sum has."""
    y = whole(x, group)
    y = y @ (y.t() @ y) * y.amax()
    return [own(y @ (y.t() @ y), group)]


def outer(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Multiply by products of rows with rows, of which no rank has a part."""
    y = whole(x, group)
    for _ in range(2):
        y = (y @ y.t()) @ y
    return [own(y, group)]


def others(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Use the rows of other ranks as well."""
    y = whole(x, group)
    for _ in range(2):
        y = y @ (y.t() @ y)
    first, second = torch.split(y, ROWS)
    return [first - second]


def also_returned(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Return what was gathered, too."""
    y = whole(x, group)
    z = y
    for _ in range(2):
        z = z @ (z.t() @ z)
    return [own(z, group), y * 2]


def shifted(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Leave out the first row of all."""
    y = whole(x, group)[1:]
    for _ in range(2):
        y = y @ (y.t() @ y)
    return [y[:ROWS]]


REPLACED: dict[Callable[[torch.Tensor, Group], list[torch.Tensor]], tuple[int, int]] = {
    iterated: (0, 2),
    twice: (0, 2),
    normed: (0, 4),
    by_column: (0, 3),
    single: (1, 0),
    largest: (1, 0),
    outer: (1, 0),
    others: (1, 0),
    also_returned: (1, 0),
    shifted: (1, 0),
}
"""Functions, and how many gathers and sums their graph has with the option; without, it has a gather."""


@requirement(
    "DYN-PASS-5560",
    "With allow_comms_decompositions, sums of smaller products replace a gather whose rows only such products and this "
    "rank's result need, with the same results.",
    source=f"{SOURCE}.allow_comms_decompositions; torch/_inductor/fx_passes/decomp_comms.py",
)
@requirement(
    "DYN-PASS-5561",
    "With allow_comms_decompositions, a gather stays if other numbers, rows or operations need what it has gathered.",
    source=f"{SOURCE}.allow_comms_decompositions; torch/_inductor/fx_passes/decomp_comms.py",
)
@pytest.mark.world(3, timeout=120)
def test_products(world: World) -> None:
    """Compile each function with the option, for a group of the last two of three ranks, and one without it."""

    def body(rank: Rank) -> None:
        group = dist.new_group([1, 2])
        if rank.index == 0:
            return
        x = torch.zeros(ROWS, COLUMNS, device=rank.device)
        x[rank.index - 1, rank.index] = 2.0 + rank.index  # the norm of all rows is five
        for allowed in (True, False):
            for code, counts in REPLACED.items() if allowed else [(iterated, (1, 0))]:
                given = x if code is normed else x + torch.arange(COLUMNS, device=rank.device) - rank.index
                right = [y + 0 for y in code(given, group)]
                torch.compiler.reset()
                tracer = Tracer("inductor passes")
                options = {"aten_distributed_optimizations.allow_comms_decompositions": allowed}
                with dynamo.inductor_options(options):
                    found: Any = torch.compile(code, backend=tracer, fullgraph=True)(given, group)
                assert unwaited() == 0
                what = f"{code.__name__}, {allowed}"
                for one, other in zip(right, found, strict=True):
                    if code is normed:
                        torch.testing.assert_close(one, other)
                    else:
                        assert_same(one, other + 0, what)
                names = tracer.launched()
                assert tuple(sum(kind in n for n in names) for kind in ("all_gather", "all_reduce")) == counts, what

    world.run(body)
