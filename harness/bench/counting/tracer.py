"""Count the system calls of another process: ``python tracer.py THREAD...``.  Linux, standard library only.

It attaches to the threads of a process that stay the same (ptrace), says so with a line on its output, and counts the
system calls of all of them between two marks.  A mark is a system call of the process itself that the kernel refuses:
``prctl`` with :data:`MARK`.  So the window begins and ends exactly where the process says, whatever the delay.  At each
second mark it prints a line with the number of calls, and of those that send.  It detaches and ends at ``prctl`` with
:data:`END`, or with the process.

Errors: exit code 1, with the reason on the standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable

MARK = 0x436F6E63
"""The first argument of a ``prctl`` that is a mark."""
END = MARK + 1
"""The first argument of a ``prctl`` after which the tracer ends."""
PRCTL = {"x86_64": 157, "aarch64": 167}
SENDING = {"x86_64": {1, 18, 20, 44, 46, 296, 307}, "aarch64": {64, 66, 68, 70, 206, 211, 269}}
"""write, writev, pwrite64, pwritev, sendto, sendmsg, sendmmsg."""
_SYSCALL, _DETACH, _SEIZE, _INTERRUPT, _SYSCALL_INFO = 24, 17, 0x4206, 0x4207, 0x420E
_TRACE_SYSCALLS = 1
_ENTRY = 1
_WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> int:
    found = int(_libc.ptrace(request, thread, address, data))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _entered(thread: int) -> tuple[int, int] | None:
    """Return the number and first argument of the system call that a stopped thread enters; None at its exit."""
    info = ctypes.create_string_buffer(88)
    _ptrace(_SYSCALL_INFO, thread, len(info), ctypes.addressof(info))
    if info.raw[0] != _ENTRY:
        return None
    number, first = struct.unpack_from("QQ", info.raw, 24)
    return number, first


class Tracer:
    """The threads of a process that are traced, and how many system calls they have made since the last mark."""

    def __init__(self, threads: list[int]) -> None:
        self._threads = set(threads)
        self._prctl = PRCTL[os.uname().machine]
        self._sending = SENDING[os.uname().machine]
        self._counting = False
        self._calls = self._sends = 0
        for thread in threads:
            _ptrace(_SEIZE, thread, 0, _TRACE_SYSCALLS)
            _ptrace(_INTERRUPT, thread)

    def run(self, told: Callable[[int, int], None]) -> None:
        """Trace until the process says that it is enough, or ends.

        ``told``: gets the number of calls of a window, and of those that send or write.
        """
        while self._threads:
            thread, status = self._waited()
            if not os.WIFSTOPPED(status):
                self._threads.discard(thread)
                continue
            if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
                entered = _entered(thread)
                if entered == (self._prctl, END):
                    self._detach(thread)
                    return
                if entered == (self._prctl, MARK):
                    self._counting = not self._counting
                    if not self._counting:
                        told(self._calls, self._sends)
                    self._calls = self._sends = 0
                elif entered is not None and self._counting:
                    self._calls += 1
                    self._sends += entered[0] in self._sending
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_SYSCALL, thread, 0, _signal_of(status))

    def _waited(self) -> tuple[int, int]:
        try:
            return os.waitpid(-1, _WALL)
        except ChildProcessError:
            return next(iter(self._threads)), 0

    def _detach(self, stopped: int) -> None:
        """Let all threads go, of which one is stopped."""
        waiting = self._threads - {stopped}
        for thread in waiting:
            with contextlib.suppress(OSError):
                _ptrace(_INTERRUPT, thread)
        _ptrace(_DETACH, stopped)
        while waiting:
            try:
                thread, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return
            if os.WIFSTOPPED(status):
                with contextlib.suppress(OSError):
                    _ptrace(_DETACH, thread, 0, _signal_of(status))
            waiting.discard(thread)


def _signal_of(status: int) -> int:
    """Return the signal with which a thread has stopped and which it has to get; 0 if it stopped for the tracer."""
    stop = os.WSTOPSIG(status)
    return 0 if status >> 16 or stop == signal.SIGTRAP | 0x80 else stop


def main(arguments: list[str]) -> int:
    """Trace the threads with these numbers."""
    try:
        tracer = Tracer([int(word) for word in arguments])
    except (OSError, KeyError) as e:
        print(f"no tracing: {e}", file=sys.stderr)
        return 1
    print("ready", flush=True)
    tracer.run(lambda *counts: print(*counts, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
