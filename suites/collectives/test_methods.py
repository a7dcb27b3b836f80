"""Collectives as methods of their group, which take tensors and options by name."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement

SOURCE = "torch.distributed.ProcessGroup: allreduce, broadcast, reduce, allgather, gather, scatter, reduce_scatter, "
SOURCE += "alltoall_base, barrier, send, recv; test_dist2.py: ProcessGroupGlooTest"
LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.4)


def called(group: Any, name: str, mine: torch.Tensor, size: int, root: int, timeout: timedelta | None) -> Any:
    """Call a method with a tensor of two elements; return its Work and the tensors that it writes."""
    options = {} if timeout is None else {"timeout": timeout}
    into = [torch.full_like(mine, -1) for _ in range(size)]
    parts = [mine * (i + 1) for i in range(size)]
    at_root = group.rank() == root
    if name == "allreduce":
        return group.allreduce(mine, **options), [mine]
    if name == "allreduce-max":
        return group.allreduce(mine, op=dist.ReduceOp.MAX, **options), [mine]
    if name == "broadcast":
        return group.broadcast(mine, root=root, **options), [mine]
    if name == "reduce":
        return group.reduce(mine, root=root, op=dist.ReduceOp.SUM, **options), [mine] if at_root else []
    if name == "reduce-min":
        return group.reduce(mine, root=root, op=dist.ReduceOp.MIN, **options), [mine] if at_root else []
    if name == "allgather":
        return group.allgather(into, mine, **options), into
    if name == "gather":
        return group.gather(into if at_root else [], mine, root=root, **options), into if at_root else []
    if name == "scatter":
        return group.scatter(into[0], parts if at_root else [], root=root, **options), into[:1]
    if name == "reduce_scatter":
        return group.reduce_scatter(into[0], parts, op=dist.ReduceOp.SUM, **options), into[:1]
    if name == "reduce_scatter-max":
        return group.reduce_scatter(into[0], parts, op=dist.ReduceOp.MAX, **options), into[:1]
    if name == "alltoall_base":
        whole = torch.full((2 * size,), -1.0, device=mine.device)
        return group.alltoall_base(whole, torch.cat(parts), [2] * size, [2] * size, **options), [whole]
    return group.barrier(**options), []


def expected(name: str, member: int, size: int, root: int) -> list[float]:
    """Return one number for each pair of elements that a member's method writes; member m has given 10^m."""
    given = [10.0**i for i in range(size)]
    name, _, op = name.partition("-")
    reduced = {"": sum, "max": max, "min": min}[op](given)
    return {
        "allreduce": [reduced],
        "broadcast": [given[root]],
        "reduce": [reduced] if member == root else [],
        "allgather": given,
        "gather": given if member == root else [],
        "scatter": [given[root] * (member + 1)],
        "reduce_scatter": [reduced * (member + 1)],
        "alltoall_base": [value * (member + 1) for value in given],
        "barrier": [],
    }[name]


METHODS = (
    *("allreduce", "allreduce-max", "broadcast", "reduce", "reduce-min", "allgather", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter-max", "alltoall_base", "barrier"),
)


@requirement(
    "COLL-METHOD-01",
    "Called as a method of its group, a collective gives what the function gives, with the root and operation that it "
    "is given.",
    source=SOURCE,
)
@pytest.mark.world(3)
def test_methods(world: World) -> None:
    """Call each method with each root, with and without a timeout, in the world and in a group without rank 0."""

    def body(rank: Rank) -> None:
        part: Any = dist.new_group([1, 2])
        for group in (dist.group.WORLD, part):
            if group is part and rank.index == 0:
                continue
            assert group is not None
            member, size = group.rank(), group.size()
            for name in METHODS:
                for root in range(size):
                    for timeout in (None, LONG):
                        what = f"{name}, root {root} of {size}, timeout {timeout}"
                        mine = torch.full((2,), 10.0**member, device=rank.device)
                        work, into = called(group, name, mine, size, root, timeout)
                        work.wait()
                        right = expected(name, member, size, root)
                        found = torch.cat([torch.empty(0, device=rank.device), *into])
                        assert_same(torch.tensor(right).repeat_interleave(2), found, what)
            for tag in (0, 7):
                mine = torch.full((2,), 10.0**member, device=rank.device)
                if member < 2:
                    work = group.send([mine], 1, tag) if member == 0 else group.recv([mine], 0, tag)
                    work.wait()
                    assert mine.tolist() == [1.0, 1.0]

    world.run(body)


@requirement(
    "COLL-METHOD-02",
    "The timeout that a method of a group is given is that of this call, and of no later one.",
    source=SOURCE,
)
@pytest.mark.needs(features=["subgroups"])
@pytest.mark.world(2)
def test_timeouts_of_methods(world: World) -> None:
    """Rank 1 joins no call until rank 0 has seen an error of each; calls of other groups without a timeout wait on."""
    names = [name for name in METHODS if "-" not in name and name not in ("reduce", "gather")]  # rank 1 is the root

    def body(rank: Rank) -> None:
        short = {name: dist.new_group() for name in names}
        others = {name: dist.new_group() for name in names}
        mine = torch.ones(2, device=rank.device)
        for name, group in (*short.items(), *others.items()):
            called(group, name, mine.clone(), 2, 1, LONG)[0].wait()
        if rank.index == 1:
            rank.store.wait(["seen"])
        began = time.monotonic()
        waiting = {name: called(group, name, mine.clone(), 2, 1, None)[0] for name, group in others.items()}
        if rank.index == 0:
            works = {name: called(group, name, mine.clone(), 2, 1, SHORT)[0] for name, group in short.items()}
            try:
                for name, work in works.items():
                    with pytest.raises(RuntimeError):
                        work.wait()
                    assert 0.9 * SHORT.total_seconds() <= time.monotonic() - began < 5, name
                assert [name for name, work in waiting.items() if work.is_completed()] == []
            finally:
                rank.store.set("seen", "")
        for work in waiting.values():
            work.wait()

    world.run(body, watch=False, timeout=20)
