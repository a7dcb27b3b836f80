"""End what takes too much memory or time with an error instead of a traceback, or of the machine's.

This is the last line of defence, for what nobody thought of: code that reads other people's files has bounds of its own
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
    """Something took more than it may have; says of what."""


@contextlib.contextmanager
def ceiling(memory: int, seconds: float) -> Iterator[None]:
    """Limit what is done in here.

    ``memory``: bytes that the process may get on top of those that it has; ``seconds``: of CPU.  Limits are put back as
    they were.  Off the main thread there is no limit on time, as signals only arrive there.
    Errors: :class:`Exceeded`.
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
    """Bytes of addresses that the process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
