"""What checking an input costs: in a forked process, with its time and the most memory that it had."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

SECONDS = 5.0
MEMORY = 300 << 20
"""What no input may take more of: seconds of CPU, and bytes of resident memory, those of `concord` itself included."""
_OWN = 50 << 20
"""Bytes that `concord verify` has before it reads anything; pytest's process, which is forked here, may have more."""
_PATIENCE = 30
_ADDRESSES = 4 << 30


@dataclass(frozen=True)
class Cost:
    """What came of one input."""

    said: str
    """What the check said of it, the traceback of an error that is none of ours, or how the process died."""
    unexpected: bool
    """Whether it was such an error, or the process's death."""
    seconds: float
    memory: int
    """Bytes: the most that the process had while it was at it."""

    @property
    def wrong(self) -> str:
        """Why this must not be; empty if all is well."""
        if self.unexpected:
            return self.said
        if self.seconds > SECONDS:
            return f"took {self.seconds:.1f} s"
        if self.memory > MEMORY:
            return f"took {self.memory >> 20} MiB"
        return ""


class Worker:
    """A process that checks one input after the other, and is replaced when one kills it."""

    def __init__(self, check: Callable[[bytes], str], expected: tuple[type[Exception], ...]) -> None:
        self._check, self._expected = check, expected
        self._pid = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def cost(self, data: bytes) -> Cost:
        """Check an input."""
        if not self._pid:
            self._begin()
        try:
            _send(self._to, data)
            return pickle.loads(_receive(self._back))
        except (EOFError, BrokenPipeError):
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            os.close(self._to)
            os.close(self._back)
            return Cost(f"died: wait status {status} (SIGXCPU: {_PATIENCE} s of CPU)", True, float("inf"), 0)

    def _begin(self) -> None:
        theirs, self._to = os.pipe()
        self._back, ours = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(theirs)
            os.close(ours)
            return
        try:
            os.close(self._to)
            os.close(self._back)
            most = _status("VmSize:") + _ADDRESSES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            self._before = _status("VmRSS:")
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            while True:
                _send(ours, pickle.dumps(self._measured(_receive(theirs))))
        except BaseException:  # the parent closed its end, or is gone: this process must not return into pytest
            os._exit(0)

    def _measured(self, data: bytes) -> Cost:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark of resident memory begins anew
        signal.setitimer(signal.ITIMER_PROF, _PATIENCE)
        begun = time.process_time()
        try:
            said, unexpected = self._check(data), False
        except self._expected as e:
            said = str(e)
            unexpected = "\n" in said or not said
        except BaseException:
            said, unexpected = traceback.format_exc(), True
        seconds = time.process_time() - begun
        signal.setitimer(signal.ITIMER_PROF, 0)
        return Cost(said[-4000:], unexpected, seconds, _OWN + max(0, _status("VmHWM:") - self._before))

    def _end(self) -> None:
        if self._pid:
            os.close(self._to)
            os.close(self._back)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _status(key: str) -> int:
    """Bytes, as the kernel says them of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))


def _send(fd: int, data: bytes) -> None:
    rest = memoryview(struct.pack("<Q", len(data)) + data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _receive(fd: int) -> bytes:
    (length,) = struct.unpack("<Q", _exactly(fd, 8))
    return _exactly(fd, length)


def _exactly(fd: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(fd, min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


assert sys.platform == "linux"
