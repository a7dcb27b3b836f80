"""The warm process that ranks are forked from.

It is started fresh by the controller (never forked from it), imports torch and its lazy parts once, touches no
accelerator, and stays single-threaded, so that a fork of it is a clean and quick beginning for a rank.  It forks on
request, reaps, tells the controller how each rank ended, and sees to it that nothing stays behind: ranks die with
it, it dies with the controller, and what a rank forked and left is killed once that rank has gone.

The protocol on the control socket (a SOCK_SEQPACKET pair, so one message is one packet) is JSON:

- controller to server: ``{"spawn": token}`` with the rank's five file descriptors; ``{"kill": token}``
- server to controller: ``{"ready": pid, "threads": n}``, ``{"spawned": token, "pid": pid}``,
  ``{"exited": token, "status": wait status, "time_ns": monotonic, "maxrss_kib": n, "left": [what a rank left behind]}``
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

RANK_FDS = ("control", "monitor", "output", "box", "crash")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MOST_PACKET = 65536
_MOST_LEFT = 20  # left-overs that are named
_ORPHANED = signal.SIGUSR2
"""What the kernel sends when the thread that started the server ends, which need not be the controller's last."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends; ends at once if the parent has gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _preload(modules: list[str]) -> list[str]:
    """Import what ranks will need; say what could not be imported (another PyTorch may not have it)."""
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as e:
            missing.append(f"{name}: {e}")
    return missing


def _children() -> list[int]:
    """This process's children, ended ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as f:
            return [int(pid) for pid in f.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        mine = os.getpid()
        return [int(p) for p in os.listdir("/proc") if p.isdigit() and _stat(int(p))[0] == mine]


def _stat(pid: int) -> tuple[int, int]:
    """A process's parent and session, or zeros if it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rsplit(b")", 1)[1].split()
        return int(fields[1]), int(fields[3])
    except (OSError, IndexError):
        return 0, 0


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "?"


class _Server:
    def __init__(self, sock: socket.socket, parent: int) -> None:
        self.sock = sock
        self.pid = os.getpid()
        self.parent = parent
        self.pids: dict[int, int] = {}  # pid -> token
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, _ORPHANED):
            signal.signal(sig, lambda *_: None)  # seen through the wake-up pipe, as SIGCHLD is
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        poll.register(self.wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.wake_r:
                    signals = os.read(self.wake_r, 4096)
                    self.reap()
                    if signal.SIGTERM in signals or signal.SIGHUP in signals or os.getppid() != self.parent:
                        return
                elif not self.request():
                    return

    def request(self) -> bool:
        """Serve one message; False once the controller has gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _MOST_PACKET, len(RANK_FDS) + 1)
        except OSError:
            return False
        if not data:
            return False
        message: dict[str, Any] = json.loads(data)
        if "spawn" in message:
            self.spawn(message["spawn"], fds)
        elif "kill" in message:
            for pid, token in self.pids.items():
                if token == message["kill"]:
                    _kill_group(pid)
        return True

    def spawn(self, token: int, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self.become_rank(fds)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        for fd in fds:
            os.close(fd)
        self.pids[pid] = token
        self.tell({"spawned": token, "pid": pid})

    def become_rank(self, fds: list[int]) -> None:
        die_with_parent(self.pid)
        signal.set_wakeup_fd(-1)
        for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, _ORPHANED):
            signal.signal(sig, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.sock.close()
        os.close(self.wake_r)
        os.close(self.wake_w)
        os.setsid()
        named = dict(zip(RANK_FDS, fds, strict=False))
        os.dup2(named["output"], 1)
        os.dup2(named["output"], 2)
        os.close(named["output"])
        from harness.worlds import rank

        rank.main(named, listener=fds[len(RANK_FDS)] if len(fds) > len(RANK_FDS) else None)

    def reap(self) -> None:
        """Collect every process that has ended, and report those that were ranks."""
        ended: list[dict[str, Any]] = []
        reaped = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            reaped = True
            token = self.pids.pop(pid, None)
            if token is not None:
                when = time.monotonic_ns()
                ended.append({"exited": token, "status": status, "time_ns": when, "maxrss_kib": usage.ru_maxrss})
                ended[-1]["left"] = self.sweep(pid)
        if reaped and not ended:
            self.sweep(0)  # children of what was killed last time are ours now
        for message in ended:
            self.tell(message)

    def sweep(self, dead: int) -> list[str]:
        """Kill what a dead rank left: its process group, and orphans, which the kernel has handed to us."""
        left = []
        for pid in _children():
            if pid not in self.pids and _stat(pid)[1] not in self.pids:
                left.append(f"process {pid} ({_command_line(pid)})")
                _kill(pid)
        if dead:
            _kill_group(dead)
        return left if len(left) <= _MOST_LEFT else [*left[:_MOST_LEFT], f"{len(left) - _MOST_LEFT} more processes"]

    def tell(self, message: dict[str, Any]) -> None:
        try:
            self.sock.send(json.dumps(message).encode())
        except OSError:
            pass  # the controller has gone: the next read says so

    def end(self) -> None:
        """Leave nothing behind."""
        for pid in list(self.pids):
            _kill_group(pid)
        deadline = time.monotonic() + 2
        while self.pids and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        for pid in _children():
            _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def _kill_group(pid: int) -> None:
    _kill(pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def main(fd: int, parent: int, modules: list[str]) -> None:
    """Run the server on an inherited socket until the controller goes."""
    signal.signal(_ORPHANED, lambda *_: None if os.getppid() == parent else os._exit(0))
    die_with_parent(parent, _ORPHANED)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    missing = _preload(modules)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.set_inheritable(fd, False)
    server = _Server(socket.socket(fileno=fd), parent)
    # What has been imported is never garbage: keep it out of every rank's collections, and its pages shared.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    server.tell({"ready": server.pid, "threads": threads, "missing": missing})
    try:
        server.serve()
    finally:
        server.end()
        os._exit(0)
