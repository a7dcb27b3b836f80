"""Collectives of Python objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, requirement, spmd


def thing(rank: int, call: int = 0) -> Any:
    """An object of a size and kind that depends on whose it is."""
    kinds = [None, {"rank": rank, "call": call}, "x" * (1000 * rank + call), [rank] * 7, (call, {rank}), b"\0" * rank]
    return [rank, call, kinds[(rank + call) % len(kinds)]]


@requirement(
    "COLL-OBJECT-01",
    "all_gather_object gives every rank every rank's object, in the group's order.",
    source="torch.distributed.all_gather_object",
)
@spmd(1, 2, 3, 4)
def test_all_gather_object(rank: Rank) -> None:
    """Objects of different kinds and sizes, ten times in a row, after other work."""
    for call in range(10):
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        found: list[Any] = [None] * rank.size
        dist.all_gather_object(found, thing(rank.index, call))
        assert found == [thing(i, call) for i in range(rank.size)]


@requirement(
    "COLL-OBJECT-02",
    "gather_object gives the destination every rank's object, in the group's order.",
    source="torch.distributed.gather_object",
)
@spmd(1, 2, 3)
def test_gather_object(rank: Rank) -> None:
    """Every rank in turn is the destination."""
    for root in range(rank.size):
        found: list[Any] | None = [None] * rank.size if rank.index == root else None
        dist.gather_object(thing(rank.index, root), found, dst=root)
        assert found == ([thing(i, root) for i in range(rank.size)] if rank.index == root else None)


@requirement(
    "COLL-OBJECT-03",
    "broadcast_object_list gives every rank the source's objects.",
    source="torch.distributed.broadcast_object_list",
)
@spmd(1, 2, 3)
def test_broadcast_object_list(rank: Rank) -> None:
    """Every rank in turn is the source of two objects."""
    for root in range(rank.size):
        found = [thing(root), thing(root, 1)] if rank.index == root else [None, None]
        dist.broadcast_object_list(found, src=root)
        assert found == [thing(root), thing(root, 1)]


@requirement(
    "COLL-OBJECT-04",
    "scatter_object_list gives each rank its own of the source's objects.",
    source="torch.distributed.scatter_object_list",
)
@spmd(1, 2, 3)
def test_scatter_object_list(rank: Rank) -> None:
    """Every rank in turn is the source."""
    for root in range(rank.size):
        found: list[Any] = [None]
        given = [thing(i, root) for i in range(rank.size)] if rank.index == root else None
        dist.scatter_object_list(found, given, src=root)
        assert found == [thing(rank.index, root)]


@requirement(
    "COLL-OBJECT-05",
    "recv_object_list gets what the peer's send_object_list gave.",
    source="torch.distributed.send_object_list, recv_object_list",
)
@spmd(2, 3)
def test_send_recv_object_list(rank: Rank) -> None:
    """The last rank sends to rank 0."""
    last = rank.size - 1
    if rank.index == last:
        dist.send_object_list([thing(last), thing(last, 1)], 0)
    elif rank.index == 0:
        found = [None, None]
        assert dist.recv_object_list(found, last) == last
        assert found == [thing(last), thing(last, 1)]


@requirement(
    "COLL-OBJECT-06",
    "Object collectives work in a subgroup without rank 0, with roots by global rank or by rank in the group.",
    source="torch.distributed.broadcast_object_list: group_src; pytorch/pytorch#149200",
)
@spmd(3)
def test_in_a_subgroup(rank: Rank) -> None:
    """The group of ranks 1 and 2; rank 2 is the root."""
    group = dist.new_group([1, 2])
    if rank.index == 0:
        return
    both: list[Any] = [None, None]
    dist.all_gather_object(both, thing(rank.index), group=group)
    assert both == [thing(1), thing(2)]
    for names in ({"src": 2}, {"group_src": 1}):
        found = [thing(2)] if rank.index == 2 else [None]
        dist.broadcast_object_list(found, group=group, **names)
        assert found == [thing(2)]


@requirement(
    "COLL-OBJECT-07", "An object that can't be pickled raises an error.", source="torch.distributed.all_gather_object"
)
@spmd(2)
def test_unpicklable(rank: Rank) -> None:
    """On every rank, and the group is as good as before."""
    with pytest.raises((TypeError, AttributeError)):
        dist.all_gather_object([None] * rank.size, lambda: None)
    found: list[Any] = [None] * rank.size
    dist.all_gather_object(found, rank.index)
    assert found == list(range(rank.size))
