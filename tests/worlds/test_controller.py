"""Whatever ends the controller, its ranks end with it; and sessions do not disturb each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worlds.conftest import all_gone

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, pathlib, subprocess, sys, time
from harness import Pool, WorldSpec

folder = pathlib.Path(sys.argv[2])

def sleep(rank):
    (folder / str(rank.index)).touch()
    time.sleep(1000)

def loop(rank):
    (folder / str(rank.index)).touch()
    while True:
        pass

def spawn(rank):
    started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (folder / "partly").mkdir(exist_ok=True)
    (folder / "partly" / str(rank.index)).write_text(str(started.pid))
    (folder / "partly" / str(rank.index)).rename(folder / str(rank.index))
    time.sleep(1000)

pool = Pool()
world = pool.acquire(WorldSpec(2))
print(json.dumps([pool.launcher().server_pid, *world.pids]), flush=True)
try:
    world.run({"sleep": sleep, "loop": loop, "spawn": spawn}[sys.argv[1]])
except KeyboardInterrupt as e:
    print("".join(e.__notes__), flush=True)
    pool.close()
    sys.exit(130)
"""


def start(how: str, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A controller with two ranks that are inside their function; returns it, and the processes under it.

    ``folder``: an empty one, in which ranks say that they are.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A program that a script starts in the background is made deaf to Ctrl-C; this one must hear it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    pids = json.loads(process.stdout.readline())
    while not {"0", "1"} <= {path.name for path in folder.iterdir()}:  # pytest-timeout ends a wait for nothing
        assert process.poll() is None
        time.sleep(0.01)
    return process, pids


@pytest.mark.parametrize("how", ["sleep", pytest.param("loop", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signal_to_the_controller(number: signal.Signals, how: str, tmp_path: Path) -> None:
    """Server and ranks are gone soon after the controller, whatever they were doing."""
    process, pids = start(how, tmp_path)
    os.kill(process.pid, number)
    process.wait(60)
    assert all_gone(pids)


def test_interrupted_controller_keeps_the_evidence(tmp_path: Path) -> None:
    """Ctrl-C during a run: the exception carries where each rank was."""
    process, pids = start("sleep", tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted by KeyboardInterrupt" in output
    assert "rank 1: stopped by the harness while running" in output
    assert all_gone(pids)


def test_two_sessions_side_by_side(tmp_path: Path) -> None:
    """A session that ends leaves the other's ranks alone."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    one, its = start("sleep", folders[0])
    other, others = start("sleep", folders[1])
    os.kill(one.pid, signal.SIGKILL)
    one.wait(60)
    assert all_gone(its)
    assert not any(all_gone([pid], within=0) for pid in others)
    other.kill()
    other.wait(60)
    assert all_gone(others)
