"""What asks a kernel, or holds a descriptor, is below the seam of :mod:`harness.worlds.handle`."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

WORLDS = Path(__file__).parents[2] / "harness" / "worlds"

BELOW = {
    "blackbox": "the page that a rank on this host shares with the controller",
    "debugging": "runs on the rank",
    "guardian": "the process above the server",
    "listening": "waits for ranks on this host",
    "local": "starts ranks on this host",
    "local_rank": "the handle of a rank on this host",
    "segments": "shared memory of processes on this host",
    "monitor": "runs on the rank",
    "network": "gives the server a network of its own",
    "pages": "runs in the server, on the ranks' host",
    "processes": "processes as this kernel shows and ends them",
    "rank": "runs on the rank",
    "residue": "runs on the rank",
    "runtimes": "runs in the server, on the ranks' host",
    "server": "runs on the ranks' host",
    "tables": "runs in the server, and tells it from ranks",
    "unpickling": "runs in the process that reads results first",
    "wire": "frames on a socket, for both ends of one",
}
"""Files that may ask the kernel or hold a descriptor, and what they are for."""

MODULES = {"fcntl", "mmap", "multiprocessing", "resource", "select", "selectors", "socket", "subprocess"}
CALLS = re.compile(
    r"os\.(kill|killpg|fork|wait\w*|pidfd_\w+|memfd_create|open|fdopen|read|write|pread|pwrite|pipe2?|dup2?|ttyname|"
    r"set_blocking|ftruncate|getpid|getppid|sched_\w+)|signal\.(signal|pthread_\w+|pidfd_\w+|pause)|socket\.\w+|open"
)
FILES = re.compile(r"/(proc|sys|dev)\b")

BY_THE_LAUNCHERS_CLOCK = ("observing", "postmortem", "rank_set", "waiting", "watchdog", "world")
LOCAL = {
    f"harness.worlds.{name}"
    for name in ("local", "local_rank", "listening", "guardian", "processes", "segments", "server")
}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, and of what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def of_this_host(path: Path) -> set[str]:
    """What a file does that only works where its process runs: modules, calls, and files of the kernel's."""
    found = imported(path) & MODULES
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and CALLS.fullmatch(called := ast.unparse(node.func)):
            found.add(called)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and FILES.match(node.value):
            found.add(node.value)
    return found


def names() -> list[str]:
    return sorted(path.stem for path in WORLDS.glob("*.py"))


@pytest.mark.parametrize("name", [name for name in names() if name not in BELOW])
def test_no_kernel_above_the_seam(name: str) -> None:
    """Nothing above the seam reads this host's kernel, signals a process, or holds a descriptor."""
    assert of_this_host(WORLDS / f"{name}.py") == set()


@pytest.mark.parametrize("name", [name for name in names() if name not in BELOW and name != "pool"])
def test_no_local_rank_above_the_seam(name: str) -> None:
    """Only the pool knows the local launcher, as the one that it starts unless it is given another."""
    assert imported(WORLDS / f"{name}.py") & LOCAL == set()


@pytest.mark.parametrize("name", BELOW)
def test_exceptions_are_needed(name: str) -> None:
    """What is said to be below the seam needs to be there."""
    assert of_this_host(WORLDS / f"{name}.py") != set()


@pytest.mark.parametrize("name", BY_THE_LAUNCHERS_CLOCK)
def test_time_is_the_launchers(name: str) -> None:
    """Whoever waits for ranks asks the launcher what time it is, and never sleeps."""
    assert "time" not in imported(WORLDS / f"{name}.py")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import select", {"select"}),
        ("from socket import socketpair", {"socket"}),
        ("os.kill(pid, 9)", {"os.kill"}),
        ("signal.pidfd_send_signal(fd, 9)", {"signal.pidfd_send_signal"}),
        ("open(f'/proc/{pid}/stat')", {"open", "/proc/"}),
        ("path = '/sys/kernel'", {"/sys/kernel"}),
        ("signal.Signals(9), rank.kill(), os.path.join('a', 'process')", set()),
    ],
)
def test_this_host_is_recognised(tmp_path: Path, line: str, expected: set[str]) -> None:
    """What works on this host only is found in whatever way it is written."""
    path = tmp_path / "x.py"
    path.write_text(line)
    assert of_this_host(path) == expected
