"""The parts that every launcher of ranks needs: errors, the ends of ranks, their output, and what they inherit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The variable that keeps torch from importing the packages with an entry point ``torch.backends``, if it is 0."""


class LaunchError(RuntimeError):
    """The machinery that starts ranks does not work; the message includes what it printed."""


class ServerLost(LaunchError):
    """The server that ranks are started from has ended after it had worked; a new one may be started."""


@dataclass(frozen=True)
class Exit:
    """The end of a rank's process."""

    status: int
    """The wait status, as from :func:`os.wait`."""
    time_ns: int
    """When the server noticed the end, on the monotonic clock."""
    maxrss_kib: int = 0
    left: tuple[str, ...] = ()
    """Processes that it left running, which have been killed."""
    server: str = ""
    """What became of the server that the rank was forked from, if the rank ended because of that; else empty."""
    error_ns: int = 0
    """By how much ``time_ns`` may be wrong, if the clock of another host told it."""

    @property
    def signal(self) -> signal.Signals | int | None:
        """The signal that killed it; None if it exited."""
        if not os.WIFSIGNALED(self.status):
            return None
        number = os.WTERMSIG(self.status)
        try:
            return signal.Signals(number)
        except ValueError:
            return number

    @property
    def code(self) -> int | None:
        """Its exit code; None if a signal killed it."""
        return os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None

    @property
    def clean(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            name = self.signal.name if isinstance(self.signal, signal.Signals) else f"signal {self.signal}"
            hint = {"SIGKILL": " (by someone, or by the kernel for want of memory)"}.get(name, "")
            return f"killed by {name}{hint}"
        return f"exited with code {self.code}"


class Output:
    """The output of a rank: its beginning and its end, so that its size is bounded."""

    HEAD = 256 * 1024
    TAIL = 256 * 1024

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Append what the rank has printed."""
        self.total += len(data)
        room = self.HEAD - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self.TAIL:
                del self._tail[: -self.TAIL]

    def text(self) -> str:
        """Return the output as text, with a note where bytes are left out."""
        head, tail = bytes(self._head), bytes(self._tail[-self.TAIL :])
        left_out = self.total - len(head) - len(tail)
        note = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return (head + note + tail).decode(errors="replace")


def import_path() -> list[str]:
    """Return ``sys.path`` without entries that are not strings, which the import system ignores as well."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def working_directory() -> str:
    """Return the current directory; empty if it no longer exists."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """Copy a rank's extra environment.  Errors: TypeError for a name or value that is not a string."""
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"environment of a world: {key!r}={value!r}: names and values must be strings")
    return dict(extra)
