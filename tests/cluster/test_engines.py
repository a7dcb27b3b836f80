"""Engines start agents, and end them with the session."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import credentials
from harness.cluster.engines import EngineError, engine, names
from tests.cluster.conftest import gone

TESTS = """
import os
import pytest

@pytest.mark.world(2, hosts=2)
def test_apart(world):
    print("GROUPS", world.run(lambda rank: (os.environ["GROUP_RANK"], rank.host)))

@pytest.mark.skipif("HANG" not in os.environ, reason="for sessions that are killed")
@pytest.mark.world(2)
def test_first(world):
    with open(os.environ["HANG"], "w") as file:
        file.write(" ".join(map(str, world.pids)))
    world.run(lambda rank: __import__("time").sleep(100))

@pytest.mark.world(2)
def test_together(world):
    assert world.run(lambda rank: rank.host) == [0, 0]
    print("PIDS", *world.pids)
"""

OWN = """
import json, os, subprocess, sys

class Engine:
    def __init__(self, argument):
        self.count, self.agents = int(argument), []

    def start(self, key):
        found = []
        for _ in range(self.count):
            command = [sys.executable, "-m", "harness.commands.agent", "--key", "-"]
            agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.agents.append(agent)
            agent.stdin.write(key)
            agent.stdin.close()
            host, _, port = json.loads(agent.stdout.readline())["agent"].rpartition(":")
            found.append((host, int(port)))
        with open(os.path.join(os.path.dirname(__file__), "agents.txt"), "a") as file:
            print(*(agent.pid for agent in self.agents), file=file)
        return found

    def stop(self):
        for agent in self.agents:
            agent.terminate()
            agent.wait()
"""

OWN += """

class Fails:
    def __init__(self, argument):
        pass

    def start(self, key):
        raise OSError("no room")

    def stop(self):
        pass
"""

Session = Callable[..., tuple[int, str]]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """``session(*arguments, env=…, before=…)`` runs pytest in a folder; returns its exit code and what it printed.

    ``before``: words before its command; ``during``: called with the process.
    """
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "own.py").write_text(OWN)
    info = tmp_path / "own_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[concord.launchers]\nown = own:Engine\nno = own:nothing\nfails = own:Fails\nbad = 3\n"
    )

    def run(
        *arguments: str,
        env: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        during: Callable[[Any], None] | None = None,
    ) -> tuple[int, str]:
        plugins = ("-p", "harness.plugin", "-p", "no:cacheprovider")
        variables = {
            "CONCORD_PRELOAD": "torch",
            "CONCORD_LEASES": str(tmp_path),
            "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}",
        }
        with open(tmp_path / "said.txt", "w+") as said:
            session = subprocess.Popen(
                [*before, sys.executable, "-m", "pytest", *plugins, "-rA", "-s", *arguments],
                cwd=tmp_path,
                env={**os.environ, **variables, **(env or {})},
                stdout=said,
                stderr=said,
            )
            try:
                if during is not None:
                    during(session)
                code = session.wait(280)
            finally:
                session.kill()
                session.wait()
            said.seek(0)
            return code, said.read()

    return run


def assert_ends_with_pytest(session: Session, folder: Path, *arguments: str, **how: Any) -> None:
    """When pytest is killed, the agents and their ranks end."""
    told = folder / "pids.txt"

    def kill(process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + 120
        while not (told.exists() and told.read_text()) and time.monotonic() < until and process.poll() is None:
            time.sleep(0.1)
        process.kill()

    env = {**how.pop("env", {}), "HANG": str(told)}
    code, said = session(*arguments, env=env, during=kill, **how)
    assert code == -signal.SIGKILL, said
    assert told.exists(), said
    assert all(gone(int(pid), 20) for pid in told.read_text().split())


def assert_ran_on_two(code: int, said: str, machines: int = 1) -> None:
    """Both tests passed, one of them on two hosts."""
    assert code == 0, said
    assert "2 passed, 1 skipped" in said
    assert "GROUPS [('0', 0), ('1', 1)]" in said
    assert f"ranks are started by 2 agents on {machines} machine" in said


@pytest.mark.timeout(300)
def test_of_a_package(session: Session, tmp_path: Path) -> None:
    """An installed package brings an engine; its agents end with the session."""
    code, said = session("--launcher", "own=2")
    assert_ran_on_two(code, said)
    pids = (tmp_path / "agents.txt").read_text().split()
    assert len(pids) == 2
    assert all(gone(int(pid)) for pid in pids)


@pytest.mark.timeout(300)
def test_workers_share_the_agents(session: Session, tmp_path: Path) -> None:
    """The engine starts agents once, whatever the number of workers."""
    code, said = session("--launcher", "own=2", "-n", "2")
    assert code == 0, said
    assert len((tmp_path / "agents.txt").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own=two", "--launcher own=two: ValueError: invalid literal for int() with base 10: 'two'"),
        ("fails", "--launcher fails: OSError: no room"),
        ("no", "--launcher no: entry point 'no' of concord.launchers (own-engine 1.0): AttributeError"),
        ("bad", "--launcher bad: entry point 'bad' of concord.launchers (own-engine 1.0): '3' is not module:attribute"),
    ],
)
def test_broken(name: str, message: str, session: Session) -> None:
    """An engine that can't start is one clear error."""
    code, said = session("--launcher", name)
    assert (code, "Traceback" in said) == (4, False), said
    assert message in said


@pytest.mark.parametrize("option", ["--markers", "--fixtures", "--collect-only", "--help"])
def test_nothing_is_started_for_no_test(option: str, session: Session) -> None:
    """Where no test will run, no engine starts: this one would fail."""
    code, said = session("--launcher", "fails", option)
    assert (code, "no room" in said) == (0, False), said


def test_without_xdist(session: Session) -> None:
    """Without pytest-xdist, its hooks are nobody's."""
    code, said = session("-p", "no:xdist", "-k", "together")
    assert (code, "1 passed" in said) == (0, True), said


def test_one_host_is_too_few(session: Session) -> None:
    """A test that needs two hosts is unsupported where there is one, with and without an engine."""
    for arguments in ((), ("--launcher", "own=1")):
        code, said = session(*arguments)
        assert code == 0, said
        assert "unsupported: a world on 2 hosts is needed, and ranks start on 1 here" in said


def test_own_names() -> None:
    """Concord's engines are there without any package."""
    assert {"ray", "slurm"} <= set(names())
    with pytest.raises(EngineError, match="one of the engines ray, slurm"):
        engine("carrier-pigeon", "")


def test_no_allocation() -> None:
    """Without an allocation, the error says what makes one."""
    if shutil.which("srun") is None:
        pytest.skip("SLURM's srun is not installed (Debian: slurm-client)")
    with pytest.raises(EngineError, match="start pytest in an allocation"):
        engine("slurm", "")


def test_srun_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What srun says is in the error."""
    if shutil.which("srun") is None:
        pytest.skip("SLURM's srun is not installed (Debian: slurm-client)")
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    starting = engine("slurm", "--nodes=2")
    with pytest.raises(EngineError, match=r"srun ended with status \d+: srun: "):
        starting.start(credentials.made())
    starting.stop()


def test_no_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SLURM, the error says where to start pytest."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match="there is no srun: start pytest where SLURM's commands are"):
        engine("slurm", "--nodes=2")
