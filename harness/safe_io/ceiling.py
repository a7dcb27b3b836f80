"""A ceiling for memory and CPU time: code that exceeds it ends with an error, and does not exhaust the machine.

This is the last line of defense, for the unexpected: code that reads other people's files has its own bounds
(:mod:`harness.safe_io.untrusted`).
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Exceeded(ValueError):
    """An excess of memory or CPU time; the message says of which."""


@contextlib.contextmanager
def ceiling(memory: int, seconds: float) -> Iterator[None]:
    """Limit memory and CPU time inside the context.

    ``memory``: bytes that the process may allocate in addition to those that it has.  ``seconds``: CPU time.  The
    previous limits are restored.  Outside of the main thread, there is no time limit, because signals arrive only in
    the main thread.  Errors: :class:`Exceeded`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _addresses() + memory
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        with _timed(seconds):
            yield
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        raise Exceeded(f"took more than {memory >> 20} MiB of memory, so it was given up") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _timed(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_number: int, _frame: FrameType | None) -> None:
        raise Exceeded(f"took more than {seconds:g} s of CPU, so it was given up")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _addresses() -> int:
    """Return the size of the process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
