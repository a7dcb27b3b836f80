"""Whatever ends the controller, its ranks end with it; and sessions do not disturb each other."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worlds.conftest import all_gone

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys, time
from harness import Pool, WorldSpec

def sleep(rank):
    time.sleep(1000)

def loop(rank):
    while True:
        pass

pool = Pool()
world = pool.acquire(WorldSpec(2))
print(json.dumps([pool.launcher().server_pid, *world.pids]), flush=True)
try:
    world.run({"sleep": sleep, "loop": loop}[sys.argv[1]])
except KeyboardInterrupt as e:
    print("".join(e.__notes__), flush=True)
    pool.close()
    sys.exit(130)
"""


def start(how: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A controller with two ranks that are about to be busy; returns it, and the processes under it."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A program that a script starts in the background is made deaf to Ctrl-C; this one must hear it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    assert all_running(pids[1:])
    return process, pids


def all_running(pids: list[int], within: float = 10.0) -> bool:
    """Whether every rank is inside its function: it has left the read of its next order."""
    deadline = time.monotonic() + within
    for pid in pids:
        while True:
            call = Path(f"/proc/{pid}/syscall").read_text().split()[0]
            reading = {"x86_64": "45", "aarch64": "207"}.get(platform.machine())
            if call != reading:
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


@pytest.mark.parametrize("how", ["sleep", "loop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signal_to_the_controller(number: signal.Signals, how: str) -> None:
    """Server and ranks are gone soon after the controller, whatever they were doing."""
    process, pids = start(how)
    os.kill(process.pid, number)
    process.wait(20)
    assert all_gone(pids)


def test_interrupted_controller_keeps_the_evidence() -> None:
    """Ctrl-C during a run: the exception carries where each rank was."""
    process, pids = start("sleep")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted by KeyboardInterrupt" in output
    assert "rank 1: stopped by the harness while running" in output
    assert all_gone(pids)


def test_two_sessions_side_by_side() -> None:
    """A session that ends leaves the other's ranks alone."""
    one, its = start("sleep")
    other, others = start("sleep")
    os.kill(one.pid, signal.SIGKILL)
    one.wait(20)
    assert all_gone(its)
    assert not any(all_gone([pid], within=0) for pid in others)
    other.kill()
    other.wait(20)
    assert all_gone(others)
