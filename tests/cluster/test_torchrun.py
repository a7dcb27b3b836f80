"""Agents that torchrun starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cluster.torchrun import Node, NoTorchrun

TESTS = """
import os
import pytest

@pytest.mark.world(2)
def test_it(world):
    print("GROUPS", world.run(lambda rank: (os.environ["GROUP_RANK"], os.environ.get("TORCHELASTIC_RUN_ID"))))

@pytest.mark.world(2)
def test_wrong(world):
    assert world.run(lambda rank: rank.index) == [0, 0]
"""


@pytest.mark.timeout(300)
def test_session_on_two_nodes(tmp_path: Path, key_file: Path) -> None:
    """Node 0 runs pytest, whose worlds are on both nodes; its exit code is that of its agent, and the others end."""
    (tmp_path / "test_it.py").write_text(TESTS)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    nodes = []
    for node in range(2):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}"),
            *(
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                "-m",
                "harness.commands.agent",
                "--key",
                str(key_file),
            ),
            *(
                "--",
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "harness.plugin",
                "-p",
                "no:cacheprovider",
                "-rA",
                "--spread",
            ),
        ]
        env = {**os.environ, "CONCORD_PRELOAD": "torch", "CONCORD_LEASES": str(tmp_path)}
        with open(tmp_path / f"node{node}.txt", "w") as file:
            nodes.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=file, stderr=subprocess.STDOUT))
    codes = [process.wait(240) for process in nodes]
    said = [(tmp_path / f"node{node}.txt").read_text() for node in range(2)]
    assert "GROUPS [('0', None), ('1', None)]" in said[0], said[0]
    assert "1 failed, 1 passed" in said[0]
    assert codes == [1, 0], said
    assert "passed" not in said[1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MASTER_ADDR is not set: start it by torchrun"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "starts 2 agents on this node: give it --nproc-per-node=1",
        ),
    ],
    ids=["not torchrun's", "two on a node"],
)
def test_not_a_node(variables: dict[str, str], message: str) -> None:
    """What is wrong is said, and what to do."""
    with pytest.raises(NoTorchrun, match=message):
        Node(variables)


def test_variables_of_torchrun_are_not_passed_on() -> None:
    """Ranks and the session are not torchrun's."""
    variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "1",
        "HOME": "/root",
    }
    node = Node(variables)
    assert (node.rank, node.size) == (1, 2)
    assert variables == {"HOME": "/root"}
