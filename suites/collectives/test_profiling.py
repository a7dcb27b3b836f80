"""Collectives and messages in profiles: one event for each, with its name and the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, requirement, spmd

Shapes = list[list[int]]


@requirement(
    "COLL-PROFILE-02",
    "A profile has an event for each collective or message, named after its backend, with the shapes of its inputs.",
    source="torch.distributed: Profiling Collective Communication; distributed_test.py: call_dist_op, _test_send_recv",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@pytest.mark.needs(collective="all_to_all")
@pytest.mark.needs(features=["coalescing", "messages"])
@spmd(2)
def test_events(rank: Rank) -> None:
    """Record each once, twice, or in flight, in profiles of both profilers; some calls are in no profile."""
    me, other, backend = rank.index, 1 - rank.index, dist.get_backend()

    def t(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=rank.device)

    def both(*shape: int) -> list[torch.Tensor]:
        return [t(*shape), t(*shape)]

    one = [[2, 3]]
    calls: dict[str, tuple[Callable[[], Any], Shapes]] = {
        "all_reduce": (lambda: dist.all_reduce(t(2, 3)), one),
        "all_reduce in flight": (lambda: dist.all_reduce(t(2, 3), async_op=True).wait(), one),
        "all_reduce of a list": (lambda: dist.all_reduce_coalesced([t(2, 3), t(4)]), [[2, 3], [4]]),
        "all_reduce of a number": (lambda: dist.all_reduce(t()), [[]]),
        "broadcast": (lambda: dist.broadcast(t(2, 3), 1), one),
        "reduce": (lambda: dist.reduce(t(2, 3), 1), one),
        "all_gather": (lambda: dist.all_gather(both(2, 3), t(2, 3)), one),
        "all_gather into a tensor": (lambda: dist.all_gather_into_tensor(t(4, 3), t(2, 3)), one),
        "gather": (lambda: dist.gather(t(2, 3), both(2, 3) if me else None, 1), one),
        "scatter": (lambda: dist.scatter(t(2, 3), both(2, 3) if me else None, 1), 2 * one if me else []),
        "reduce_scatter": (lambda: dist.reduce_scatter(t(2, 3), both(2, 3)), 2 * one),
        "reduce_scatter of a tensor": (lambda: dist.reduce_scatter_tensor(t(2, 3), t(4, 3)), [[4, 3]]),
        "all_to_all": (lambda: dist.all_to_all(both(2, 3), both(2, 3)), 2 * one),
        "all_to_all of a tensor": (lambda: dist.all_to_all_single(t(4, 3), t(4, 3)), [[4, 3]]),
        "barrier": (dist.barrier, []),
        "send" if me else "recv": (lambda: dist.send(t(2, 3), other) if me else dist.recv(t(2, 3), other), one),
        "recv from any" if me else "send to it": (
            lambda: dist.recv(t(2, 3)) if me else dist.send(t(2, 3), other),
            one,
        ),
    }

    def recorded(call: Callable[[], Any], shapes: bool = True) -> list[tuple[str, Shapes]]:
        with torch.autograd.profiler.profile(record_shapes=shapes, use_kineto=False) as profile:
            call()
        events = [event for event in profile.function_events if event.name.startswith(f"{backend}:")]
        assert all(event.count == 1 for event in events)
        return [(event.name, event.input_shapes) for event in events]

    def as_one(events: list[tuple[str, Shapes]]) -> Shapes:
        return [shape for _, inputs in events for shape in inputs or []]

    for what, (call, inputs) in calls.items():
        call()
        events = recorded(call)
        assert events, f"{what} is not in the profile"
        kind = what.split()[0]
        if kind not in ("reduce_scatter", "barrier"):  # of which some backends make another collective
            assert [kind in name for name, _ in events] == [True], f"{what}: {events}"
        assert as_one(events) == inputs, f"{what}: {events}"
        twice = recorded(lambda call=call: (call(), call()))
        assert sorted(twice) == sorted(2 * events), what
        assert as_one(recorded(call, shapes=False)) == [], what
        assert recorded(lambda: None) == []

    expected = sorted(name for call, _ in calls.values() for name, _ in recorded(call))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for call, _ in calls.values():
            call()
    names = (event.name for event in profile.events())
    assert sorted(name for name in names if name.startswith(f"{backend}:")) == expected
