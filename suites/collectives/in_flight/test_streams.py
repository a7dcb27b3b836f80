"""Streams of an accelerator: collectives run after work queued before them, and before work queued after them.

In each test some stream is busy, so that a wrong order shows in the values. Whether the host waits, too, is not
promised and not tested. The promises are those of PyTorch's page on synchronous and asynchronous collectives. They are
made for CUDA, and the tests expect them of every accelerator that has streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.streams import keep_busy
from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, Case, inputs, outputs
from harness.stacks.collectives import coalescing_manager, issue, issue_in
from suites.collectives.cases import COALESCED

LARGE = (300, 7)


def given_and_found(rank: Rank, case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return the values of a rank's input, an input of zeros for them, and the output, all on the rank's device."""
    values = moved(inputs(case, rank.size, rank.index), rank.device)
    given = [torch.zeros_like(value) for value in values]
    if case.collective in IN_PLACE:
        return values, given, given
    right = outputs(case, rank.size, rank.index)
    return values, given, [torch.zeros_like(expected, device=rank.device) for expected in right]


def on(stream: str, rank: Rank) -> contextlib.AbstractContextManager[Any]:
    """Return a context: a new stream for ``side`` and ``other``, otherwise the current stream."""
    return torch.Stream(device=rank.device) if stream in ("side", "other") else contextlib.nullcontext()


def copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Queue copies on the current stream."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def assert_right(rank: Rank, case: Case, found: Sequence[torch.Tensor], what: str) -> None:
    """Assert that a rank's results, copied to the host on the current stream, are those of the collective."""
    right = outputs(case, rank.size, rank.index)
    for expected, tensor in zip(right, found, strict=False):  # reduce has a result only on its root
        assert_same(expected, tensor.cpu(), f"{case.collective}, {what}")
    torch.accelerator.synchronize()  # otherwise the next test could get memory in use


@requirement(
    "COLL-STREAM-01",
    "A collective runs after the work queued before it on the current stream, including work that this stream "
    "waits for.",
    source="torch.distributed.Work.wait",
)
@pytest.mark.parametrize("stream", ["default", "side", "handed over"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_after_what_was_queued(world: World, collective: str, stream: str) -> None:
    """The input is produced late, on the current stream or on another that the current one waits for."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=LARGE)
        values, given, results = given_and_found(rank, case)
        torch.accelerator.synchronize()
        current = torch.accelerator.current_stream()
        making = current if stream == "default" else torch.Stream(device=rank.device)
        using = current if stream == "handed over" else making
        with making:
            keep_busy(rank.device)
            copy(values, given)
        if using is not making:
            using.wait_stream(making)
        with using:
            issue(case, given, results, None).wait()
            assert_right(rank, case, results, f"on the {stream} stream")

    world.run(body)


@requirement(
    "COLL-STREAM-02",
    "Work queued after wait() on the current stream runs after the collective.",
    source="torch.distributed.Work.wait",
)
@pytest.mark.parametrize("waiting", ["same", "other"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_before_what_is_queued(world: World, collective: str, waiting: str) -> None:
    """Rank 0 is late; results are copied and inputs overwritten on the launching stream or on another."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=LARGE)
        values, given, results = given_and_found(rank, case)
        copy(values, given)
        torch.accelerator.synchronize()
        if rank.index == 0:
            keep_busy(rank.device)
        work = issue(case, given, results, None)
        with on(waiting, rank):
            work.wait()
            copies = [tensor.clone() for tensor in results]
            for tensor in given:
                tensor.fill_(5)
            assert_right(rank, case, copies, f"waited for on the {waiting} stream")
            if collective not in IN_PLACE:
                assert_right(rank, case, results, "after the inputs were overwritten")

    world.run(body)


@requirement(
    "COLL-STREAM-03",
    "The memory of an asynchronous collective's inputs is not reused before the collective is done, even if "
    "nothing references the inputs anymore.",
    source="torch.distributed.Work.wait",
)
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in IN_PLACE])
@pytest.mark.world(2)
def test_memory_is_kept(world: World, collective: str) -> None:
    """The other ranks are late; meanwhile the inputs are released and tensors of their size are allocated."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=LARGE)
        values, given, results = given_and_found(rank, case)
        copy(values, given)
        torch.accelerator.synchronize()
        for late in range(rank.size):
            if rank.index == late:
                keep_busy(rank.device)
            work = issue(case, [tensor.clone() for tensor in given], results, None)
            others = [torch.full_like(tensor, 77) for tensor in 8 * given]
            work.wait()
            assert_right(rank, case, results, f"rank {late} was late")
            assert all(bool((other == 77).all()) for other in others)

    world.run(body)


@requirement(
    "COLL-STREAM-04",
    "Callbacks of a collective's future run after the collective, and so do streams that wait for the future.",
    source="torch.distributed: Work.get_future",
)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
@pytest.mark.world(2)
def test_futures(world: World, collective: str) -> None:
    """Rank 0 is late; the callback copies the value, and another stream copies the callback's result."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=LARGE)
        values, given, results = given_and_found(rank, case)
        copy(values, given)
        torch.accelerator.synchronize()
        if rank.index == 0:
            keep_busy(rank.device)
        future: Any = issue(case, given, results, None).get_future()
        copied = future.then(lambda done: [tensor.clone() for tensor in done.value()])
        with torch.Stream(device=rank.device):
            assert_right(rank, case, [tensor.clone() for tensor in future.wait()], "the future's value")
            assert_right(rank, case, [tensor.clone() for tensor in copied.wait()], "copied in a callback")

    world.run(body)


@requirement(
    "COLL-STREAM-05",
    "Collectives of two groups issued on two streams are correct, whichever of them is late.",
    source="torch.distributed.Work.wait",
)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather_into_tensor"])
@pytest.mark.world(2)
def test_two_groups_on_two_streams(world: World, collective: str) -> None:
    """Each rank has a different busy stream. The groups are connected before, which may take longer than that."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=LARGE)
        groups = [dist.new_group(), dist.new_group()]
        for group in groups:
            dist.all_reduce(torch.zeros(1, device=rank.device), group=group)
        streams = [torch.Stream(device=rank.device) for _ in groups]
        tensors = [given_and_found(rank, case) for _ in groups]
        torch.accelerator.synchronize()
        works = []
        for number, (group, stream) in enumerate(zip(groups, streams, strict=True)):
            values, given, results = tensors[number]
            with stream:
                if rank.index == number:
                    keep_busy(rank.device)
                copy(values, given)
                works.append(issue(case, given, results, group))
        for number, stream in enumerate(streams):
            with stream:
                works[number].wait()
                assert_right(rank, case, tensors[number][2], f"group {number}")

    world.run(body)


@requirement(
    "COLL-STREAM-06",
    "A message is sent after the work queued before it on the current stream.",
    source="torch.distributed.isend, irecv, batch_isend_irecv",
)
@requirement(
    "COLL-STREAM-08",
    "Work queued on the current stream after wait() on a message runs after the message.",
    source="torch.distributed.isend, irecv, batch_isend_irecv",
)
@pytest.mark.needs(features=["messages"])
@pytest.mark.parametrize("form", ["one by one", "batch"])
@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.world(2)
def test_messages(world: World, form: str, stream: str) -> None:
    """Rank 0 sends a tensor that is produced late, then overwrites it; rank 1 copies what it received.

    A message before connects the ranks, which may take longer than a stream is busy.
    """

    def body(rank: Rank) -> None:
        values = torch.arange(2100.0, device=rank.device)
        tensor = torch.zeros_like(values)
        if rank.index == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        torch.accelerator.synchronize()
        with on(stream, rank):
            if rank.index == 0:
                keep_busy(rank.device)
                tensor.copy_(values)
            call: Any = dist.isend if rank.index == 0 else dist.irecv
            if form == "batch":
                works = dist.batch_isend_irecv([dist.P2POp(call, tensor, 1 - rank.index)])
            else:
                works = [call(tensor, 1 - rank.index)]
            for work in works:
                work.wait()
            if rank.index == 0:
                tensor.fill_(5)
            else:
                assert_same(torch.arange(2100.0), tensor.clone().cpu(), "what was received")
        torch.accelerator.synchronize()

    world.run(body)


@requirement(
    "COLL-STREAM-07",
    "Coalesced collectives run after the work queued before them on the current stream.",
    source="torch.distributed: _coalescing_manager",
)
@requirement(
    "COLL-STREAM-09",
    "Work queued on the current stream after wait() on a coalescing manager runs after its collectives.",
    source="torch.distributed: _coalescing_manager",
)
@pytest.mark.needs(features=["coalescing"])
@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("collective", COALESCED)
@pytest.mark.world(2)
def test_coalesced(world: World, collective: str, stream: str) -> None:
    """Coalesce three collectives whose inputs are produced late."""

    def body(rank: Rank) -> None:
        case = Case(collective, shape=LARGE)
        tensors = [given_and_found(rank, case) for _ in range(3)]
        torch.accelerator.synchronize()
        with on(stream, rank):
            keep_busy(rank.device)
            for values, given, _ in tensors:
                copy(values, given)
            with coalescing_manager(async_ops=True) as manager:
                for _, given, results in tensors:
                    issue_in(case, given, results, {}, range(rank.size))()
            manager.wait()
            copies = [[tensor.clone() for tensor in results] for _, _, results in tensors]
            for _, given, _ in tensors:
                for tensor in given:
                    tensor.fill_(5)
            for number, results in enumerate(copies):
                assert_right(rank, case, results, f"number {number}")

    world.run(body)
