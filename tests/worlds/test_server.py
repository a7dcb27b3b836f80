"""The process that ranks are forked from: when it is lost, it is blamed and replaced, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import Pool, Rank, RanksFailed, World, WorldSpec
from harness.worlds.launch import LaunchError
from harness.worlds.local import LocalLauncher
from tests.worlds.conftest import add_up, all_gone
from tests.worlds.test_controller import start

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
SOON = 5.0
"""Seconds within which nothing is left.  It takes some 0.1 s, more on a machine that has much else to do."""


@pytest.fixture
def own() -> Iterator[Pool]:
    """A pool whose server may be damaged."""
    found = Pool(launcher=lambda **how: LocalLauncher(["torch"], patience=2, **how))
    yield found
    found.close()


def launcher(pool: Pool) -> LocalLauncher:
    found = pool.launcher()
    assert isinstance(found, LocalLauncher)
    found.wait_ready()
    return found


def damaged(world: World, folder: Path, damage: Callable[[], None]) -> tuple[RanksFailed, list[int]]:
    """Run something that starts processes in every way, and damage what is under it.

    Returns the failure, and the processes that ranks had started.
    """

    def body(rank: Rank) -> None:
        if rank.index == 1:  # it breaks in a collective as the other dies, which is not to be mistaken for the reason
            dist.barrier()
        plain = subprocess.Popen(SLEEPER)
        apart = subprocess.Popen(SLEEPER, start_new_session=True)
        daemon = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=2).pid)"
        orphan = subprocess.check_output([sys.executable, "-S", "-c", daemon, *SLEEPER], text=True)
        (folder / "partly").write_text(f"{plain.pid} {apart.pid} {orphan}")
        (folder / "partly").rename(folder / f"rank{rank.index}")
        while True:
            time.sleep(1000)

    def once_they_are_there() -> None:
        while not (folder / "rank0").exists():  # pytest-timeout ends a wait for nothing
            time.sleep(0.01)
        damage()

    with pytest.raises(RanksFailed) as caught:
        world.run_beside(once_they_are_there, body, timeout=100)
    return caught.value, [int(pid) for path in folder.glob("rank*") for pid in path.read_text().split()]


THEIRS = "the server that ranks are forked from"


def processes(found: LocalLauncher, who: str) -> list[int]:
    return {
        "server": [found.server_pid],
        "guardian": [found.guardian_pid],
        "both": [found.guardian_pid, found.server_pid],
    }[who]


@pytest.mark.parametrize(
    ("who", "number", "blamed"),
    [
        ("server", signal.SIGKILL, f"{THEIRS} was killed by SIGKILL (by someone, or by the kernel for want of memory)"),
        ("server", signal.SIGSTOP, f"{THEIRS} was stopped by SIGSTOP, and given up"),
        ("server", signal.SIGTERM, f"{THEIRS} was killed by SIGTERM"),
        ("guardian", signal.SIGKILL, f"the guardian of {THEIRS} was killed by SIGKILL (by someone, or by the kernel"),
        ("both", signal.SIGKILL, f"the guardian of {THEIRS} was killed by SIGKILL (by someone, or by the kernel"),
        ("both", signal.SIGSTOP, f"{THEIRS} did not answer for 2 s (it and its guardian had been stopped by a signal)"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value).split()[0],
)
def test_what_is_said_of_it(who: str, number: signal.Signals, blamed: str) -> None:
    """What became of a server is told in words, with the signal; it and its guardian are gone then."""
    found = LocalLauncher(["json"], patience=2)
    try:
        found.wait_ready()
        for pid in processes(found, who):
            os.kill(pid, number)
        while found.alive:  # pytest-timeout ends a wait for nothing
            found.check()
            time.sleep(0.01)
        assert found.lost.startswith(blamed)
        assert all_gone([found.guardian_pid, found.server_pid], within=SOON)
    finally:
        found.close()


@pytest.mark.parametrize(
    ("who", "number"),
    [("server", signal.SIGKILL), ("server", signal.SIGSTOP), ("guardian", signal.SIGKILL), ("both", signal.SIGKILL)],
)
def test_server_is_blamed_and_replaced(who: str, number: signal.Signals, own: Pool, tmp_path: Path) -> None:
    """No rank is blamed for the end of its server; all that ranks had started is gone; the next run is as any other."""
    found = launcher(own)
    below = processes(found, "both")
    world = own.acquire(WorldSpec(2))
    ranks = world.pids
    error, started = damaged(world, tmp_path, lambda: [os.kill(pid, number) for pid in processes(found, who)] and None)
    assert all_gone([*started, *ranks, *below], within=SOON), "something was left"
    assert len(started) == 3
    assert error.headline == f"no rank is to blame: {found.lost}"
    assert (error.verdict, error.first, error.culprits) == ("crashed", None, ())
    assert error.ends[0].what == "ended with the server that it was forked from"
    assert world.run(add_up) == [3.0, 3.0]
    assert own.launcher() is not found
    own.release(world)


LOWERED = "import resource, sys, time; resource.setrlimit(resource.RLIMIT_RTTIME, (1 << 40,) * 2); time.sleep(1000)"


@pytest.mark.parametrize(("private", "lowered"), [(True, False), (False, False), (True, True)])
def test_what_has_left_its_environment(private: bool, lowered: bool, tmp_path: Path) -> None:
    """A daemon without a variable of ours is ended, too, where server and guardian are killed at once."""
    own = Pool(launcher=lambda **how: LocalLauncher(["torch"], patience=2, private=private))
    found = launcher(own)
    if private and found.refusal:
        pytest.skip(f"no private network here: {found.refusal.why}")
    world = own.acquire(WorldSpec(1))
    try:

        def body(rank: Rank) -> int:
            command = [*SLEEPER[:-1], LOWERED] if lowered else SLEEPER
            started = subprocess.Popen(command, env={}, start_new_session=True)
            while lowered and str(1 << 40) not in Path(f"/proc/{started.pid}/limits").read_text():
                time.sleep(0.01)
            return started.pid

        pids = world.run(body)
        bystander = subprocess.Popen(SLEEPER, env={}, start_new_session=True)
        for pid in processes(found, "both"):
            os.kill(pid, signal.SIGKILL)
        while found.alive:  # pytest-timeout ends a wait for nothing
            time.sleep(0.01)
        assert all_gone(pids, within=SOON)
        assert bystander.poll() is None
        bystander.kill()
        bystander.wait()
    finally:
        own.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_server_is_replaced_between_tests(number: signal.Signals, own: Pool) -> None:
    """A server that is lost while no test runs costs no test its verdict: warm worlds and fresh ones work."""
    warm, found = WorldSpec(1, warm=True), launcher(own)
    own.release(own.acquire(warm))
    os.kill(found.server_pid, number)
    while found.alive:  # pytest-timeout ends a wait for nothing
        time.sleep(0.01)
    for spec in (warm, WorldSpec(1)):
        world = own.acquire(spec)
        assert world.run(add_up) == [1.0]
        own.release(world)
    assert len(own.replaced) == 1
    assert number.name in own.replaced[0]


def test_server_that_is_continued_in_time(own: Pool) -> None:
    """A server that was stopped for a moment, as by a job that is suspended, goes on."""
    found = launcher(own)
    os.kill(found.server_pid, signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(found.server_pid, signal.SIGCONT)
    world = own.acquire(WorldSpec(1))
    assert world.run(add_up) == [1.0]
    assert own.launcher() is found
    own.release(world)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_server_that_is_lost_while_it_starts(number: signal.Signals, tmp_path: Path) -> None:
    """A server that is lost before it is ready is an error that says so, long before the time limit."""
    (tmp_path / "never_imported.py").write_text("import time\ntime.sleep(1000)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        found = LocalLauncher(["never_imported"])
    finally:
        sys.path.remove(str(tmp_path))
    while not found.server_pid:
        found.poll()
    os.kill(found.server_pid, number)
    with pytest.raises(LaunchError, match=rf"{number.name}.*, before it was ready"):
        found.wait_ready()
    found.close()


@pytest.mark.parametrize("others", ["server", pytest.param("guardian", marks=pytest.mark.nightly)])
def test_controller_is_killed_with_another(others: str, tmp_path: Path) -> None:
    """If the controller is killed, and one of those below it at the same moment, the one that is left ends all."""
    process, pids = start("spawn", tmp_path)
    guardian = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    for pid in (process.pid, pids[0] if others == "server" else guardian):
        os.kill(pid, signal.SIGKILL)
    process.wait(60)
    started = [int((tmp_path / name).read_text()) for name in ("0", "1")]
    assert all_gone([*pids, *started, guardian], within=SOON)


def test_controller_is_killed_while_the_server_is_stopped(tmp_path: Path) -> None:
    """A server that can do nothing keeps nothing alive."""
    process, pids = start("spawn", tmp_path)
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    started = [int((tmp_path / name).read_text()) for name in ("0", "1")]
    assert all_gone([*pids, *started], within=SOON)


def test_server_that_reads_nothing() -> None:
    """Orders that nobody reads are given up, and the server is blamed."""
    found = LocalLauncher(["json"], patience=1)
    try:
        found.wait_ready()
        for pid in processes(found, "both"):
            os.kill(pid, signal.SIGSTOP)
        said = ""
        while not said:
            try:
                found._tell({"kill": 0})
            except LaunchError as e:
                said = str(e)
        assert "did not read for 1 s (it and its guardian had been stopped by a signal)" in said
        assert all_gone([found.guardian_pid, found.server_pid], within=SOON)
    finally:
        found.close()
