"""Deadlocks are proven and explained; a rank that is merely slow is never called deadlocked."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness import Rank, RanksFailed, World
from harness.worlds.places import TORCH, short_path

pytestmark = [pytest.mark.usefixtures("works")]


def deadlock(world: World, body: Callable[..., object]) -> RanksFailed:
    """The failure of a run that is proven to be a deadlock, and does not end because its time is over."""
    with pytest.raises(RanksFailed, match="^deadlock: ") as caught:
        world.run(body, timeout=200)
    assert caught.value.verdict == "hung"
    return caught.value


@pytest.mark.world(2, 3)
def test_different_operations(world: World) -> None:
    """Two operations on one group at the same place: both are named, with sequence number and source line."""

    def body(rank: Rank) -> None:
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        if rank.index == 1:
            dist.broadcast(tensor, 0)
        else:
            dist.all_reduce(tensor)

    error = deadlock(world, body)
    assert "collective 2 of the default group differs" in error.headline
    assert "broadcast(float32[4])" in error.headline
    assert "all_reduce(float32[4])" in error.headline
    assert f" at {short_path(__file__)}:" in error.ends[1].standing
    if world.size == 3:
        assert error.culprits == (1,)


@pytest.mark.world(3)
def test_one_rank_returned(world: World) -> None:
    """A rank that returns while others wait is the one that is named."""

    def body(rank: Rank) -> None:
        dist.barrier()
        if rank.index != 1:
            dist.all_reduce(torch.ones(4))

    error = deadlock(world, body)
    assert error.culprits == (1,)
    assert "ranks 0, 2 wait in all_reduce(float32[4]), collective 2" in error.headline
    assert "rank 1, which has returned" in error.headline


@pytest.mark.world(2)
def test_different_groups(world: World) -> None:
    """Ranks that wait on different groups: each is said to wait for the other."""

    def body(rank: Rank) -> None:
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        dist.all_reduce(torch.ones(4), group=other if rank.index else one)

    error = deadlock(world, body)
    assert "waits in all_reduce(float32[4])" in error.headline
    assert "[0, 1]" in error.headline


@pytest.mark.world(2)
def test_different_order(world: World) -> None:
    """Two collectives on two groups in opposite order."""

    def body(rank: Rank) -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups[::-1] if rank.index else groups:
            dist.all_reduce(torch.ones(4), group=group)

    assert "waits in all_reduce" in deadlock(world, body).headline


@pytest.mark.world(2)
def test_receive_that_nobody_sends_to(world: World) -> None:
    """Point to point: both ranks receive."""

    def body(rank: Rank) -> None:
        dist.recv(torch.ones(4), 1 - rank.index)

    assert "recv" in deadlock(world, body).headline


@pytest.mark.world(2)
def test_waiting_for_asynchronous_work(world: World) -> None:
    """A wait on a work handle in the user's own code counts as waiting."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            work.wait()

    error = deadlock(world, body)
    assert error.culprits == (1,)
    assert "rank 1, which has returned" in error.headline


@pytest.mark.world(2)
def test_inside_backward(world: World) -> None:
    """A collective that C++ issued in backward: DDP on a rank whose peer does no backward."""

    def body(rank: Rank) -> None:
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        loss = module(torch.ones(2, 3)).sum()
        if rank.index == 0:
            loss.backward()

    error = deadlock(world, body)
    assert error.culprits == (1,)
    assert "all_reduce(float32[12])" in error.headline


@pytest.mark.world(2)
def test_monitored_barrier_and_store(world: World) -> None:
    """A wait in the store that only a peer can end, which has ended itself."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            dist.monitored_barrier()

    assert "monitored_barrier" in str(deadlock(world, body))


@pytest.mark.parametrize(
    "tensors",
    [(torch.ones(4), torch.ones(5)), (torch.ones(4), torch.ones(4, dtype=torch.float64))],
    ids=["shape", "dtype"],
)
@pytest.mark.world(2)
def test_different_tensors(world: World, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
    """gloo ends one rank by abort on a size mismatch; the report names the mismatch nevertheless."""

    def body(rank: Rank) -> None:
        dist.all_reduce(tensors[rank.index])

    with pytest.raises(RanksFailed, match="collective 1 of the default group differs") as caught:
        world.run(body)
    assert caught.value.verdict in ("crashed", "failed")


@pytest.mark.world(3)
def test_different_tensors_where_a_rank_died(world: World) -> None:
    """A rank takes its Flight Recorder with it when it dies: our own record has the mismatch all the same."""

    def body(rank: Rank) -> None:
        if rank.index < 2:
            dist.all_reduce(torch.ones(4 + rank.index), async_op=True)
        if rank.index == 0:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.recv(torch.ones(1), 3 - rank.index)

    with pytest.raises(RanksFailed) as caught:
        world.run(body)
    assert "rank 0 issued all_reduce(float32[4])" in caught.value.headline
    assert "rank 1 issued all_reduce(float32[5])" in caught.value.headline


# what is no deadlock


@pytest.mark.world(2, 3)
def test_late_rank_is_waited_for(world: World) -> None:
    """A rank that sleeps for longer than a proof takes and joins then is slow, not deadlocked."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            time.sleep(2)
        dist.all_reduce(torch.ones(4))

    assert world.run(body) == [None] * world.size


@pytest.mark.world(2)
def test_sleep_inside_torch_distributed_is_waited_for(world: World) -> None:
    """A rank that sleeps in code of torch.distributed, as its elastic agent does, is slow."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            scope: dict[str, Any] = {"time": time}
            code = compile("def wait(): time.sleep(2)", f"{TORCH}distributed/elastic/agent.py", "exec")
            exec(code, scope)
            scope["wait"]()
        dist.all_reduce(torch.ones(4))

    assert world.run(body) == [None, None]


@pytest.mark.world(2)
def test_computing_rank_is_waited_for(world: World) -> None:
    """A rank that computes, in Python or in one long call into C, is slow."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            until = time.monotonic() + 1
            while time.monotonic() < until:
                pass
            a = torch.ones(1500, 1500, dtype=torch.float64)
            while time.monotonic() < until + 1:
                a @ a
        dist.all_reduce(torch.ones(4))

    assert world.run(body) == [None, None]


@pytest.mark.world(2)
def test_late_thread_is_waited_for(world: World) -> None:
    """A collective that another thread of a rank will issue after a while ends the wait."""

    def body(rank: Rank) -> None:
        tensor = torch.ones(4)
        if rank.index == 1:
            later = threading.Timer(2, lambda: dist.all_reduce(tensor))
            later.start()
            dist.recv(torch.ones(1), 0)
            later.join()
        else:
            dist.all_reduce(tensor)
            dist.send(torch.ones(1), 1)

    assert world.run(body) == [None, None]


@pytest.mark.world(2)
def test_wait_with_its_own_timeout_is_left_to_it(world: World) -> None:
    """A group with a timeout shorter than the run's gives up by itself, and the program goes on."""

    def body(rank: Rank) -> str:
        from datetime import timedelta

        dist.barrier()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
        if rank.index == 0:
            with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
                dist.all_reduce(torch.ones(4), group=group)
        return "went on"

    assert world.run(body) == ["went on", "went on"]


@pytest.mark.world(2)
def test_watch_can_be_switched_off(world: World) -> None:
    """With watch=False a deadlock takes the run's own timeout."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            dist.barrier()

    with pytest.raises(RanksFailed, match="not finished after 2 s"):
        world.run(body, watch=False, timeout=2)


@pytest.mark.world(2)
def test_failure_ends_an_unwatched_run_too(world: World) -> None:
    """With watch=False as well, what waits for a rank that has failed gets some seconds, and not the whole time."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            raise ValueError("the reason")
        dist.barrier()

    with pytest.raises(RanksFailed, match="ValueError: the reason"):
        world.run(body, watch=False, timeout=100)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Add a tensor up over all ranks, and compute with the result."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) * 2


def whole(x: torch.Tensor) -> torch.Tensor:
    """Put the shards of all ranks together."""
    mesh = init_device_mesh(x.device.type, (dist.get_world_size(),))
    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False).full_tensor()


@pytest.mark.parametrize(
    ("function", "backend"),
    [(summed, ""), (whole, ""), (summed, "eager"), (summed, "aot_eager"), (summed, "inductor")],
    ids=["functional", "full_tensor", "compiled-eager", "compiled-aot_eager", "compiled-inductor"],
)
@pytest.mark.world(2)
def test_wait_of_a_result(world: World, function: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    """Ranks wait in operators that torch, a graph or generated code calls; the place is a line of the user."""

    def body(rank: Rank) -> None:
        called = torch.compile(function, backend=backend, fullgraph=True) if backend else function
        for _ in range(2 - rank.index):
            called(torch.ones(4))

    error = deadlock(world, body)
    assert error.culprits == (1,)
    assert f"collective 2 of the default group at {short_path(__file__)}:" in error.headline
    assert "rank 1, which has returned" in error.headline
