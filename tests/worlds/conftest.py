"""What every test here must leave behind: nothing."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Pool, Rank, World, WorldSpec
from harness.worlds.local import LocalLauncher


def _files() -> set[str]:
    """Shared memory, and what we would leave among temporary files."""
    names = os.listdir(tempfile.gettempdir())
    # Those of another worker's tests: audits, what agents execute, databases.
    others = ("concord-leases", "concord-audit", "concord-errand", "PostgreSQL.")
    ours = {n for n in names if n.startswith("concord") and not n.startswith(others)}
    return {*(n for n in os.listdir("/dev/shm") if not n.startswith(others)), *ours}


def _no_more_than(files: set[str], within: float = 10.0) -> bool:
    """Whether no file is left.  Others use these folders too, for a moment: what stays is what was left."""
    deadline = time.monotonic() + within
    while _files() - files and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _files() - files


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children(pid: int) -> list[int]:
    """A process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody has collected yet has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def all_gone(pids: list[int], within: float = 60.0) -> bool:
    """Whether processes have ended, or do within some seconds."""
    deadline = time.monotonic() + within
    while not all(gone(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="session", autouse=True)
def _started_as_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--rank-start``, worlds and launchers that tests make by hand start their ranks in that way, too."""
    start = request.config.getoption("rank_start")
    with pytest.MonkeyPatch.context() as patch:
        if start:
            for kind, method in ((WorldSpec, "__init__"), (LocalLauncher, "__init__"), (Pool, "launcher")):
                patch.setattr(kind, method, functools.partialmethod(getattr(kind, method), start=start))
        yield


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test no rank, nothing that a rank started, no file and no descriptor is left."""
    plugin = request.config.pluginmanager.get_plugin("concord-worlds")
    if "world" not in request.fixturenames:
        yield
        return
    launcher = plugin.pool.launcher()
    launcher.wait_ready()
    files, descriptors = _files(), _descriptors()
    yield
    plugin.pool.forget_begun()
    assert all_gone(children(launcher.server_pid)), "processes were left"
    assert _no_more_than(files), f"files were left: {_files() - files}"
    assert _descriptors() <= descriptors


@pytest.fixture
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """The session's own pool, for a test that takes worlds from it by hand.  What it does not return is ended."""
    plugin = request.config.pluginmanager.get_plugin("concord-worlds")
    acquire, taken = plugin.pool.acquire, []

    def acquire_and_remember(*args: Any, **named: Any) -> World:
        world: World = acquire(*args, **named)
        taken.append(world)
        return world

    monkeypatch.setattr(plugin.pool, "acquire", acquire_and_remember)
    yield plugin.pool
    monkeypatch.undo()
    for world in [*taken, *plugin.pool._warm.values()]:
        world.kill()
    plugin.pool._warm.clear()


def add_up(rank: Rank) -> float:
    """A function that needs every rank: the sum of 1 + index over the world."""
    tensor = torch.tensor([1.0 + rank.index])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.fixture
def works(world: World) -> Iterator[None]:
    """After what the test did to its world, the next run on it is as good as ever."""
    yield
    expected = world.size * (world.size + 1) / 2
    assert world.run(add_up) == [expected] * world.size
