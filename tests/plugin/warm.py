"""A warm process that has imported torch, and from which sessions of pytest are forked.

A session's own import of torch costs seconds of CPU, and the tests have hundreds of sessions.  A forked one differs
from ``python -m pytest`` in that torch and numpy are already imported, and in ``/proc/<pid>/cmdline`` and ``environ``,
which are the warm process's.  A session whose environment could matter to those imports is started afresh.

Run as a script, this module is the warm process; it imports nothing of Concord or pytest.
"""

from __future__ import annotations

import array
import atexit
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_READ_AT_START = ("PYTHON", "TORCH", "OMP_", "MKL_", "OPENBLAS_", "LD_", "LC_", "LANG", "CUDA_")
_MOST = 1 << 17  # bytes of a request


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether nothing of an environment is read when Python or torch start."""
    return not any(name.startswith(_READ_AT_START) for name in env)


class Forked:
    """A forked session, with the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns its exit code, minus the signal that killed it."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("pytest", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._status.recv(64) or b"9"))
            self._status.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless its end was seen."""
        if self.returncode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class Warm:
    """The warm process of this test process, started when it is first needed."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], files: Sequence[int]) -> Forked:
        """Fork ``python -m pytest ARGUMENTS``, with ``files`` as its standard input, output and error."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([list(arguments), str(cwd), dict(env)]).encode()
            assert len(request) < _MOST
            rights = array.array("i", [theirs.fileno(), *files])
            self._connected().sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        return Forked(int(ours.recv(64)), ours)

    def _connected(self) -> socket.socket:
        if self._socket is None or self._owner != os.getpid():
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._owner = os.getpid()
            with theirs:
                # OpenBLAS starts its threads at import, and threads do not survive a fork.
                env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
                command = [sys.executable, __file__, str(theirs.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL)
        return self._socket


WARM = Warm()


def _serve(requests: socket.socket) -> NoReturn:
    import numpy as np  # noqa: F401 - imported for the sessions
    import torch  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        data, ancillary, _, _ = requests.recvmsg(_MOST, socket.CMSG_SPACE(16))
        if not data:
            os._exit(0)
        fds = array.array("i", ancillary[0][2])
        if os.fork() == 0:
            requests.close()
            _watch(socket.socket(fileno=fds[0]), *json.loads(data), files=fds[1:])
        for fd in fds:
            os.close(fd)


def _watch(
    status: socket.socket, arguments: list[str], cwd: str, env: dict[str, str], files: Sequence[int]
) -> NoReturn:
    """Fork the session, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        status.close()
        _become(arguments, cwd, env, files)
    for fd in (*files, 0, 1, 2):
        os.close(fd)
    status.send(str(pid).encode())
    _, ended = os.waitpid(pid, 0)
    status.send(str(ended).encode())
    os._exit(0)


def _become(arguments: list[str], cwd: str, env: dict[str, str], files: Sequence[int]) -> NoReturn:
    """Become what ``python -m pytest`` is before its first line."""
    for target, fd in enumerate(files):
        os.dup2(fd, target)
    for fd in set(files):
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, errors="backslashreplace", line_buffering=True)  # type: ignore[misc]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[0] = cwd
    sys.orig_argv = [sys.executable, "-m", "pytest", *arguments]
    sys.argv = ["-m", *arguments]
    random.seed()
    sys.modules["numpy"].random.seed()
    time.tzset()
    code = 0
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # Python's own end takes half a second to free torch, all of which the warm process shares.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _stream(fd: int, *, errors: str = "strict", line_buffering: bool = False) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors, line_buffering=line_buffering or os.isatty(fd))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
