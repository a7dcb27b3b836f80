"""The lines of docs/clusters.md, executed on hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Network, missing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
SOME = "-k 'test_hosts or (test_barriers and 2ranks)'"
"""What is added to each line that runs the suites, for which a test has no time."""

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "hosts"), pytest.mark.timeout(600)]


def blocks(heading: str) -> list[str]:
    """The shell commands below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def as_here(line: str, folder: Path) -> str:
    """A line with this Python, the addresses of the hosts here, and the key in a folder of the test."""
    line = line.replace("10.0.0.", "10.77.0.").replace("key.pem", str(folder / "key.pem"))
    bin_folder = Path(sys.executable).parent
    line = line.replace(".venv/bin/", f"{bin_folder}/").replace("torchrun ", f"{bin_folder}/torchrun ")
    return re.sub(r"(?<![\w/])pytest suites/", f"{bin_folder}/pytest suites/", line)


def start(network: Network, host: int, line: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """Start a line on a host, in the tree."""
    return subprocess.Popen(
        network.command(host, "bash", "-c", line),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CONCORD_LEASES": str(folder), "PYTEST_ADDOPTS": f"-o concord_results={folder}", **env},
    )


def test_from_nothing_to_a_run(network: Network, tmp_path: Path) -> None:
    """The key, an agent on each host, and the suites over both."""
    install, key, agents, suites = blocks("From nothing to a run on two hosts")
    assert "pip install" in install
    with contextlib.ExitStack() as stack:
        made = start(network, 0, as_here(key, tmp_path), tmp_path)
        assert made.wait(60) == 0, made.communicate()
        lines = agents.strip().splitlines()
        assert len(lines) == 2
        for host, line in enumerate(lines):
            agent = start(network, host, f"exec {as_here(line, tmp_path)}", tmp_path)
            stack.callback(agent.wait, 20)
            stack.callback(agent.terminate)
            assert agent.stdout is not None
            assert json.loads(agent.stdout.readline()) == {"agent": f"{network.address(host)}:7000"}
        run = start(network, 0, f"{as_here(suites.strip(), tmp_path)} {SOME}", tmp_path)
        stack.callback(run.kill)
        said, _ = run.communicate(timeout=500)
    assert run.returncode == 0, said
    assert "concord: ranks are started by 2 agents on 1 machine" in said
    assert re.search(r"collectives +\d\d", said), said


def test_started_by_torchrun(network: Network, tmp_path: Path) -> None:
    """The same line on each node."""
    subprocess.run(
        [sys.executable, "-m", "harness.commands.agent", "--new-key", tmp_path / "key.pem"], check=True, cwd=ROOT
    )
    (line,) = blocks("Started by torchrun")
    nodes = [
        start(network, node, f"{as_here(line.strip(), tmp_path)} {SOME}", tmp_path, NODE=str(node)) for node in range(2)
    ]
    try:
        said = [node.communicate(timeout=500)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "concord: ranks are started by 2 agents" in said[0]
