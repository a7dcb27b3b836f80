"""A part of an audit on two agents of one core each, beside two processes of this machine.

Run with ``pytest tests/bench/test_audit_on_hosts.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import credentials
from harness.devices import usable_cores
from tests.bench.worlds import seconds_of
from tests.cluster.conftest import running

ROOT = Path(__file__).parents[2]
PART = ["collectives", "--again", "fixtures/faults/noticed.json", "--name", "scatter"]
pytestmark = pytest.mark.slow


@pytest.fixture
def where(asked_for: None, tmp_path: Path) -> Iterator[list[str]]:
    """The options for two agents, each on a core of its own."""
    path = tmp_path / "key.pem"
    credentials.write(path, credentials.made())
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(running(path, env={"CONCORD_PRELOAD": ""}, before=("taskset", "-c", str(core))))
            for core in usable_cores()[:2]
        ]
        named = ",".join(f"{host}:{port}" for host, port in (agent.address for agent in agents))
        yield ["--launcher", f"agents={named}", "--agents-key", str(path)]


@pytest.mark.timeout(3600)
def test_audit(compare: Callable[..., Any], where: list[str], tmp_path: Path) -> None:
    """From start to end: the suites are collected, tests run healthy, with the defects, and healthy again."""
    number = itertools.count()

    def audit(*options: str) -> None:
        state = tmp_path / f"state{next(number)}"
        done = subprocess.run(
            [sys.executable, "-m", "harness.commands.main", "audit", *PART, "--workers", "2", "--state", str(state)]
            + list(options),
            cwd=ROOT,
            env={**os.environ, "CONCORD_LEASES": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    compare(
        "a part of an audit on two agents of one core each",
        lambda: audit(*where),
        lambda: seconds_of(audit),
        against="two processes of this machine",
        wanted="1.1 at most",
        rounds=4,
    )
