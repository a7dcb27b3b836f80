"""How long each call waits for a rank that does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.oracles.collectives import COLLECTIVES, Case
from harness.stacks.collectives import claimed_cases, coalescing_manager, functional
from suites.collectives.arguments.test_method_timeouts import at, parts

SHORT = timedelta(seconds=0.4)
Tensor = torch.Tensor
Call = Callable[[Tensor, Any, bool], Any]
"""A call with a tensor, in a group, waited for at once or later."""


def _coalesced(t: Tensor, group: Any, later: bool) -> Any:
    with coalescing_manager(group, async_ops=later) as manager:
        dist.all_reduce(t, group=group)
        dist.all_reduce(t.clone(), group=group)
    return manager if later else None


def _received(t: Tensor, group: Any, later: bool, source: int | None = 0) -> Any:
    if dist.get_rank() == 1:
        return (dist.irecv if later else dist.recv)(t, source, group)
    return (dist.isend if later else dist.send)(t, 1, group)


def _batch(t: Tensor, group: Any, later: bool) -> Any:
    message = dist.irecv if dist.get_rank() == 1 else dist.isend
    (work,) = dist.batch_isend_irecv([dist.P2POp(message, t, 1 - dist.get_rank(), group)])
    return work if later else work.wait()


CALLS: dict[str, dict[str, Call]] = {
    "collectives": {
        "all_reduce": lambda t, g, later: dist.all_reduce(t, group=g, async_op=later),
        "reduce": lambda t, g, later: dist.reduce(t, 1, group=g, async_op=later),
        "broadcast": lambda t, g, later: dist.broadcast(t, 0, group=g, async_op=later),
        "all_gather": lambda t, g, later: dist.all_gather(parts(t), t, group=g, async_op=later),
        "all_gather_into_tensor": lambda t, g, later: dist.all_gather_into_tensor(t.repeat(2), t, g, later),
        "gather": lambda t, g, later: dist.gather(t, at(1, t) or None, 1, group=g, async_op=later),
        "scatter": lambda t, g, later: dist.scatter(t, at(0, t) or None, 0, group=g, async_op=later),
        "reduce_scatter": lambda t, g, later: dist.reduce_scatter(t, parts(t), group=g, async_op=later),
        "reduce_scatter_tensor": lambda t, g, later: dist.reduce_scatter_tensor(
            t, t.repeat(2), group=g, async_op=later
        ),
        "all_to_all": lambda t, g, later: dist.all_to_all(parts(t), parts(t), g, later),
        "all_to_all_single": lambda t, g, later: dist.all_to_all_single(t, t.clone(), group=g, async_op=later),
        "all_gather_single": lambda t, g, later: dist.all_gather_single(t.repeat(2), t, g, later),
        "reduce_scatter_single": lambda t, g, later: dist.reduce_scatter_single(
            t, t.repeat(2), group=g, async_op=later
        ),
        "barrier": lambda t, g, later: dist.barrier(g, async_op=later),
    },
    "coalescing": {"all_reduce": _coalesced},
    "messages": {
        "recv": _received,
        "recv from any rank": lambda t, g, later: _received(t, g, later, source=None),
        "batch_isend_irecv": _batch,
    },
    "objects": {
        "all_gather_object": lambda t, g, later: dist.all_gather_object([None, None], "text", g),
        "gather_object": lambda t, g, later: dist.gather_object("text", at(1, t) or None, 1, g),
        "broadcast_object_list": lambda t, g, later: dist.broadcast_object_list(["text"], 0, g),
        "scatter_object_list": lambda t, g, later: dist.scatter_object_list([None], at(0, t) or None, 0, g),
    },
    "functional": {
        "all_reduce": lambda t, g, later: functional.all_reduce(t, "sum", g),
        "all_gather_tensor": lambda t, g, later: functional.all_gather_tensor(t, 0, g),
        "reduce_scatter_tensor": lambda t, g, later: functional.reduce_scatter_tensor(t, "sum", 0, g),
        "all_to_all_single": lambda t, g, later: functional.all_to_all_single(t, None, None, g),
        "permute_tensor": lambda t, g, later: functional.permute_tensor(t, [1, 0], g),
    },
}
"""Calls in which rank 1 waits for rank 0."""
NEEDS = {
    "coalescing": ["coalescing"],
    "messages": ["messages", "any_source"],
    "objects": ["objects"],
    "functional": ["functional"],
}


def _end(result: Any) -> None:
    if isinstance(result, torch.Tensor):
        functional.wait_tensor(result)
    elif result is not None and not isinstance(result, int):
        result.wait()


@requirement(
    "COLL-TIMEOUT-7700",
    "Any collective or message waits for a missing rank as long as the timeout of its group.",
    source="torch.distributed.new_group, init_process_group: timeout: for operations executed against the group",
)
@pytest.mark.parametrize(
    "kind",
    [
        "collectives",
        *(pytest.param(kind, marks=pytest.mark.needs(features=features)) for kind, features in NEEDS.items()),
    ],
)
@pytest.mark.needs(features=["subgroups", "threads", "timeouts"])
@pytest.mark.world(2)
def test_every_call_without_a_peer(world: World, kind: str) -> None:
    """Rank 0 joins no call of groups with a short timeout, and is late for those of others, which wait for it."""
    calls = CALLS[kind]
    if kind == "collectives":
        claimed = {case.collective for case in claimed_cases([Case(name) for name in COLLECTIVES])}
        calls = {
            name: call
            for name, call in calls.items()
            if hasattr(dist, name) and (name in claimed or name not in COLLECTIVES)
        }
    forms = (False,) if kind in ("objects", "functional") else (False, True)

    def body(rank: Rank) -> None:
        short = {(name, later): dist.new_group(timeout=SHORT) for name in calls for later in forms}
        others = {name: dist.new_group() for name in calls} if True in forms else {}

        def called(name: str, group: Any, later: bool) -> Any:
            return calls[name](torch.ones(2, device=rank.device), group, later)

        def alone(name: str, later: bool) -> float:
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                _end(called(name, short[name, later], later))
            return time.monotonic() - began

        if rank.index == 0:
            rank.store.wait(["seen"])
        waiting = {name: called(name, group, True) for name, group in others.items()}
        if rank.index == 1:
            try:
                with ThreadPoolExecutor(len(short)) as pool:
                    for what, seconds in zip(short, pool.map(alone, *zip(*short, strict=True)), strict=True):
                        assert 0.9 * SHORT.total_seconds() <= seconds < SHORT.total_seconds() + 5, f"{what}"
            finally:
                rank.store.set("seen", "")
        for work in waiting.values():
            work.wait()

    world.run(body, watch=False, timeout=10)
