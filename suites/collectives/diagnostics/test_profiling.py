"""Collectives and messages in profiles: one event for each, with its name and the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement, spmd
from harness.profiles.obeyed import in_force

Shapes = list[list[int]]
Calls = dict[str, tuple[Callable[[], Any], Shapes]]
ONE = [[2, 3]]


@requirement(
    "COLL-PROFILE-02",
    "A profile has an event for each collective or message, named after its backend, with the shapes of its inputs.",
    source="torch.distributed: Profiling Collective Communication; distributed_test.py: call_dist_op, _test_send_recv",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(features=["coalescing", "messages"])
@pytest.mark.world(2)
def test_events(world: World) -> None:
    """Record each once, twice, or in flight, in profiles of both profilers; some calls are in no profile."""
    any_source = not in_force().claims.lacks_features("collectives", ["any_source"])

    def body(rank: Rank) -> None:
        me, other = rank.index, 1 - rank.index

        def t(*shape: int) -> torch.Tensor:
            return torch.ones(shape, device=rank.device)

        calls: Calls = {
            "all_reduce": (lambda: dist.all_reduce(t(2, 3)), ONE),
            "all_reduce in flight": (lambda: dist.all_reduce(t(2, 3), async_op=True).wait(), ONE),
            "all_reduce of a list": (lambda: dist.all_reduce_coalesced([t(2, 3), t(4)]), [[2, 3], [4]]),
            "all_reduce of a number": (lambda: dist.all_reduce(t()), [[]]),
            "broadcast": (lambda: dist.broadcast(t(2, 3), 1), ONE),
            "reduce": (lambda: dist.reduce(t(2, 3), 1), ONE),
            "all_gather": (lambda: dist.all_gather([t(2, 3), t(2, 3)], t(2, 3)), ONE),
            "all_gather into a tensor": (lambda: dist.all_gather_into_tensor(t(4, 3), t(2, 3)), ONE),
            "gather": (lambda: dist.gather(t(2, 3), [t(2, 3), t(2, 3)] if me else None, 1), ONE),
            "reduce_scatter of a tensor": (lambda: dist.reduce_scatter_tensor(t(2, 3), t(4, 3)), [[4, 3]]),
            "all_to_all of a tensor": (lambda: dist.all_to_all_single(t(4, 3), t(4, 3)), [[4, 3]]),
            "barrier": (dist.barrier, []),
            "send" if me else "recv": (lambda: dist.send(t(2, 3), other) if me else dist.recv(t(2, 3), other), ONE),
        }
        if any_source:
            calls["recv from any" if me else "send to it"] = (
                lambda: dist.recv(t(2, 3)) if me else dist.send(t(2, 3), other),
                ONE,
            )
        assert_recorded(calls)

    world.run(body)


@requirement(
    "COLL-PROFILE-02",
    "A profile has an event for each collective or message, named after its backend, with the shapes of its inputs.",
    source="torch.distributed: Profiling Collective Communication; distributed_test.py: call_dist_op, _test_send_recv",
)
@pytest.mark.needs(collective="scatter")
@pytest.mark.needs(collective="all_to_all")
@spmd(2)
def test_events_of_lists(rank: Rank) -> None:
    """As test_events, of a collective with a list of inputs: a shape for each."""
    me = rank.index

    def both() -> list[torch.Tensor]:
        return [torch.ones(2, 3, device=rank.device) for _ in range(2)]

    assert_recorded(
        {
            "scatter": (lambda: dist.scatter(both()[0], both() if me else None, 1), 2 * ONE if me else []),
            "reduce_scatter": (lambda: dist.reduce_scatter(both()[0], both()), 2 * ONE),
            "all_to_all": (lambda: dist.all_to_all(both(), both()), 2 * ONE),
        }
    )


def assert_recorded(calls: Calls) -> None:
    """Assert that each call has an event of its name, the first word, with the shapes of its inputs."""
    backend = dist.get_backend()

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
        kind = what.split()[0].replace("_", "")
        if kind not in ("reducescatter", "barrier"):  # of which some backends make another collective
            assert [kind in name.replace("_", "") for name, _ in events] == [True], f"{what}: {events}"
        if kind == "barrier" and "reduce" in events[0][0]:
            inputs = [[1]]
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
