"""Collectives with a root in compiled code, which break its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo

MEMBERS = (1, 2)
"""The ranks of a group in which no rank is its global rank."""


def called(name: str, x: torch.Tensor, group: Any, root: dict[str, int], am_root: bool) -> list[torch.Tensor]:
    """Call a collective and return what this rank gets; ``root``: its root, by the parameter that names it."""
    both = [torch.zeros_like(x) for _ in MEMBERS]
    if name == "broadcast":
        y = x * 2
        dist.broadcast(y, group=group, **root)
        return [y + 1]
    if name == "reduce":
        y = x * 2
        dist.reduce(y, group=group, **root)
        return [y + 1] if am_root else []
    if name == "gather":
        dist.gather(x * 2, both if am_root else None, group=group, **root)
        return [y + 1 for y in both] if am_root else []
    dist.scatter(both[0], [x * 2, x * 4] if am_root else None, group=group, **root)
    return [both[0] + 1]


def expected(name: str, rank: int, root: int, call: int) -> list[list[float]]:
    """Return what a rank gets, if rank i gives 10 * i + call."""
    given = [10.0 * i + call for i in MEMBERS]
    if name in ("broadcast", "scatter"):
        factor = 4 if name == "scatter" and rank == MEMBERS[1] else 2
        return [[factor * (10.0 * root + call) + 1] * 2]
    if rank != root:
        return []
    return [[2 * sum(given) + 1] * 2] if name == "reduce" else [[2 * value + 1] * 2 for value in given]


@requirement(
    "DYN-COLL-18",
    "In compiled code too, a root is a global rank if src or dst names it, and a rank of the group otherwise.",
    source="torch.distributed: broadcast, reduce, gather, scatter",
)
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
@pytest.mark.world(3)
def test_roots(world: World, collective: str) -> None:
    """One function is given each root of a group of the last two ranks, by its global rank and by its group rank."""

    def body(rank: Rank) -> list[list[list[float]]]:
        group = dist.new_group(list(MEMBERS))
        if rank.index not in MEMBERS:
            return []
        way = "src" if collective in ("broadcast", "scatter") else "dst"
        found = []

        def by_global(x: torch.Tensor, root: int, am_root: bool) -> list[torch.Tensor]:
            return called(collective, x, group, {way: root}, am_root)

        def by_member(x: torch.Tensor, root: int, am_root: bool) -> list[torch.Tensor]:
            return called(collective, x, group, {f"group_{way}": root}, am_root)

        for function in (by_global, by_member):
            compiled, counter = dynamo.compiled(function, backend="eager", fullgraph=False)
            for call, root in enumerate(MEMBERS):
                x = torch.full((2,), 10.0 * rank.index + call, device=rank.device)
                named = root if function is by_global else MEMBERS.index(root)
                found.append([y.tolist() for y in compiled(x, named, rank.index == root)])
            assert counter.graphs > 0
        return found

    right = [[expected(collective, r, root, call) for call, root in enumerate(MEMBERS)] * 2 for r in MEMBERS]
    assert_on_ranks([[], *right], world.run(body))
