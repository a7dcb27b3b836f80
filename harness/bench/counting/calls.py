"""System calls of this process, counted by another one that traces it (:mod:`harness.bench.counting.tracer`)."""

from __future__ import annotations

import ctypes
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from harness.bench.counting import tracer
from harness.bench.counting.names import CALLS, SENDS

_SET_TRACER, _ANY = 0x59616D61, -1
_WAIT = 20.0


class NotTraced(RuntimeError):
    """System calls can't be counted here; the message says why."""


class SystemCalls:
    """Counts the system calls of the threads that this process has now, except Python's own besides the main one.

    Errors: :class:`NotTraced` if the kernel does not allow it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform != "linux" or not hasattr(threading, "get_native_id"):
            raise NotTraced("only on Linux")
        self._libc.prctl(_SET_TRACER, ctypes.c_ulong(_ANY & (1 << 64) - 1), 0, 0, 0)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(tracer.__file__)), *map(str, threads())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._line() != "ready":
            self._process.kill()
            _, said = self._process.communicate()
            raise NotTraced(said.strip().rpartition("\n")[2] or "the tracer does not start")

    def count(self, call: Callable[[], object]) -> dict[str, float]:
        """Return the system calls during a call, and those that send or write.

        Errors: :class:`NotTraced` if the tracer has gone.
        """
        self._libc.prctl(tracer.MARK, 0, 0, 0, 0)
        try:
            call()
        finally:
            self._libc.prctl(tracer.MARK, 0, 0, 0, 0)
        words = self._line().split()
        if len(words) != 2:
            raise NotTraced("the tracer has gone")
        return {CALLS: float(words[0]), SENDS: float(words[1])}

    def close(self) -> None:
        """End the tracer; this process goes on without one."""
        self._libc.prctl(tracer.END, 0, 0, 0, 0)
        self._libc.prctl(_SET_TRACER, 0, 0, 0, 0)
        try:
            self._process.communicate(timeout=_WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel lets the traced threads go
            self._process.communicate()

    def _line(self) -> str:
        output = self._process.stdout
        assert output is not None
        there, _, _ = select.select([output], [], [], _WAIT)
        return output.readline().strip() if there else ""


def threads() -> list[int]:
    """Return the threads whose system calls count: the main one, and all that are not Python's."""
    main = threading.main_thread()
    others = {thread.native_id for thread in threading.enumerate() if thread is not main}
    return sorted({int(path.name) for path in Path("/proc/self/task").iterdir()} - others)
