"""Waiting twice, and a coalescing manager whose body raised an error."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, assert_on_ranks, assert_same, requirement, spmd
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, Case, inputs, outputs
from harness.stacks.collectives import claimed_cases, coalescing_manager, issue
from harness.stacks.limit import runs_with

SHORT = timedelta(seconds=1)


@requirement(
    "COLL-ASYNC-04",
    "A second wait() on the same Work returns and changes nothing.",
    source="torch.distributed.Work.wait",
)
@pytest.mark.parametrize("collective", [*COLLECTIVES, "barrier"])
@pytest.mark.world(2)
def test_second_wait(world: World, collective: str) -> None:
    """The result is overwritten between two waits and stays overwritten."""

    def body(rank: Rank) -> None:
        group = dist.new_group(timeout=SHORT)
        if collective == "barrier":
            work = dist.barrier(group, async_op=True)
            work.wait()
            work.wait()
            return
        case = Case(collective, form="async")
        given = moved(inputs(case, rank.size, rank.index), rank.device)
        expected = outputs(case, rank.size, rank.index)
        results = given if collective in IN_PLACE else [torch.zeros_like(e, device=rank.device) for e in expected]
        work = issue(case, given, results, group)
        work.wait()
        if expected:
            assert_same(expected[0], results[0], "after the first wait")
        for tensor in results:
            tensor.fill_(5)
        work.wait()
        assert all((tensor == 5).all() for tensor in results)

    world.run(body)


def succeeded(work: Any, timeout: tuple[timedelta, ...], what: str) -> None:
    """Wait for work, and check that it says that it has succeeded."""
    assert work.wait(*timeout) is True, f"{what}, {timeout}"
    assert work.is_success(), what
    assert runs_with("<2.13") or work.exception() is None, what  # earlier versions can't return that there is none
    work.synchronize()


@requirement(
    "COLL-ASYNC-56",
    "wait() of work that succeeded returns True, with a timeout or without one.",
    source="torch.distributed.Work.wait: 'Returns: true/false'",
)
@requirement(
    "COLL-ASYNC-5440",
    "Work that succeeded says so, has no exception, and has the tensor that it wrote in place as its result, if any.",
    source="torch.distributed.Work: is_success, exception, result, synchronize",
)
@pytest.mark.needs(features=["messages"])
@pytest.mark.world(2)
def test_returned(world: World) -> None:
    """Wait for every collective, a barrier, messages and batches of them, in the world and in a group."""
    cases = claimed_cases([Case(collective, form="async") for collective in COLLECTIVES])

    def body(rank: Rank) -> None:
        tensors = [torch.ones(2, device=rank.device) for _ in range(2)]
        other = 1 - rank.index
        for group in (dist.group.WORLD, dist.new_group()):
            for timeout in ((), (timedelta(seconds=20),)):
                for case in cases:
                    given = moved(inputs(case, 2, rank.index), rank.device)
                    expected = outputs(case, 2, rank.index)
                    in_place = case.collective in IN_PLACE
                    results = given if in_place else [torch.zeros_like(e, device=rank.device) for e in expected]
                    work = issue(case, given, results, group)
                    succeeded(work, timeout, str(case))
                    with contextlib.suppress(RuntimeError):  # a backend need not keep results
                        assert not in_place or work.result()[0].data_ptr() == given[0].data_ptr(), str(case)
                succeeded(dist.barrier(group, async_op=True), timeout, "barrier")
                for message, name in ((dist.isend, "send"), (dist.irecv, "recv"))[:: 1 - 2 * rank.index]:
                    work = message(tensors[0], other, group=group)
                    succeeded(work, timeout, name)
                ops = [
                    dist.P2POp(dist.isend, tensors[0], other, group),
                    dist.P2POp(dist.irecv, tensors[1], other, group),
                ]
                for work in dist.batch_isend_irecv(ops):
                    succeeded(work, timeout, "batch")

    world.run(body)


@requirement(
    "COLL-ASYNC-13",
    "A Work is completed once its result is there, even if nobody has waited for it.",
    source="torch.distributed.Work: is_completed, get_future",
)
@pytest.mark.needs(features=["messages"])
@pytest.mark.parametrize("batch", [False, True], ids=["alone", "batch"])
@pytest.mark.world(2)
def test_message_completes_by_itself(world: World, batch: bool) -> None:
    """Ask both ranks' Works for half a second after a message, which another one goes before."""

    def body(rank: Rank) -> list[bool]:
        tensor = torch.full((2,), 1.0 - rank.index, device=rank.device)
        call, other = (dist.isend, dist.irecv)[rank.index], 1 - rank.index
        completed: list[bool] = []
        for last in (False, True):
            works = dist.batch_isend_irecv([dist.P2POp(call, tensor, other)]) if batch else [call(tensor, other)]
            until = time.monotonic() + 0.5 * last
            while not all(work.is_completed() for work in works) and time.monotonic() < until:
                time.sleep(0.01)
            completed = [work.is_completed() for work in works]
            for work in works:
                work.wait()
        assert tensor.tolist() == [1, 1]
        return completed

    assert_on_ranks([[True]] * 2, world.run(body))


@requirement(
    "COLL-ASYNC-05",
    "A second wait() on the Work of a message returns.",
    source="torch.distributed.isend, irecv: Work.wait",
)
@pytest.mark.parametrize("side", ["isend", "irecv"])
@pytest.mark.world(2)
def test_second_wait_for_a_message(world: World, side: str) -> None:
    """The rank on one side waits twice."""

    def body(rank: Rank) -> None:
        group = dist.new_group(timeout=SHORT)
        tensor = torch.arange(3.0, device=rank.device) * (rank.index == 0)
        work: Any = dist.isend(tensor, 1, group=group) if rank.index == 0 else dist.irecv(tensor, 0, group=group)
        work.wait()
        if (side == "isend") == (rank.index == 0):
            work.wait()
        assert tensor.tolist() == [0, 1, 2]

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-COALESCED-04",
    "After an error under a coalescing manager, a collective on the group works or raises an error.",
    source="torch.distributed: _coalescing_manager",
)
@spmd(2)
def test_after_an_error_in_a_manager(rank: Rank) -> None:
    """The body raises before it issues anything; then an all_reduce follows."""
    with pytest.raises(KeyError), coalescing_manager():
        raise KeyError("not about collectives")
    tensor = torch.ones(2, device=rank.device)
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, ValueError):
        return
    assert tensor.tolist() == [2, 2]


@requirement(
    "COLL-COALESCED-04",
    "After an error under a coalescing manager, a collective on the group works or raises an error.",
    source="torch.distributed: _coalescing_manager",
)
@spmd(2)
def test_others_after_an_error_in_a_manager(rank: Rank) -> None:
    """The body raises before it issues anything; then a broadcast, a reduce and an all_gather follow."""
    with pytest.raises(KeyError), coalescing_manager():
        raise KeyError("not about collectives")
    own = torch.full((2,), 1.0 + rank.index, device=rank.device)
    received = [torch.zeros_like(own) for _ in range(rank.size)]
    try:
        dist.all_gather(received, own)
        assert [r.tolist() for r in received] == [[1.0, 1.0], [2.0, 2.0]]
        dist.broadcast(own, 1)
        assert own.tolist() == [2.0, 2.0]
        dist.reduce(own, 0)
        assert rank.index > 0 or own.tolist() == [4.0, 4.0]
    except (RuntimeError, ValueError):
        return


SENDING = ("reduce", "gather", "broadcast", "scatter", "all_gather", "all_to_all_single", "send", "send_object_list")
"""What may return on a rank before the others have what it gave."""


@requirement(
    "COLL-ASYNC-4809",
    "Once a blocking collective or message has returned, a change to what the caller gave reaches no other rank.",
    source="torch.distributed: 'Synchronous operation - the default mode'; torch.distributed.send",
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs(features=["messages"]) if "send" in name else ()) for name in SENDING],
)
@spmd(2)
def test_changed_after_return(rank: Rank, name: str) -> None:
    """Rank 1 overwrites what it gave once its call has returned, for which rank 0 waits a moment before it calls."""
    size = 1 << 21  # more than what a connection holds
    own = torch.full((size,), rank.index + 1.0, device=rank.device)
    into = [torch.zeros(size, device=rank.device) for _ in range(2)]
    objects = ["x" * size if name == "send_object_list" else ""]

    def call() -> None:
        if name in ("reduce", "broadcast"):
            getattr(dist, name)(own, 0 if name == "reduce" else 1)
        elif name == "gather":
            dist.gather(own, into if rank.index == 0 else None, 0)
        elif name == "scatter":
            dist.scatter(into[1], [own, own] if rank.index == 1 else None, 1)
        elif name == "all_gather":
            dist.all_gather(into, own)
        elif name == "all_to_all_single":
            dist.all_to_all_single(into[1], own)
        elif name == "send":
            dist.send(own, 0) if rank.index == 1 else dist.recv(own, 1)
        else:
            dist.send_object_list(objects, 0) if rank.index == 1 else dist.recv_object_list(objects, 1)

    dist.barrier()
    if rank.index == 1:
        call()
        own.zero_()
        objects[0] = ""
        rank.store.add(f"changed after {name}", 1)
        return
    with contextlib.suppress(RuntimeError):
        rank.store.wait([f"changed after {name}"], timedelta(seconds=0.05))
    call()
    if name == "send_object_list":
        assert objects[0].count("x") == size
        return
    found = {"reduce": own, "broadcast": own, "send": own}.get(name, into[1])
    right = 3 if name == "reduce" else 2
    rows = found[size // 2 :] if name == "all_to_all_single" else found
    changed = int((rows != right).sum())
    assert changed == 0, f"{changed} of {len(rows)} elements"
