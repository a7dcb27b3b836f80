"""Agents that Ray starts, on a real cluster of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import gone
from tests.cluster.hosts import Network
from tests.cluster.test_engines import Session, assert_ends_with_pytest, assert_ran_on_two, session

__all__ = ["session"]

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
PORT = 6399
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}


@pytest.fixture(scope="module")
def nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Hosts with Ray's own processes on each; pytest is on the first."""
    temp = tmp_path_factory.mktemp("ray")
    started = []
    try:
        for host in range(len(network.names)):
            where = ("--head", f"--port={PORT}", "--include-dashboard=false") if host == 0 else ()
            joins = () if host == 0 else (f"--address={network.address(0)}:{PORT}",)
            command = [
                *(str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=2", *where, *joins),
                *(f"--node-ip-address={network.address(host)}", f"--temp-dir={temp}/{host}", "--disable-usage-stats"),
                f"--object-store-memory={100 << 20}",
            ]
            process = subprocess.Popen(
                network.command(host, *command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **QUIET},
            )
            started.append(process)
            assert process.stdout is not None
            said = ""
            while "Ray runtime started" not in said:
                line = process.stdout.readline()
                assert line, said
                said += line
        yield network
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


@pytest.mark.timeout(300)
def test_session(nodes: Network, session: Session) -> None:
    """Each node has an agent, and worlds are on both; afterwards nothing of it is left."""
    address = f"{nodes.address(0)}:{PORT}"
    code, said = session("--launcher", f"ray={address}", env=QUIET, before=tuple(nodes.command(0)))
    assert_ran_on_two(code, said)
    pids = re.search(r"PIDS (\d+) (\d+)", said)
    assert pids is not None
    assert all(gone(int(pid)) for pid in pids.groups())


@pytest.mark.timeout(300)
def test_pytest_is_killed(nodes: Network, session: Session, tmp_path: Path) -> None:
    """The agents end, and the nodes are free for the next session."""
    address, before = f"{nodes.address(0)}:{PORT}", tuple(nodes.command(0))
    assert_ends_with_pytest(session, tmp_path, "--launcher", f"ray={address}", env=QUIET, before=before)
    code, said = session("--launcher", f"ray={address}", "-k", "apart", env=QUIET, before=before)
    assert (code, "1 passed" in said) == (0, True), said


@pytest.mark.timeout(300)
def test_two_sessions(nodes: Network, session: Session, tmp_path: Path) -> None:
    """The second waits for the first, and says so."""
    arguments = ("--launcher", f"ray={nodes.address(0)}:{PORT}", "-k", "apart")
    before = tuple(nodes.command(0))
    hold = (
        "import ray; ray.init(log_to_driver=False); "
        "group = ray.util.placement_group([{'CPU': 2}] * 2, strategy='STRICT_SPREAD'); group.wait(60); "
        "print('held', flush=True); input()"
    )
    env = {**os.environ, **QUIET, "RAY_ADDRESS": f"{nodes.address(0)}:{PORT}"}
    holding = subprocess.Popen(
        [*before, sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert holding.stdin is not None
    assert holding.stdout is not None
    assert "held" in iter(holding.stdout.readline, "").__next__()

    def let_go(process: object) -> None:
        until = time.monotonic() + 120
        while "waiting for the CPUs" not in (tmp_path / "said.txt").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        holding.communicate("\n")

    code, said = session(*arguments, env=QUIET, before=before, during=let_go)
    assert (code, "1 passed" in said) == (0, True), said
    assert "concord: waiting for the CPUs of 2 Ray nodes, which others use" in said


@pytest.mark.timeout(300)
def test_no_cluster(session: Session) -> None:
    """An address where no cluster is, is one clear error."""
    code, said = session("--launcher", "ray=127.0.0.1:1", env={**QUIET, "RAY_gcs_rpc_server_reconnect_timeout_s": "2"})
    assert code == 4, said
    assert "--launcher ray=127.0.0.1:1: " in said
    assert "Traceback" not in said
