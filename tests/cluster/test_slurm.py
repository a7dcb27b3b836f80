"""Agents that SLURM starts, on a real cluster of two nodes: slurmctld, two slurmd and munge."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import gone
from tests.cluster.hosts import Network
from tests.cluster.test_engines import Session, assert_ends_with_pytest, assert_ran_on_two, session

__all__ = ["session"]

CONFIGURATION = """
ClusterName=concord
SlurmctldHost={host}({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass
class Slurm:
    """A running cluster; pytest is on its first node."""

    network: Network
    env: dict[str, str]


@pytest.fixture(scope="module")
def slurm(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster with a node on each host."""
    lacks = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    if lacks:
        pytest.skip(f"not installed: {', '.join(lacks)} (Debian: slurmctld slurmd slurm-client munge)")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    names = [f"node{i}" for i in range(len(network.names))]
    for name in names:
        (folder / f"spool.{name}").mkdir()
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={network.address(i)} NodeHostname={socket.gethostname()} CPUs=2 State=UNKNOWN"
        for i, name in enumerate(names)
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=socket.gethostname(), controller=network.address(0), folder=folder, nodes=nodes)
    )
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    env = {"SLURM_CONF": str(configuration)}
    munge = [
        f"--{what}={folder}/munge.{what.split('-')[0]}"
        for what in ("socket", "key-file", "pid-file", "log-file", "seed-file")
    ]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        network.command(0, "slurmctld", "-D", "-i"),
        *(network.command(i, "slurmd", "-D", "-N", name) for i, name in enumerate(names)),
    ]
    started = []
    try:
        for command in commands:
            with open(folder / f"{len(started)}.log", "wb") as log:
                started.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log))
            until = time.monotonic() + 10
            while len(started) == 1 and not (folder / "munge.socket").exists() and time.monotonic() < until:
                time.sleep(0.05)
        until = time.monotonic() + 60
        said = ""
        while said.count("idle") < len(names):
            shown = subprocess.run(
                network.command(0, "sinfo", "-N", "-h", "-o", "%N %T"),
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                check=False,
            )
            said = shown.stdout + shown.stderr
            assert time.monotonic() < until, (said, [path.read_text() for path in folder.glob("*.log")])
            time.sleep(0.2)
        yield Slurm(network, env)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.mark.timeout(300)
def test_session_asks_for_nodes(slurm: Slurm, session: Session) -> None:
    """srun allocates two nodes for the session; afterwards nothing of it is left."""
    code, said = session("--launcher", "slurm=--nodes=2", env=slurm.env, before=tuple(slurm.network.command(0)))
    assert_ran_on_two(code, said)
    pids = re.search(r"PIDS (\d+) (\d+)", said)
    assert pids is not None
    assert all(gone(int(pid)) for pid in pids.groups())
    assert_no_jobs(slurm)


@pytest.mark.timeout(300)
def test_session_in_an_allocation(slurm: Slurm, session: Session) -> None:
    """In an allocation, the agents are a step on all of its nodes."""
    before = slurm.network.command(0, "salloc", "--nodes=2", "--quiet")
    code, said = session("--launcher", "slurm", env=slurm.env, before=tuple(before))
    assert_ran_on_two(code, said)


@pytest.mark.timeout(300)
def test_pytest_is_killed(slurm: Slurm, session: Session, tmp_path: Path) -> None:
    """The step ends, and gives the nodes back."""
    before = tuple(slurm.network.command(0))
    assert_ends_with_pytest(session, tmp_path, "--launcher", "slurm=--nodes=2", env=slurm.env, before=before)
    assert_no_jobs(slurm)


@pytest.mark.timeout(300)
def test_srun_refuses(slurm: Slurm, session: Session) -> None:
    """Nodes that there are not: what SLURM says is in the error."""
    code, said = session("--launcher", "slurm=--partition=none", env=slurm.env, before=tuple(slurm.network.command(0)))
    assert (code, "Traceback" in said) == (4, False), said
    assert (
        "--launcher slurm=--partition=none: srun ended with status 1: srun: error: invalid partition specified" in said
    )


def assert_no_jobs(slurm: Slurm) -> None:
    """No job is left, or none is soon."""
    until = time.monotonic() + 30
    while queued(slurm) and time.monotonic() < until:
        time.sleep(0.2)
    assert queued(slurm) == ""


def queued(slurm: Slurm) -> str:
    """The jobs that SLURM has."""
    command = slurm.network.command(0, "squeue", "-h")
    return subprocess.run(command, env={**os.environ, **slurm.env}, capture_output=True, text=True, check=True).stdout
