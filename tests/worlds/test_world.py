"""What a world is good for: functions, arguments, results, ranks."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from harness import Pool, Rank, RanksFailed, World, WorldSpec, spmd
from harness.worlds.local import LocalLauncher
from tests.worlds.conftest import add_up


@dataclass(frozen=True)
class Pair:
    """A class that only this test module has."""

    left: int
    right: torch.Tensor


@pytest.mark.world(1, 2, 3, 4, 5)
def test_results_are_in_rank_order(world: World) -> None:
    """N results, each its rank's."""
    assert world.run(lambda rank: (rank.index, rank.size)) == [(i, world.size) for i in range(world.size)]


@pytest.mark.world(2)
def test_closures_arguments_and_keywords(world: World) -> None:
    """A function may close over values, and take arguments by position and by name."""
    offset = 10

    def body(rank: Rank, factor: int, *, plus: int) -> int:
        return offset + rank.index * factor + plus

    assert world.run(body, 3, plus=1) == [11, 14]


@pytest.mark.world(2)
def test_tensors_travel(world: World) -> None:
    """Tensors arrive with dtype, strides, requires_grad and shared storage, and come back."""
    base = torch.arange(12.0).reshape(3, 4)
    sent = {"column": base[:, 1], "row": base[1], "half": torch.ones(3, dtype=torch.bfloat16, requires_grad=True)}

    def body(rank: Rank, got: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool, tuple[int, ...]]:
        shared = got["column"].untyped_storage().data_ptr() == got["row"].untyped_storage().data_ptr()
        return got, shared, got["column"].stride()

    for back, shared, stride in world.run(body, sent):
        assert shared
        assert stride == (4,)
        assert back["column"].tolist() == base[:, 1].tolist()
        assert back["half"].dtype == torch.bfloat16
        assert back["half"].requires_grad


@pytest.mark.world(2)
def test_large_tensors_travel(world: World) -> None:
    """64 MiB in and out."""
    big = torch.arange(8 << 20, dtype=torch.float64)
    for back in world.run(lambda rank, t: t + rank.index, big):
        assert (back[-1] - big[-1]).item() in (0.0, 1.0)


@pytest.mark.world(2)
def test_classes_of_the_test_travel_both_ways(world: World) -> None:
    """An instance of a class defined in the test module comes back as that class."""
    left = world.run(lambda rank, pair: Pair(pair.left + rank.index, pair.right), Pair(1, torch.ones(2)))
    assert [pair.left for pair in left] == [1, 2]
    assert isinstance(left[0], Pair)


@pytest.mark.world(2)
def test_state_stays_between_runs(world: World) -> None:
    """Runs on one world are in the same processes."""
    first = world.run(lambda rank: os.getpid())
    assert world.run(lambda rank: os.getpid()) == first == world.pids


@pytest.mark.world(2, env={"SET_BY_THE_MARK": "yes"})
def test_environment(world: World) -> None:
    """Ranks have the mark's environment and what torchrun would set."""

    def body(rank: Rank) -> tuple[str, ...]:
        return tuple(os.environ[k] for k in ("SET_BY_THE_MARK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"))

    assert world.run(body) == [("yes", str(i), str(i), "2", "127.0.0.1") for i in range(2)]


def test_callers_environment_reaches_fresh_ranks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the controller's environment is when a world starts, its ranks have."""
    monkeypatch.setenv("SET_BY_THE_CALLER", "late")
    world = pool.acquire(WorldSpec(1))
    assert world.run(lambda rank: os.environ["SET_BY_THE_CALLER"]) == ["late"]
    pool.release(world)


@spmd(4)
def test_meshes_and_subgroups(rank: Rank) -> None:
    """A rank makes meshes over the world, and subgroups that it may not be a member of."""
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    assert mesh["tp"].get_group().size() == 2
    assert rank.mesh(2, 2, names=("dp", "tp")) is mesh
    assert rank.mesh().size() == 4
    group = rank.subgroup([1, 3])
    assert (group is None) == (rank.index in (0, 2))
    if group is not None:
        tensor = torch.tensor([rank.index])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 4
    assert rank.group.size() == 4
    assert rank.device == torch.device("cpu")


@spmd(2)
def test_ranks_are_seeded_alike(rank: Rank) -> None:
    """Random numbers are the same on all ranks and in every world."""
    drawn = [torch.initial_seed(), torch.rand(1).item()]
    seen: list[object] = [None] * rank.size
    dist.all_gather_object(seen, drawn)
    assert seen == [[0, 0.49625658988952637]] * rank.size


def test_nothing_to_compare_with(pool: Pool) -> None:
    """Ranks of a world that no other test uses record no state, and say so where they are asked."""
    world = pool.acquire(WorldSpec(1, "gloo"))
    world.start()
    with pytest.raises(ValueError, match="only ranks of a warm world"):
        world.check()
    pool.release(world)


@pytest.mark.world(2)
@given(numbers=st.lists(st.integers(-5, 5), min_size=1, max_size=4))
def test_one_draw_for_all_ranks(world: World, numbers: list[int]) -> None:
    """Hypothesis draws once; every rank sees the same example, in one world for all of them."""
    assert world.run(lambda rank, given: given, numbers) == [numbers] * 2
    assert world.started == 1


def test_used_port_is_no_obstacle(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world's port is one that the kernel has just given it, whatever MASTER_PORT says and whoever has that."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        world = pool.acquire(WorldSpec(2))
        assert world.run(add_up) == [3.0, 3.0]
        pool.release(world)


def test_used_port_in_the_users_own_rendezvous(pool: Pool) -> None:
    """A rank that wants a port that is taken fails with its own error; the other, which waits for it, is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def body(rank: Rank) -> None:
            dist.TCPStore("127.0.0.1", port, 2, is_master=rank.index == 0)

        world = pool.acquire(WorldSpec(2, network="host"))
        with pytest.raises(RanksFailed) as caught:
            world.run(body)
        assert caught.value.culprits == (0,)
        assert "EADDRINUSE" in str(caught.value)


def test_start_that_fails_is_told(pool: Pool) -> None:
    """A world whose ranks can't join says which and why."""
    with pytest.raises(RanksFailed, match="joining the process group") as caught:
        pool.acquire(WorldSpec(2, backend="no_such_backend"))
    assert "no_such_backend" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "at least 1 rank"),
        ({"size": True}, "at least 1 rank"),
        ({"size": 2, "timeout": 0}, "seconds above 0"),
        ({"size": 2, "env": (("A", 1),)}, "must be strings"),
    ],
)
def test_bad_specification(options: dict[str, object], message: str) -> None:
    """A world that can't be is refused with one sentence."""
    with pytest.raises((ValueError, TypeError), match=message):
        WorldSpec(**options)  # type: ignore[arg-type]


@pytest.mark.world(1)
def test_not_a_function(world: World) -> None:
    """What can't be called is refused before it travels."""
    with pytest.raises(TypeError, match="needs a function that takes a rank"):
        world.run("all_reduce")  # type: ignore[arg-type]
    world.run(lambda rank: None)


@pytest.mark.world(2)
def test_world_on_its_own_ranks(world: World) -> None:
    """A function that uses its world on a rank is refused before it travels, with what to do instead."""
    with pytest.raises(TypeError, match="can't be used on its ranks; call world.run from the test itself"):
        world.run(lambda rank: world.run(add_up))
    world.run(lambda rank: None)


def test_world_started_ahead_is_used(pool: Pool) -> None:
    """A world that was begun ahead of its use is the one that is handed out."""
    spec = WorldSpec(2)
    pool.begin(spec)
    begun = pool._begun[spec, ()][0]
    world = pool.acquire(spec)
    assert world is begun
    assert world.run(add_up) == [3.0, 3.0]
    pool.release(world)


def test_world_started_ahead_in_other_surroundings_is_not(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were started before the environment changed are not handed out."""
    spec = WorldSpec(1)
    pool.begin(spec)
    monkeypatch.setenv("SET_BY_THE_CALLER", "later still")
    world = pool.acquire(spec)
    assert world.run(lambda rank: os.environ["SET_BY_THE_CALLER"]) == ["later still"]
    pool.release(world)


def test_world_started_ahead_for_nothing_is_dropped(pool: Pool) -> None:
    """A world that nobody came for does not stay when another is asked for."""
    pool.begin(WorldSpec(3))
    world = pool.acquire(WorldSpec(1))
    assert pool._begun == {}
    pool.release(world)


def test_variables_that_the_caller_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has gone from the controller's environment since the server started is not in ranks either."""
    monkeypatch.setenv("GONE_FROM_THE_CALLER", "here")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    own = Pool(launcher=lambda **how: LocalLauncher(["torch"], **how))
    try:
        own.launcher()
        monkeypatch.delenv("GONE_FROM_THE_CALLER")
        monkeypatch.delenv("OMP_NUM_THREADS")
        world = own.acquire(WorldSpec(1))
        found = world.run(lambda rank: [os.environ.get(k) for k in ("GONE_FROM_THE_CALLER", "OMP_NUM_THREADS")])
        assert found == [[None, "1"]]
        own.release(world)
    finally:
        own.close()


def test_debug_level_of_torch(pool: Pool) -> None:
    """torch reads TORCH_DISTRIBUTED_DEBUG when it is imported; a world that sets it has it all the same."""
    world = pool.acquire(WorldSpec(2, env=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)))
    assert world.run(lambda rank: dist.get_debug_level().name) == ["DETAIL"] * 2  # type: ignore[attr-defined]
    assert world.run(add_up) == [3.0, 3.0]
    pool.release(world)


def test_world_outlives_the_thread_that_made_it() -> None:
    """The kernel's signal for a parent's death comes when its thread ends; the server knows the difference."""
    own = Pool(launcher=lambda **how: LocalLauncher(["torch"], **how))
    made: list[World] = []
    try:
        thread = threading.Thread(target=lambda: made.append(own.acquire(WorldSpec(2))))
        thread.start()
        thread.join()
        assert made[0].run(add_up) == [3.0, 3.0]
        own.release(made[0])
    finally:
        own.close()


def test_import_path_with_what_is_no_string(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path object in sys.path, which Python passes over, is no obstacle."""
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/somewhere")])
    own = Pool(launcher=lambda **how: LocalLauncher(["torch"], **how))
    try:
        world = own.acquire(WorldSpec(1))
        assert world.run(lambda rank: "/somewhere" in map(str, sys.path)) == [False]
        own.release(world)
    finally:
        own.close()


def test_working_directory_that_is_gone(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a fresh world nor a look at a warm one depends on it."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    warm = pool.acquire(WorldSpec(1, warm=True))
    folder.rmdir()
    fresh = pool.acquire(WorldSpec(1))
    assert fresh.run(add_up) == [1.0]
    pool.release(fresh)
    assert pool.release(warm) == ["rank 0 has no working directory any more"]


def test_more_than_a_thousand_open_files() -> None:
    """A process whose descriptors have high numbers starts ranks, and notices their ends, as any other."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 3000:
        pytest.skip(f"a process may have {limits[1]} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    pool = Pool(launcher=partial(LocalLauncher, ["torch"]))
    try:
        world = pool.acquire(WorldSpec(2))
        assert min(rank.control.fileno() for rank in world._processes) > 1023  # type: ignore[attr-defined]
        assert world.run(lambda rank: rank.index) == [0, 1]
        with pytest.raises(RanksFailed, match="rank 1 of 2 failed first"):
            world.run(lambda rank: os._exit(3) if rank.index else None)
    finally:
        pool.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
