"""Agents that Ray starts, on a real cluster of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import gone
from tests.cluster.hosts import Network, missing
from tests.cluster.test_engines import Session, assert_ran_on_two, session

__all__ = ["session"]

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
PORT = 6399
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts with Ray's own processes on each; pytest is on the first."""
    if why := missing():
        pytest.skip(why)
    network = Network(2)
    network.start()
    temp = tmp_path_factory.mktemp("ray")
    started = []
    try:
        for host in range(2):
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
        network.close()


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
def test_no_cluster(session: Session) -> None:
    """An address where no cluster is, is one clear error."""
    code, said = session("--launcher", "ray=127.0.0.1:1", env={**QUIET, "RAY_gcs_rpc_server_reconnect_timeout_s": "2"})
    assert code == 4, said
    assert "--launcher ray=127.0.0.1:1: " in said
    assert "Traceback" not in said
