"""barrier and monitored_barrier: they must block."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement, spmd


def arrivals(rank: Rank, barrier: str, rounds: int = 5) -> list[int]:
    """Record an arrival, pass a barrier and count the recorded arrivals, in several rounds; return the counts."""
    store = dist.PrefixStore(f"arrivals-{barrier}", rank.store)
    seen = []
    for _ in range(rounds):
        store.add("arrived", 1)
        work = dist.barrier(async_op=True) if barrier == "async" else getattr(dist, barrier)()
        if work is not None:
            work.wait()
        seen.append(store.add("arrived", 0))
        store.add("counted", 1)
        one = torch.ones(1, device=rank.device)
        dist.all_reduce(one)
        one.item()  # on an accelerator only this waits
    return seen


@requirement(
    "COLL-BARRIER-01",
    "No rank leaves a barrier before all ranks have entered it.",
    source="torch.distributed.barrier, monitored_barrier",
)
@pytest.mark.parametrize(
    "barrier",
    ["barrier", "async", pytest.param("monitored_barrier", marks=pytest.mark.needs(features=["monitored_barrier"]))],
)
@pytest.mark.world(1, 2, 3, 4)
def test_nobody_leaves_early(world: World, barrier: str) -> None:
    """Each rank records its arrival in the store before the barrier and counts arrivals after it; five rounds."""
    assert_on_ranks([[world.size * (i + 1) for i in range(5)]] * world.size, world.run(arrivals, barrier))


@requirement(
    "COLL-BARRIER-02",
    "A barrier blocks as long as a rank is missing.",
    source="torch.distributed.barrier",
)
@spmd(2, 3)
def test_waits_for_the_last(rank: Rank) -> None:
    """Rank 0 enters only after it has seen that the others are still waiting."""
    store = dist.PrefixStore("late", rank.store)
    if rank.index > 0:
        work = dist.barrier(async_op=True)
        done = work.is_completed()
        store.set(f"waiting-{rank.index}", "done" if done else "waiting")
        work.wait()
        return
    for peer in range(1, rank.size):
        assert store.get(f"waiting-{peer}") == b"waiting"
    dist.barrier()


@requirement(
    "COLL-BARRIER-03",
    "monitored_barrier raises an error on rank 0 that names the first missing rank.",
    source="torch.distributed.monitored_barrier",
)
@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.world(3)
def test_missing_rank_is_named(world: World, missing: int) -> None:
    """One rank never enters."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            with pytest.raises(RuntimeError, match=rf"\bRank {missing} failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.3))

        elif rank.index != missing:
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=2))
            except RuntimeError:
                pass  # rank 0 gave up before it was this rank's turn

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-BARRIER-04",
    "With wait_all_ranks=True, monitored_barrier names every missing rank.",
    source="torch.distributed.monitored_barrier: wait_all_ranks",
)
@pytest.mark.world(3)
def test_all_missing_ranks_are_named(world: World) -> None:
    """Only rank 0 enters."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-BARRIER-05",
    "A barrier of a subgroup waits for the members of the subgroup only.",
    source="torch.distributed.barrier",
)
@spmd(3)
def test_subgroup(rank: Rank) -> None:
    """Rank 0 stays away until the others have left the barrier."""
    store = dist.PrefixStore("subgroup", rank.store)
    group = dist.new_group([1, 2])
    if rank.index > 0:
        dist.barrier(group)
        store.set(f"through-{rank.index}", "")
    else:
        store.wait(["through-1", "through-2"])


@requirement(
    "COLL-BARRIER-09",
    "The timeout of monitored_barrier is a duration, or a fractional number of seconds, and None means the default.",
    source="torch.distributed.monitored_barrier: timeout, 'assuming it represents seconds'",
)
@pytest.mark.needs(features=["monitored_barrier"])
@pytest.mark.world(2)
def test_units_of_a_monitored_timeout(world: World) -> None:
    """Rank 1 comes a moment late, which only a timeout in another unit would not allow, and then not at all."""
    enough: list[Any] = [None, 20.0, timedelta(seconds=20)]
    short: list[Any] = [0.3, timedelta(seconds=0.3)]

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")  # numbers are deprecated
        for timeout in enough:
            dist.barrier()
            if rank.index == 1:
                time.sleep(0.1)
            dist.monitored_barrier(timeout=timeout)
        for number, timeout in enumerate(short):
            group = dist.new_group()
            if rank.index == 1:
                rank.store.wait([f"expired {number}"])
                continue
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="Rank 1 failed"):
                dist.monitored_barrier(group, timeout=timeout)
            assert 0.27 <= time.monotonic() - began < 5, timeout
            rank.store.set(f"expired {number}", "")
        wrong: Any
        for wrong in (20, "20"):
            with pytest.raises(TypeError, match="timedelta"):
                dist.monitored_barrier(timeout=wrong)

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-BARRIER-09",
    "The timeout of monitored_barrier is a duration, or a fractional number of seconds, and None means the default.",
    source="torch.distributed.monitored_barrier: timeout, 'assuming it represents seconds'",
)
@pytest.mark.needs(features=["monitored_barrier"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "of-the-group"])
@pytest.mark.world(2)
def test_monitored_timeout_of_a_group(world: World, given: bool) -> None:
    """Rank 1 is too late for the timeout of the barrier, or for that of a group whose barrier is given none."""
    short = timedelta(seconds=0.2)

    def body(rank: Rank) -> None:
        group = dist.new_group(timeout=timedelta(seconds=20) if given else short)
        if rank.index == 1:
            with suppress(RuntimeError):  # it comes in the end, so that nobody waits for long
                rank.store.wait(["expired"], 3 * short)
            with suppress(RuntimeError):
                dist.monitored_barrier(group, 5 * short)
            return
        with pytest.raises(RuntimeError, match="Rank 1 failed"):
            dist.monitored_barrier(group, short if given else None)
        rank.store.set("expired", "")

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-BARRIER-10",
    "If monitored_barrier fails on rank 0, whose timeout may be zero, no other rank passes it.",
    source="torch.distributed.monitored_barrier; distributed_test.py: test_monitored_barrier_gloo, "
    "test_monitored_barrier_gloo_rank_0_timeout, test_monitored_barrier_failure_order",
)
@pytest.mark.needs(features=["monitored_barrier"])
@pytest.mark.world(3)
def test_nobody_passes_a_failed_barrier(world: World) -> None:
    """Each rank but the first is missing once, with wait_all_ranks and without, in groups that had worked before."""

    def body(rank: Rank) -> None:
        ways = [(missing, every) for missing in (1, 2) for every in (False, True)]
        groups = [dist.new_group() for _ in ways]
        for (_, every), group in zip(ways, groups, strict=True):
            dist.monitored_barrier(group, timedelta(seconds=20), wait_all_ranks=every)
        alone = dist.new_group()

        def fails(way: tuple[int, bool], group: Any) -> None:
            missing, every = way
            if rank.index == missing:
                return
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=rf"\b{missing} failed" if rank.index == 0 else "rank 0"):
                dist.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=every)
            assert time.monotonic() - began < 5, f"{way}"

        with ThreadPoolExecutor(len(ways)) as pool:
            for _ in pool.map(fails, ways, groups):
                pass
        if rank.index == 0:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="failed to pass"):
                dist.monitored_barrier(alone, timedelta(0))
            assert time.monotonic() - began < 5
            rank.store.set("all tried", "")
        rank.store.wait(["all tried"])

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-BARRIER-11",
    "A barrier ends only when collectives of the group that were issued before it are done, though nobody waits for "
    "them.",
    source="torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: AsyncBarrierWork; test_c10d_gloo.py: "
    "test_barrier_implies_wait; test_c10d_ops_nccl.py: test_barrier",
)
@pytest.mark.needs(features=["async", "subgroups"])
@spmd(2)
def test_earlier_collectives(rank: Rank) -> None:
    """Issue sixteen collectives of a megabyte and forget their works; then a barrier of each form, in each group."""
    for group in (None, dist.new_group()):
        for asynchronous in (False, True):
            tensors = [torch.full((1 << 18,), float(number), device=rank.device) for number in range(16)]
            for number, tensor in enumerate(tensors):
                if number % 2:
                    dist.broadcast(tensor.mul_(rank.index + 1), 1, group, async_op=True)
                else:
                    dist.all_reduce(tensor, group=group, async_op=True)
            work = dist.barrier(group, async_op=asynchronous)
            if work is not None:
                work.wait()
            found = [(tensor.min().item(), tensor.max().item()) for tensor in tensors]
            assert found == [(2.0 * number, 2.0 * number) for number in range(16)]
