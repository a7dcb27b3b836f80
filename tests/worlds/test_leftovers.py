"""What a test leaves in its ranks is ended or reported; a warm world is only used again if it is clean."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from harness import Pool, Rank, RanksFailed, World, WorldSpec
from harness.stacks.limit import runs_with
from tests.worlds.conftest import add_up, all_gone

SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.mark.world(2)
def test_children_of_ranks_end_with_them(world: World) -> None:
    """A process that a rank started and left, in a session of its own too, is gone when the world is."""

    def body(rank: Rank) -> list[int]:
        plain = subprocess.Popen(SLEEPER)
        apart = subprocess.Popen(SLEEPER, start_new_session=True)
        orphan = subprocess.check_output(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], text=True)
        return [plain.pid, apart.pid, int(orphan)]

    pids = [pid for found in world.run(body) for pid in found]
    world.close()
    assert all_gone(pids)


@pytest.mark.world(2)
def test_forked_child_does_not_keep_a_dead_rank_alive(world: World) -> None:
    """A rank whose forked child holds all its descriptors is known to be dead all the same."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            if os.fork() == 0:
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RanksFailed, match="rank 1 of 2 failed first: killed by SIGKILL"):
        world.run(body)


@pytest.mark.world(2)
def test_threads_do_not_keep_a_rank_alive(world: World) -> None:
    """A thread that never ends, daemon or not, does not delay a rank's end."""

    def body(rank: Rank) -> None:
        threading.Thread(target=threading.Event().wait).start()

    world.run(body)
    pids = world.pids
    world.close()
    assert all_gone(pids)


@pytest.mark.world(2)
def test_a_great_deal_of_output(world: World) -> None:
    """100 MB of output neither blocks the rank nor fills the controller: the first and the last of it are kept."""

    def body(rank: Rank) -> None:
        line = b"x" * 99 + b"\n"
        os.write(1, b"the beginning\n")
        for _ in range(1000):
            data = line * 1000
            while data:
                data = data[os.write(1, data) :]
        os.write(1, b"the end\n")
        dist.barrier()  # once one rank has failed, the others get little time
        raise RuntimeError("done")

    with pytest.raises(RanksFailed) as caught:
        world.run(body, timeout=200)
    output = caught.value.ends[1].output
    assert output.startswith("the beginning\n")
    assert output.endswith("the end\n")
    assert "bytes left out" in output
    assert len(output) < 1_000_000


def nccl_segment() -> tuple[str, mmap.mmap]:
    """Make and map a file as NCCL does; returns its path and the mapping, which lasts as long as somebody has it."""
    fd, path = tempfile.mkstemp(prefix="nccl-", dir="/dev/shm")
    os.ftruncate(fd, 4096)
    try:
        return path, mmap.mmap(fd, 4096)
    finally:
        os.close(fd)


def fails(rank: Rank) -> None:
    """Fail on rank 0, while the others wait for it."""
    if rank.index == 0:
        raise RuntimeError("the test's")
    dist.barrier()


def dies(rank: Rank) -> None:
    """Kill rank 0, while the others wait for it."""
    if rank.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.world(2)
@pytest.mark.parametrize("end", [fails, dies])
def test_segments_of_killed_ranks(world: World, end: Callable[[Rank], None]) -> None:
    """Files of NCCL that killed ranks had mapped are removed, also if a rank died itself; those of others stay."""

    def body(rank: Rank) -> str:
        """Rank 0 makes a file, and both ranks keep it mapped, as the two ends of a connection do."""
        made = nccl_segment() if rank.index == 0 else None
        told = [made[0] if made else ""]
        dist.broadcast_object_list(told)
        with open(told[0], "r+b") as file:
            torch.kept = mmap.mmap(file.fileno(), 4096), made  # type: ignore[attr-defined]  # as long as the rank lives
        return told[0]

    paths = []
    mine, mapping = nccl_segment()
    try:
        with tempfile.NamedTemporaryFile(prefix="nccl-", dir="/dev/shm") as unmapped:
            paths = world.run(body)
            there = Path(paths[0]).exists()
            with pytest.raises(RanksFailed):
                world.run(end)
            assert (there, Path(paths[0]).exists()) == (True, False)
            assert (Path(mine).exists(), Path(unmapped.name).exists()) == (True, True)
    finally:
        mapping.close()
        for path in [mine, *paths]:
            Path(path).unlink(missing_ok=True)


def start_again() -> None:
    """Replace the default group by an equal one."""
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)


def time_out() -> None:
    """Wait for a rank that does not come, after which gloo closes the connections of the default group."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=0.1))


LEFT = {
    "connections": time_out,
    "default group": start_again,
    "thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True, name="forgotten").start(),
    "process": lambda: subprocess.Popen(SLEEPER),
    "mesh": lambda: setattr(dist, "left_mesh", init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))),
    "descriptor": lambda: os.dup(0),
    "collective": lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) is None,
}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("thread", "thread 'forgotten'"),
        ("process", "child process"),
        ("mesh", "process groups"),
        ("default group", "another default process group"),
        ("descriptor", "open file descriptors more"),
        ("collective", "1 functional collectives that nothing has waited for"),
        ("connections", "a default process group that fails"),
    ],
)
def test_unclean_warm_world_is_retired(kind: str, sentence: str, pool: Pool) -> None:
    """A warm world in which a test left something is not used again, and the rank and the thing are named."""
    leave = LEFT[kind]
    spec = WorldSpec(2, warm=True)
    world = pool.acquire(spec)
    world.run(lambda rank: leave() and None)
    pids = world.pids
    left = pool.release(world)
    assert [s for s in left if s.startswith("rank 1 has") and sentence in s]
    assert pool.acquire(spec).pids != pids
    assert all_gone(pids)


def test_clean_warm_world_is_kept(pool: Pool) -> None:
    """A warm world that was left as it was found serves the next test, with its state put back."""
    spec = WorldSpec(2, warm=True)
    world = pool.acquire(spec)
    pids = world.pids

    def body(rank: Rank) -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True)
        torch.backends.cudnn.benchmark = True
        torch.backends.mkldnn.deterministic = True
        torch.manual_seed(99)
        os.environ["LEFT"] = "1"
        os.chdir("/")

    def look(rank: Rank) -> tuple[object, ...]:
        drawn = torch.rand(1).item()
        of_torch = (
            dist.get_debug_level(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_anomaly_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.mkldnn.deterministic,
        )
        return *of_torch, "LEFT" in os.environ, os.getcwd(), drawn

    before = world.run(look)
    world.run(body)
    assert pool.release(world) == []
    again = pool.acquire(spec)
    assert again.pids == pids
    assert again.run(look) == before
    assert again.run(add_up) == [3.0, 3.0]


def test_groups_that_are_left_go(pool: Pool) -> None:
    """Process groups that a test left are destroyed, of other numbers on other ranks, too; the next groups work."""
    spec = WorldSpec(3, warm=True)

    def body(rank: Rank) -> tuple[str, list[float]]:
        pair = dist.new_group([0, 2])  # of which rank 1 has nothing
        everyone = dist.new_group([0, 1, 2])
        for _ in range(rank.index):  # local ones, which only their members count
            dist.new_group([rank.index], use_local_synchronization=True)
        sums = []
        for group in (everyone, pair):
            tensor = torch.ones(2)
            if rank.index in dist.get_process_group_ranks(group):
                dist.all_reduce(tensor, group=group)
            sums.append(tensor[0].item())
        return everyone.group_name, sums

    names, pids = [], []
    for _ in range(3):
        world = pool.acquire(spec)
        pids.append(world.pids)
        found = world.run(body)
        assert [sums for _, sums in found] == [[3.0, 2.0], [3.0, 1.0], [3.0, 2.0]]
        names.append(found[0][0])
        assert pool.release(world) == []
    world = pool.acquire(spec)
    world.run(lambda rank: dist.new_group([0, 2]) and None)  # on rank 1, nothing is left
    assert pool.release(world) == []
    assert [sums for _, sums in pool.acquire(spec).run(body)] == [[3.0, 2.0], [3.0, 1.0], [3.0, 2.0]]
    assert pids == [pids[0]] * 3
    assert len(set(names)) == 3


KEEPS_MESHES = runs_with("<2.13")
"""It does not count down references to what operators are called with: gloo's groups of a mesh stay, with sockets."""


def test_meshes_that_are_left_go(pool: Pool) -> None:
    """Groups of meshes are destroyed, and what torch remembers of DTensors on an equal mesh goes with them."""
    spec = WorldSpec(4, warm=True)

    def body(rank: Rank) -> tuple[list[float], list[float], str]:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        a, b = (torch.arange(16.0).reshape(4, 4) + i for i in range(2))
        left = distribute_tensor(a.requires_grad_(), mesh["tp"], [Shard(1)])
        (left @ distribute_tensor(b, mesh["tp"], [Shard(0)])).sum().full_tensor().backward()
        shards = distribute_tensor(b, mesh, [Shard(0), Shard(1)])
        whole = (shards.redistribute(placements=[Shard(1), Shard(0)]) * 2).full_tensor()
        grad = left.grad
        assert grad is not None
        return grad.full_tensor()[0].tolist(), whole[0].tolist(), mesh["tp"].get_group().group_name

    names, pids = set(), []
    for _ in range(3):
        world = pool.acquire(spec)
        pids.append(world.pids)
        grad, doubled, name = world.run(body)[0]
        assert (grad, doubled) == ([10.0, 26.0, 42.0, 58.0], [2.0, 4.0, 6.0, 8.0])
        names.add(name)
        left = pool.release(world)
        assert all("open file descriptors" in sentence for sentence in left)
        assert bool(left) == KEEPS_MESHES
    if not KEEPS_MESHES:
        assert pids == [pids[0]] * 3
        assert len(names) == 3


LAZILY = (("TORCH_GLOO_LAZY_INIT", "1"),)
"""As accelerators' communicators do, gloo then connects two ranks at the first collective that needs it."""


@pytest.mark.parametrize("size", [2, 4])
def test_world_that_connects_lazily_is_kept(pool: Pool, size: int) -> None:
    """Ranks of a warm world are connected before the first test, so that connections are not taken for residue."""
    spec = WorldSpec(size, warm=True, env=LAZILY)
    world = pool.acquire(spec)
    pids = world.pids

    def every_way(rank: Rank) -> None:
        tensor = torch.ones(rank.size)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, rank.size - 1)
        dist.all_to_all_single(torch.empty(rank.size), tensor)
        dist.send(tensor, (rank.index + 1) % rank.size) if rank.index % 2 else dist.recv(tensor)

    for _ in range(2):
        world.run(every_way)
        assert pool.release(world) == []
        world = pool.acquire(spec)
        assert world.pids == pids


def test_dead_rank_of_a_warm_world_is_noticed(pool: Pool) -> None:
    """A warm world with a dead rank is retired."""
    world = pool.acquire(WorldSpec(2, warm=True))
    os.kill(world.pids[0], signal.SIGKILL)
    assert any("SIGKILL" in sentence for sentence in pool.release(world))


def test_pool_keeps_no_more_than_it_may(pool: Pool) -> None:
    """Warm worlds beyond the pool's limit are closed, the oldest first."""
    small = Pool(most_warm=1)
    try:
        first, second = small.acquire(WorldSpec(1, warm=True)), small.acquire(WorldSpec(2, warm=True))
        pids = first.pids
        small.release(first)
        small.release(second)
        assert all_gone(pids)
        assert second.live
    finally:
        small.close()


def test_server_that_dies_is_replaced(pool: Pool) -> None:
    """When the server is killed its ranks go with it, the failure says so, and the next world has a new one."""
    world = pool.acquire(WorldSpec(2))
    pids = world.pids
    server = pool.launcher().server_pid  # type: ignore[attr-defined]
    os.kill(server, signal.SIGKILL)
    assert all_gone([*pids, server])
    with pytest.raises(RanksFailed, match="SIGKILL"):
        world.run(add_up)
    again = pool.acquire(WorldSpec(2))
    assert again.run(add_up) == [3.0, 3.0]
    pool.release(again)


def test_nothing_is_left_on_disk(pool: Pool) -> None:
    """A world uses no file: what it needs has no name in any file system."""
    world = pool.acquire(WorldSpec(2))

    def files(rank: Rank) -> list[str]:
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
        return [link for link in links if link.startswith("/") and not link.startswith(("/dev/", "/memfd:", "/proc/"))]

    assert world.run(files) == [[], []]
    pool.release(world)


@pytest.mark.world(1)
def test_a_great_many_processes(world: World) -> None:
    """However many a rank leaves, its end is told, and they are gone."""

    def body(rank: Rank) -> list[int]:
        command = ["tail", "-f", "/dev/null", "\u00e9" * 110]
        return [subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True).pid for _ in range(120)]

    (pids,) = world.run(body)
    world.close()
    assert all_gone(pids)
