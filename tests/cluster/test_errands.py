"""Processes that agents execute for a session: what stands for them here is like them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from harness.cluster import credentials
from harness.cluster.errands import FOLDER, HOST_LOST, REFUSED, SOCKET
from tests.cluster.conftest import Agent, gone

Errand = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    """Where the streams of processes arrive."""
    with Listener(str(tmp_path / "stream"), "AF_UNIX") as found:
        yield found


@pytest.fixture
def errand(start: Callable[..., Agent], key_file: Path, tmp_path: Path) -> Iterator[Errand]:
    """``errand(code, *arguments, env=…)`` executes code on an agent's host; ``agent=`` names another than the first."""
    started = []
    first = start()

    def run(code: str, *arguments: str, agent: Agent = first, key: str = "", **env: str) -> subprocess.Popen[str]:
        host, port = agent.address
        variables = json.dumps({"STREAM": f"{FOLDER}/{SOCKET}", **env})
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness.cluster.errand", host, str(port), str(tmp_path), variables),
                *(str(tmp_path / "stream"), "-c", textwrap.dedent(code), *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(key or credentials.read(key_file))
        process.stdin.close()
        process.stdin = None
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


ECHO = """
    import os
    from multiprocessing.connection import Client
    with Client(os.environ["STREAM"]) as stream:
        try:
            while True:
                stream.send_bytes(stream.recv_bytes())
        except EOFError:
            print("the end")
"""


def test_like_a_process_here(errand: Errand, tmp_path: Path) -> None:
    """It has the arguments, variables and folder that were given; its output and its exit status are ours."""
    process = errand(
        """
        import os, sys
        print(sys.argv[1], os.environ["WORD"], os.getcwd(), flush=True)
        print("as an error", file=sys.stderr)
        sys.exit(7)
        """,
        "argument",
        WORD="variable",
    )
    said, errors = process.communicate(timeout=30)
    assert said.splitlines() == [f"argument variable {tmp_path}", "as an error"]
    assert (process.returncode, errors) == (7, "")


def test_its_folder_goes_with_it(errand: Errand) -> None:
    """A folder of its own is there while it runs, and what it left in it is removed."""
    code = "import os; f = os.environ['HERE']; open(f + '/left', 'w').close(); print(os.path.isdir(f), f)"
    said, _ = errand(code, HERE=FOLDER).communicate(timeout=30)
    there, folder = said.split()
    assert there == "True"
    assert not Path(folder).exists()


@pytest.mark.parametrize("size", [0, 1, 100_000, 30_000_000])
def test_stream(size: int, errand: Errand, listener: Listener) -> None:
    """Messages of any size go there and back; our end of the stream ends theirs."""
    process = errand(ECHO)
    with listener.accept() as stream:
        for byte in (b"a", b"b"):
            stream.send_bytes(byte * size)
            assert stream.recv_bytes() == byte * size
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "the end\n")


def test_what_was_said_before_the_end(errand: Errand, listener: Listener) -> None:
    """All of it arrives, though the process ends at once, and something that it has started does not."""
    process = errand(
        """
        import os, subprocess, sys
        from multiprocessing.connection import Client
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Client(os.environ["STREAM"]).send_bytes(b"x" * 5_000_000)
        sys.stdout.write("y" * 5_000_000)
        sys.stdout.flush()
        os._exit(0)
        """
    )
    with listener.accept() as stream:
        assert len(stream.recv_bytes()) == 5_000_000
        with pytest.raises(EOFError):
            stream.recv_bytes()
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, len(said)) == (0, 5_000_000)


def test_signals(errand: Errand) -> None:
    """A process that a signal has ended has the status that a shell would say."""
    process = errand("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGSEGV


SLEEPS = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(100)
"""


def pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(pid) for pid in process.stdout.readline().split()]


def test_nobody_waits_for_it(errand: Errand) -> None:
    """When what stands for it is killed, it is killed, and what it has started."""
    process = errand(SLEEPS)
    there = pids(process)
    process.kill()
    assert all(gone(pid) for pid in there)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_agent_ends(number: int, start: Callable[..., Agent], errand: Errand) -> None:
    """When the agent ends, so does the process, and it is said that the host has gone."""
    agent = start()
    process = errand(SLEEPS, agent=agent)
    first, _ = pids(process)
    agent.end(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == HOST_LOST
    assert f"127.0.0.1:{agent.address[1]}) has gone" in errors
    assert gone(first)


def test_host_is_frozen(start: Callable[..., Agent], errand: Errand) -> None:
    """A host that does not answer is given up."""
    agent = start()
    process = errand(SLEEPS, agent=agent)
    pids(process)
    session = int(Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split()[0])
    os.kill(session, signal.SIGSTOP)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        os.kill(session, signal.SIGCONT)
    assert process.returncode == HOST_LOST
    assert "did not answer for 10 s" in errors


def test_refused(start: Callable[..., Agent], errand: Errand) -> None:
    """A wrong key, and a port where nobody listens, are said in a line."""
    wrong = errand("pass", key=credentials.made())
    _, errors = wrong.communicate(timeout=30)
    assert (wrong.returncode, "not an agent with our key" in errors) == (REFUSED, True), errors
    agent = start()
    agent.end()
    nobody = errand("pass", agent=agent)
    _, errors = nobody.communicate(timeout=30)
    assert (nobody.returncode, "no agent answers" in errors) == (REFUSED, True), errors


def test_several_at_once(errand: Errand) -> None:
    """They do not wait for each other."""
    began = time.monotonic()
    several = [errand("import time; time.sleep(2); print('done')") for _ in range(3)]
    assert [process.communicate(timeout=30)[0] for process in several] == ["done\n"] * 3
    assert time.monotonic() - began < 15
