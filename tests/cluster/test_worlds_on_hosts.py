"""Worlds whose ranks are started by agents."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness import Pool, Rank, RanksFailed, World, WorldSpec
from harness.cluster.launcher import Cluster, ClusterLauncher
from tests.cluster.conftest import Agent, gone

SPREAD = WorldSpec(2, hosts=2, timeout=60)


def ended(call: Callable[[], object]) -> RanksFailed:
    """The failure of a run."""
    with pytest.raises(RanksFailed) as caught:
        call()
    return caught.value


def summed(rank: Rank) -> float:
    tensor = torch.full((3,), float(rank.index + 1))
    dist.all_reduce(tensor)
    return float(tensor[0])


def placed(rank: Rank) -> list[str]:
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")]


def test_ranks_of_two_hosts_are_one_group(pool: Pool, agents: list[Agent]) -> None:
    """Each rank is below another agent."""
    world = pool.acquire(SPREAD)
    assert world.run(summed) == [3.0, 3.0]
    above = world.run(lambda rank: ancestors(os.getpid()))
    assert [agents[i].process.pid in above[i] for i in range(2)] in ([True, True], [False, False])
    assert not set(above[0]) & set(above[1]) & {agent.process.pid for agent in agents}
    pool.release(world)


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rsplit(")", 1)[1].split()[1])
        found.append(pid)
    return found


def test_placement_is_that_of_torchrun(pool: Pool) -> None:
    """Three ranks on two hosts: two and one."""
    world = pool.acquire(WorldSpec(3, hosts=2, timeout=60))
    assert world.run(placed) == [["0", "0", "2", "0", "3"], ["1", "1", "2", "0", "3"], ["2", "0", "1", "1", "3"]]
    pool.release(world)


def test_a_world_of_one_host(pool: Pool) -> None:
    """Its ranks are together, and worlds take turns with the hosts."""
    hosts = []
    for _ in range(2):
        world = pool.acquire(WorldSpec(2, timeout=60))
        assert world.run(summed) == [3.0, 3.0]
        [one, other] = world.run(lambda rank: os.getppid())
        assert one == other
        hosts.append(one)
        pool.release(world)
    assert hosts[0] != hosts[1]


def test_results_and_large_tensors(pool: Pool) -> None:
    """Arguments and results of any size arrive as they were sent."""
    given = torch.arange(3_000_000, dtype=torch.float32)
    world = pool.acquire(SPREAD)
    results = world.run(lambda rank, x: {"rank": rank.index, "x": x + rank.index, "empty": x[:0]}, given)
    for index, result in enumerate(results):
        assert result["rank"] == index
        assert torch.equal(result["x"], given + index)
        assert result["empty"].shape == (0,)
    pool.release(world)


def test_output(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    """What ranks print is in the evidence of a failure."""

    def body(rank: Rank) -> None:
        print(f"rank {rank.index} was here")
        if rank.index == 1:
            raise ValueError("no")

    failed = ended(lambda: pool.acquire(SPREAD).run(body))
    assert [end.kind for end in failed.ends] == ["returned", "raised"]
    assert "rank 1 was here" in failed.ends[1].output
    assert "ValueError: no" in str(failed)


def test_an_exit_and_a_signal(pool: Pool) -> None:
    """How a rank ended is known, with the stack that faulthandler wrote."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.barrier()

    failed = ended(lambda: pool.acquire(SPREAD).run(body))
    assert failed.ends[1].kind == "died"
    assert "SIGSEGV" in str(failed)
    assert "body" in (failed.ends[1].stack or "")


def test_a_deadlock_is_proven(pool: Pool) -> None:
    """Two hosts wait for different collectives: proven within seconds, with the rank that differs."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))

    world = pool.acquire(SPREAD)
    began = time.monotonic()
    failed = ended(lambda: world.run(body, timeout=60))
    assert time.monotonic() - began < 20
    assert "collective 1" in str(failed) or "differs" in str(failed), failed


def test_a_rank_that_does_not_come(pool: Pool) -> None:
    """The rank that another waits for has returned."""

    def body(rank: Rank) -> None:
        if rank.index == 0:
            dist.barrier()

    failed = ended(lambda: pool.acquire(SPREAD).run(body, timeout=60))
    assert [end.kind for end in failed.ends] == ["stopped", "returned"]
    assert "rank 1, which has returned" in str(failed)


def test_a_stuck_rank_shows_its_stack(pool: Pool) -> None:
    """A rank whose monitor cannot answer is asked by a signal."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            import ctypes

            ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock

    failed = ended(lambda: pool.acquire(SPREAD).run(body, timeout=3))
    assert failed.ends[1].kind == "stopped"
    assert "body" in (failed.ends[1].stack or ""), failed


def test_a_warm_world_is_kept(pool: Pool) -> None:
    """Residue is looked for on the ranks, as on one host."""
    spec = WorldSpec(2, hosts=2, warm=True, timeout=60)
    world = pool.acquire(spec)
    pids = world.run(lambda rank: os.getpid())
    assert pool.release(world) == []
    again = pool.acquire(spec)
    assert again.run(lambda rank: os.getpid()) == pids

    def leaves(rank: Rank) -> None:
        os.environ["LEFT_BEHIND"] = "1"

    again.run(leaves)
    pool.release(again)


def test_the_controller_closes_and_all_is_gone(start: Callable[..., Agent], cluster_of: Callable[..., Cluster]) -> None:
    """When a session ends, nothing of it is left on any host, and the agents are ready for the next."""
    agents = [start(), start()]
    for _ in range(2):
        launcher = ClusterLauncher(cluster_of(*agents), private=False)
        world = World(SPREAD, lambda launcher=launcher: launcher)
        world.start()
        pids = world.pids
        assert len(set(pids)) == 2
        launcher.close()
        assert all(gone(pid) for pid in pids)
    assert all(agent.process.poll() is None for agent in agents)


def test_a_rank_that_reads_nothing(pool: Pool) -> None:
    """A stopped rank that is sent more than a socket takes keeps nobody else waiting, and is named at the timeout."""

    world = pool.acquire(WorldSpec(2, hosts=2, timeout=60))
    pids = world.run(lambda rank: os.getpid())
    os.kill(pids[1], signal.SIGSTOP)  # the agents of these tests are on this machine
    given = torch.zeros(4_000_000)
    began = time.monotonic()
    failed = ended(lambda: world.run(lambda rank, x: float(x.sum()), given, timeout=5))
    assert time.monotonic() - began < 20
    assert [end.kind for end in failed.ends] == ["returned", "stopped"]
    assert "no rank is to blame" not in failed.headline


def test_a_monitor_that_says_nothing(pool: Pool) -> None:
    """Garbage in a monitor's channel is said, and the session goes on."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            import stat

            for fd in range(3, 64):
                try:
                    if stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.write(fd, b"[" * 3000)
                except OSError:
                    continue
        time.sleep(60)

    failed = ended(lambda: pool.acquire(SPREAD).run(body, timeout=4))
    assert failed.ends[1].kind in ("garbled", "stopped")
    world = pool.acquire(SPREAD)
    assert world.run(summed) == [3.0, 3.0]
    pool.release(world)
