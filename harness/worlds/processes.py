"""Inspection and killing of processes, shared by the server and its guardian.

Nothing here imports torch, or anything else that takes time: the guardian must be up at once, and stay small.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)

ORPHANED = signal.SIGUSR2
"""The signal that the kernel sends to a process when the thread that started it ends; the parent may still have other
threads."""

MARK = "CONCORD_SERVER"
"""Environment variable of every process below a guardian; its value is the guardian's own hexadecimal number."""
_ROUNDS = 50

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends; exits at once if the parent has gone already."""
    libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Ask the kernel to make this process the parent of any descendant that loses its own."""
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Return the pids of this process's children, including those that have ended."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as f:
            return [int(pid) for pid in f.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        mine = os.getpid()
        return [int(p) for p in os.listdir("/proc") if p.isdigit() and parent_and_session(int(p))[0] == mine]


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process's ``stat`` file in /proc, from its state on; [] if it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return []


def parent_and_session(pid: int) -> tuple[int, int]:
    """Return a process's parent and session, or zeros if it has gone."""
    fields = _stat(pid)
    return (int(fields[1]), int(fields[3])) if len(fields) > 3 else (0, 0)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process.  A process that a debugger holds does not count."""
    return _stat(pid)[:1] == [b"T"]


def command_line(pid: int) -> str:
    """Return the first 120 characters of a process's command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "?"


def kill(pid: int) -> None:
    """Kill a process, if it exists."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def kill_group(pid: int) -> None:
    """Kill a process and the group that it leads."""
    kill(pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def end_children(until: float, ended: Callable[[int, int], None] = lambda pid, status: None) -> bool:
    """Kill everything below this process, which must be a sub-reaper: it adopts descendants as their parents end.

    ``until``: when to give up, on the monotonic clock; ``ended``: called with the pid and wait status of each child.
    Returns whether nothing is left.
    """
    while True:
        for pid in children():
            kill(pid)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                break
            ended(pid, status)
        if time.monotonic() > until:
            return False
        time.sleep(0.002)


def mark_below() -> None:
    """Mark this process, and everything that it starts, with a harmless resource limit: real-time CPU time.

    A program inherits the limit even if it is started without the environment, and only root can raise the limit again.
    """
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (_limit(os.environ[MARK]),) * 2)
    except (KeyError, ValueError, OSError):
        pass  # there is a lower limit already, and the environment must do


def _limit(mark: str) -> int:
    """Return the limit for a mark: microseconds that no process ever reaches, and that no other server uses."""
    return 1 << 61 | int(mark, 16) % (1 << 60)


def namespace_of(pid: int) -> int:
    """Return a descriptor that keeps a process's network namespace, and its number, in use.

    Returns -1 if the namespace is that of this process, or can't be opened.
    """
    try:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    if os.path.samestat(os.fstat(fd), os.stat("/proc/self/ns/net")):
        os.close(fd)
        return -1
    return fd


def kill_marked(mark: str, network: int = -1) -> None:
    """Kill this user's processes below a server when no process above them is left that could find them otherwise.

    ``mark``: the value of :data:`MARK` for that server; ``network``: a descriptor from :func:`namespace_of`, or -1.
    """
    for _ in range(_ROUNDS):  # one of them may start another in the meantime
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and _is_marked(entry, mark, network)]
        for pid in pids:
            kill(pid)
        if not pids:
            return
        time.sleep(0.002)


def _is_marked(entry: str, mark: str, network: int) -> bool:
    if int(entry) == os.getpid() or _stat(int(entry))[:1] in ([], [b"Z"], [b"X"]):
        return False
    try:
        with open(f"/proc/{entry}/environ", "rb") as f:
            if f"{MARK}={mark}".encode() in f.read().split(b"\0"):
                return True
        with open(f"/proc/{entry}/limits", "rb") as f:
            limits = next((line.split() for line in f if line.startswith(b"Max realtime timeout")), [b"", b""])
        if limits[-2] == str(_limit(mark)).encode():  # the hard limit, which precedes the unit
            return True
        return network >= 0 and os.path.samestat(os.stat(f"/proc/{entry}/ns/net"), os.fstat(network))
    except OSError:
        return False  # it has gone, or is another user's
