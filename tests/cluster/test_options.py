"""Sessions of pytest whose ranks start by agents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.devices import usable_cores
from tests.cluster.conftest import Agent

TESTS = """
import os
import torch
import torch.distributed as dist
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.world(1, 2, 3)
def test_sum(world):
    def body(rank):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return float(tensor[0]), os.environ["GROUP_WORLD_SIZE"], os.environ["GROUP_RANK"]
    results = world.run(body)
    assert [result[0] for result in results] == [world.size] * world.size
    print("GROUPS", world.size, results[-1][1:])

@pytest.mark.world(1, 2)
@settings(max_examples=4, deadline=None)
@given(size=st.sampled_from([1, 2]))
def test_several(worlds, size):
    assert worlds(size).run(lambda rank: rank.size) == [size] * size
"""


@pytest.fixture
def session(tmp_path: Path, key_file: Path) -> Callable[..., tuple[int, str]]:
    """``session(*arguments)`` runs pytest in a folder with tests; returns its exit code and what it printed."""
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(*arguments: str, key: bool = True) -> tuple[int, str]:
        keyed = ("--agents-key", str(key_file)) if key else ()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "harness.plugin",
                "-p",
                "no:cacheprovider",
                "-rA",
                *arguments,
                *keyed,
            ],
            cwd=tmp_path,
            env={**os.environ, "CONCORD_PRELOAD": "torch", "CONCORD_LEASES": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def agents_of(*agents: Agent) -> str:
    """The option for some agents."""
    return "agents=" + ",".join(f"{host}:{port}" for host, port in (agent.address for agent in agents))


@pytest.mark.timeout(300)
def test_spread(agents: list[Agent], session: Callable[..., tuple[int, str]]) -> None:
    """Every world is on all hosts, as far as it has ranks."""
    code, said = session("--launcher", agents_of(*agents), "--spread")
    assert code == 0, said
    assert "4 passed" in said
    for size, hosts, last in ((1, 1, 0), (2, 2, 1), (3, 2, 1)):
        assert f"GROUPS {size} ('{hosts}', '{last}')" in said


@pytest.mark.timeout(300)
def test_packed(agents: list[Agent], session: Callable[..., tuple[int, str]]) -> None:
    """Without --spread, each world is on one host; workers have agents, too."""
    code, said = session("--launcher", agents_of(*agents), "-n", "2")
    assert code == 0, said
    assert "4 passed" in said
    assert "GROUPS 3 ('1', '0')" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--launcher", "carrier-pigeon"],
            "--launcher carrier-pigeon: it is not local, agents=HOST:PORT,..., or one of the engines ray, slurm",
        ),
        (
            ["--launcher", "torchrun"],
            "torchrun --nproc-per-node=1 ... -m harness.commands.agent --key FILE -- pytest ...",
        ),
        (["--launcher", "agents"], "'' is not HOST:PORT"),
        (["--launcher", "agents=host"], "'host' is not HOST:PORT"),
        (["--launcher", "agents=host:99999"], "'host:99999' is not HOST:PORT"),
        (["--launcher", "agents=a:1,a:1"], "names an agent twice"),
        (["--spread"], "--spread: there is one host"),
        (["--launcher", "agents=127.0.0.1:1", "--rank-pdb", "0"], "can't use this terminal"),
        (["--launcher", "agents=127.0.0.1:1"], "no agent answers at 127.0.0.1:1"),
    ],
)
def test_bad_options(arguments: list[str], message: str, session: Callable[..., tuple[int, str]]) -> None:
    """One clear error, and no traceback."""
    code, said = session(*arguments)
    assert code == 4, said
    assert message in said
    assert "Traceback" not in said


def test_without_a_key(session: Callable[..., tuple[int, str]]) -> None:
    """The option that lacks is named."""
    code, said = session("--launcher", "agents=127.0.0.1:1", key=False)
    assert (code, "--agents-key FILE, or CONCORD_AGENTS_KEY" in said) == (4, True), said


@pytest.mark.timeout(300)
def test_gpus(agents: list[Agent], session: Callable[..., tuple[int, str]]) -> None:
    """-n gpus is a worker for each core of the agents' machines, and both agents are on this one."""
    code, said = session("--launcher", agents_of(*agents), "-n", "gpus", "-k", "several")
    assert code == 0, said
    assert f"{len(usable_cores())} worlds side by side (one for each core)" in said
    assert f"created: {len(usable_cores())}/{len(usable_cores())} workers" in said or "[gw" in said
