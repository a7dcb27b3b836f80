"""What every launcher of ranks needs: how it fails, how ranks end, what they print, what they take over from here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(RuntimeError):
    """The machinery that starts ranks does not work; says what it printed."""


class ServerLost(LaunchError):
    """What ranks are started from has ended after it had worked; another one may be made."""


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended."""

    status: int
    """As from :func:`os.wait`."""
    time_ns: int
    """Monotonic clock, when the server noticed."""
    maxrss_kib: int = 0
    left: tuple[str, ...] = ()
    """What it left running, now killed."""
    server: str = ""
    """Where it is no deed of the rank: what became of the server that the rank was forked from, and took it along."""

    @property
    def signal(self) -> signal.Signals | int | None:
        if not os.WIFSIGNALED(self.status):
            return None
        number = os.WTERMSIG(self.status)
        try:
            return signal.Signals(number)
        except ValueError:
            return number

    @property
    def code(self) -> int | None:
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
    """What a rank printed: the first and the last of it, however much it was."""

    HEAD = 256 * 1024
    TAIL = 256 * 1024

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
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
        head, tail = bytes(self._head), bytes(self._tail[-self.TAIL :])
        left_out = self.total - len(head) - len(tail)
        note = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return (head + note + tail).decode(errors="replace")


def import_path() -> list[str]:
    """``sys.path`` without what is no string, which the import system passes over as well."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def working_directory() -> str:
    """The current directory; empty if it is there no more."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """A copy of a rank's extra environment, checked: names and values must be strings."""
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"environment of a world: {key!r}={value!r}: names and values must be strings")
    return dict(extra)
