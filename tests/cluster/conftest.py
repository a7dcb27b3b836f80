"""Agents on this machine, each an own process, and pools of worlds on them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import Pool
from harness.cluster import credentials
from harness.cluster.launcher import Cluster, ClusterLauncher
from tests.cluster.hosts import Network, missing


@dataclass
class Agent:
    """A running agent."""

    process: subprocess.Popen[str]
    address: tuple[str, int]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Signal it, and wait until it has gone."""
        self.process.send_signal(number)
        self.process.wait(20)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the key of all agents of these tests."""
    path = tmp_path_factory.mktemp("key") / "key.pem"
    credentials.write(path, credentials.made())
    return path


@contextlib.contextmanager
def running(
    key_file: Path, *options: str, env: dict[str, str] | None = None, before: Sequence[str] = ()
) -> Iterator[Agent]:
    """Start an agent, and end it.  ``before``: words before its command."""
    command = [*before, sys.executable, "-m", "harness.commands.agent", "--key", str(key_file), *options]
    quick = {"CONCORD_PRELOAD": "torch"}  # what these ranks do needs no more of it
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **quick, **(env or {})})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        host, _, port = json.loads(line)["agent"].rpartition(":")
        yield Agent(process, (host.strip("[]"), int(port)))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def start(key_file: Path) -> Iterator[Callable[..., Agent]]:
    """``start(*options, env=…)`` starts an agent, which ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, env=None: stack.enter_context(running(key_file, *options, env=env))


@pytest.fixture
def cluster_of(key_file: Path) -> Callable[..., Cluster]:
    """``cluster_of(agent, …)`` is the cluster of these agents."""
    key = credentials.read(key_file)
    return lambda *agents, patience=10.0: Cluster(tuple(agent.address for agent in agents), key, patience)


def launcher_options(agents: Sequence[Agent], key_file: Path) -> list[str]:
    """Return the options of commands for these agents."""
    where = ",".join(f"{host}:{port}" for host, port in (agent.address for agent in agents))
    return ["--launcher", f"agents={where}", "--agents-key", str(key_file)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts that the tests of a module share."""
    if why := missing():
        pytest.skip(why)
    with Network(2) as found:
        yield found


@contextlib.contextmanager
def pool_of(cluster: Cluster, network: Network | None = None) -> Iterator[Pool]:
    """Return a pool of worlds on a cluster.  ``network``: pytest is on its host 0."""
    launcher = functools.partial(ClusterLauncher, cluster)
    pool = Pool(launcher=network.on(0, launcher) if network is not None else launcher)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="module")
def agents(key_file: Path) -> Iterator[list[Agent]]:
    """Two agents that the tests of a module share."""
    with running(key_file) as one, running(key_file) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def pool(agents: list[Agent], key_file: Path) -> Iterator[Pool]:
    """A pool of worlds on two hosts that the tests of a module share."""
    with pool_of(Cluster(tuple(agent.address for agent in agents), credentials.read(key_file))) as pool:
        yield pool


def gone(pid: int, within: float = 10.0) -> bool:
    """Whether a process has ended, or does within some seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
