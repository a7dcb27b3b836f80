"""Timeouts that methods of a group are given, call by call."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.4)
Call = Callable[[Any, torch.Tensor, dict[str, Any]], Any]


def parts(mine: torch.Tensor) -> list[torch.Tensor]:
    """Return room for the tensors of two ranks."""
    return [torch.zeros_like(mine) for _ in range(2)]


def at(root: int, mine: torch.Tensor) -> list[torch.Tensor]:
    """Return room for them on the root, and nothing elsewhere."""
    return parts(mine) if dist.get_rank() == root else []


def _with(options: Any, given: dict[str, Any]) -> Any:
    """Set a root and a timeout, of those that are given."""
    for name, value in given.items():
        setattr(options, name, value)
    return options


CALLS: dict[str, Call] = {
    "allreduce": lambda group, mine, given: group.allreduce(mine, **given),
    "reduce": lambda group, mine, given: group.reduce(mine, root=0, **given),
    "broadcast": lambda group, mine, given: group.broadcast(mine, root=1, **given),
    "allgather": lambda group, mine, given: group.allgather(parts(mine), mine, **given),
    "gather": lambda group, mine, given: group.gather(at(0, mine), mine, root=0, **given),
    "scatter": lambda group, mine, given: group.scatter(mine, at(1, mine), root=1, **given),
    "reduce_scatter": lambda group, mine, given: group.reduce_scatter(mine, parts(mine), **given),
    "alltoall_base": lambda group, mine, given: group.alltoall_base(mine, mine.clone(), [1, 1], [1, 1], **given),
    "barrier": lambda group, mine, given: group.barrier(**given),
    "allreduce with options": lambda group, mine, given: group.allreduce([mine], _with(dist.AllreduceOptions(), given)),
    "reduce with options": lambda group, mine, given: group.reduce(
        [mine], _with(dist.ReduceOptions(), {"rootRank": 0, **given})
    ),
    "broadcast with options": lambda group, mine, given: group.broadcast(
        [mine], _with(dist.BroadcastOptions(), {"rootRank": 1, **given})
    ),
    "gather with options": lambda group, mine, given: group.gather(
        [at(0, mine)] if dist.get_rank() == 0 else [], [mine], _with(dist.GatherOptions(), {"rootRank": 0, **given})
    ),
    "scatter with options": lambda group, mine, given: group.scatter(
        [mine], [at(1, mine)] if dist.get_rank() == 1 else [], _with(dist.ScatterOptions(), {"rootRank": 1, **given})
    ),
    "reduce_scatter with options": lambda group, mine, given: group.reduce_scatter(
        [mine], [parts(mine)], _with(dist.ReduceScatterOptions(), given)
    ),
    "alltoall_base with options": lambda group, mine, given: group.alltoall_base(
        mine, mine.clone(), [1, 1], [1, 1], _with(dist.AllToAllOptions(), given)
    ),
    "barrier with options": lambda group, mine, given: group.barrier(_with(dist.BarrierOptions(), given)),
}
"""Methods in which rank 0 waits for rank 1."""


@requirement(
    "COLL-METHOD-01",
    "The timeout that a method of a group is given is that of this call, and of no later one.",
    source="torch.distributed.ProcessGroup: allreduce, reduce, broadcast, allgather, gather, scatter, reduce_scatter, "
    "alltoall_base, barrier; test_dist2.py: ProcessGroupGlooTest",
)
@pytest.mark.needs(features=["subgroups", "timeouts"])
@pytest.mark.world(2)
def test_timeouts_of_methods(world: World) -> None:
    """Rank 1 joins no call until rank 0 has seen an error of each; calls of other groups without a timeout wait on."""

    def body(rank: Rank) -> None:
        short = {name: dist.new_group() for name in CALLS}
        others = {name: dist.new_group() for name in CALLS}

        def called(group: Any, name: str, **given: timedelta) -> Any:
            return CALLS[name](group, torch.ones(2, device=rank.device), given)

        for name, group in (*short.items(), *others.items()):
            called(group, name, timeout=LONG).wait()
        if rank.index == 1:
            rank.store.wait(["seen"])
        began = time.monotonic()
        waiting = {name: called(group, name) for name, group in others.items()}
        if rank.index == 0:
            works = {name: called(group, name, timeout=SHORT) for name, group in short.items()}
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
