"""What agents add to the start of a world, and to a run, beside the local launcher and beside torchrun.

Run with ``pytest tests/bench/test_hosts.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import Pool, WorldSpec
from harness.cluster import credentials
from harness.cluster.launcher import Cluster
from tests.bench.worlds import Fresh, all_reduce, seconds_of
from tests.cluster.conftest import pool_of, running

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_agents(asked_for: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool of worlds on two agents of this machine."""
    path = tmp_path_factory.mktemp("key") / "key.pem"
    credentials.write(path, credentials.made())
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(running(path, env={"CONCORD_PRELOAD": ""})) for _ in range(2)]
        cluster = Cluster(tuple(agent.address for agent in agents), credentials.read(path))
        yield stack.enter_context(pool_of(cluster))


@pytest.fixture(scope="module")
def here(asked_for: None) -> Iterator[Pool]:
    """A pool of worlds on this host."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("size", [2, 4])
def test_fresh_world(size: int, compare: Callable[..., Any], on_agents: Pool, here: Pool) -> None:
    """Start to ready on two agents, beside the local launcher."""
    fresh = Fresh(on_agents, WorldSpec(size, hosts=2))
    compare(
        f"fresh world of {size} on two agents",
        fresh.start,
        Fresh(here, WorldSpec(size, network="host")).seconds,
        against="the local launcher",
        wanted="1.5 at most",
        rounds=40,
        after=fresh.end,
    )


class Told:
    """Ranks that torchrun started, and that a socket tells when to all-reduce."""

    def __init__(self, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={size}"
            command = [sys.executable, *torchrun.split(), str(HERE / "told.py"), str(server.getsockname()[1])]
            self._process = subprocess.Popen(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
            server.settimeout(60)
            self._ranks = [server.accept()[0] for _ in range(size)]
        for rank in self._ranks:
            rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self) -> float:
        began = time.perf_counter()
        for rank in self._ranks:
            rank.sendall(b"g")
        for rank in self._ranks:
            assert rank.recv(1) == b"d"
        return time.perf_counter() - began

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._process.wait(60)


@pytest.mark.parametrize("size", [2, 4])
def test_run(size: int, compare: Callable[..., Any], on_agents: Pool) -> None:
    """A run with one all-reduce in a live world on two agents, beside ranks of torchrun and a bare socket."""
    told = Told(size)
    world = on_agents.acquire(WorldSpec(size, hosts=2))
    try:
        compare(
            f"run with one all-reduce, {size} ranks on two agents",
            lambda: world.run(all_reduce),
            told,
            against="torchrun and a bare socket",
            wanted="1.5 at most",
            rounds=200,
        )
    finally:
        on_agents.release(world)
        told.close()


@pytest.mark.parametrize("size", [2, 4])
def test_run_beside_local(size: int, compare: Callable[..., Any], on_agents: Pool, here: Pool) -> None:
    """The same run, beside one of the local launcher."""
    world, local = on_agents.acquire(WorldSpec(size, hosts=2)), here.acquire(WorldSpec(size, network="host"))
    try:
        compare(
            f"run with one all-reduce, {size} ranks on two agents",
            lambda: world.run(all_reduce),
            lambda: seconds_of(lambda: local.run(all_reduce)),
            against="the local launcher",
            wanted="no more than it must",
            rounds=200,
        )
    finally:
        on_agents.release(world)
        here.release(local)
