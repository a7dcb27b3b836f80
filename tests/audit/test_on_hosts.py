"""Audits whose processes run on the hosts of agents."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.audit.records import AuditError, digest
from harness.audit.worker import Job
from harness.audit.workers import Workers
from harness.cluster import credentials
from harness.cluster.elsewhere import Place
from tests.audit.test_audit import audit, command, environment, tree
from tests.cluster.conftest import Agent, key_file, launcher_options, start

__all__ = ["key_file", "start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SUM = "suites/collectives/test_toy.py::test_sum[2ranks]"
BARRIER = "suites/collectives/test_a_other.py::test_barrier[2ranks]"
AGAIN = [SUM, BARRIER] * 20
"""Tests for some seconds."""


@pytest.fixture
def agents(start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """Two agents."""
    for name in ("PYTHONPATH", "PYTEST_PLUGINS", "CONCORD_PRELOAD"):
        monkeypatch.setenv(name, environment()[name])
    return [start(), start()]


def workers(root: Path, agents: list[Agent], key_file: Path, of: str = "") -> Workers:
    """A process on each agent."""
    places = [Place(agent.address, credentials.read(key_file)) for agent in agents]
    return Workers(root, of or digest(root), ["suites/collectives"], "torch", places)


def test_states(agents: list[Agent], key_file: Path, tmp_path: Path) -> None:
    """The states are those of an audit on this machine, and nothing of it is left on the hosts."""
    ended = audit(tree(tmp_path), "--mutants", "none", *launcher_options(agents, key_file), "--workers", "2")
    assert ended.code == 0, ended.out
    assert ended.states() == {
        "not-summed": "killed",
        "not-summed-if-large[above 10]": "survived",
        "not-summed-if-large[above 100]": "survived",
        "waits": "killed",
        "dies": "killed",
        "another-torch": "not injected",
    }


def test_host_goes(agents: list[Agent], key_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What was in flight on a host that has gone is done on the other."""
    root = tree(tmp_path)
    jobs = [Job(tests=AGAIN), Job(tests=[SUM, BARRIER]), Job(tests=[BARRIER])]
    with workers(root, agents, key_file) as pool:
        done = pool.do(iter(jobs), limit=200)
        first = next(done)
        assert first[0] is jobs[1]  # on the second agent; the first one is busy
        agents[0].end(signal.SIGKILL)
        rest = list(done)
    assert sorted(len(outcomes) for _, outcomes, _ in rest) == [1, len(AGAIN)]
    assert all(complete for _, _, complete in rest)
    assert {outcome.verdict for _, outcomes, _ in rest for outcome in outcomes} == {"passed"}
    host, port = agents[0].address
    assert f"the host of the agent at {host} port {port} has gone" in capfd.readouterr().err


def test_every_host_goes(agents: list[Agent], key_file: Path, tmp_path: Path) -> None:
    """It is said, and the same command continues where it was, on whatever hosts there are then."""
    folder = tree(tmp_path)
    arguments = [*command("collectives", "--mutants", "none", "--workers", "2"), *launcher_options(agents, key_file)]
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("killed", "survived", "not injected")):
            break
    for agent in agents:
        agent.end(signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "no host is left; what was done is kept, and the same command continues" in errors
    assert "Traceback" not in errors
    (journal,) = (folder / "reports/out/audit").glob("*.jsonl")
    done = journal.read_text().count('"record":"result"')
    ended = audit(folder, "--mutants", "none")
    assert 0 < done < 6
    assert f"defects: {6 - done} to do" in ended.out
    assert len(ended.states()) == 6


def test_process_dies(agents: list[Agent], key_file: Path, tmp_path: Path) -> None:
    """A process that dies is replaced on its host, and its job is not run again: it may be the reason."""
    root = tree(tmp_path)
    with workers(root, agents[:1], key_file) as pool:
        done = pool.do(iter([Job(tests=AGAIN), Job(tests=[BARRIER])]), limit=200)
        children = Path(f"/proc/{agents[0].process.pid}/task/{agents[0].process.pid}/children").read_text().split()
        (session,) = children
        (worker,) = Path(f"/proc/{session}/task/{session}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        first, second = list(done)
    assert first[2] is False
    assert [outcome.verdict for outcome in second[1]] == ["passed"]


def test_another_tree(agents: list[Agent], key_file: Path, tmp_path: Path) -> None:
    """Hosts with other suites are refused: their results would be of something else."""
    with (
        pytest.raises(AuditError, match=rf"differ on the host of the agent at 127.0.0.1 port \d+: {tmp_path} must be"),
        workers(tree(tmp_path), agents, key_file, of="another"),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--launcher", "agents=127.0.0.1:1"], "--launcher agents=127.0.0.1:1: give the key of the agents"),
        (["--launcher", "agents=nowhere"], "give the key of the agents"),
        (["--launcher", "pigeon"], "--launcher pigeon: it is not local"),
    ],
)
def test_bad_input(arguments: list[str], says: str, tmp_path: Path) -> None:
    """One error that says what to do."""
    done = subprocess.run(
        command(*arguments), cwd=tree(tmp_path), env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
