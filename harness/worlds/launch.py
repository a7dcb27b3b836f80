"""The controller's end of a rank, and what every launcher of ranks does."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.worlds import wire
from harness.worlds.blackbox import CRASH_SIZE, BlackBox
from harness.worlds.rank import STACK_SIGNAL, RankSetup

_MOST_SNAPSHOT = 8 << 20  # bytes of a monitor's answer


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


@dataclass
class RankProcess:
    """The controller's end of one rank."""

    index: int
    token: int
    control: socket.socket
    monitor: socket.socket
    output_fd: int
    box: BlackBox
    crash_fd: int
    pid: int = 0
    exit: Exit | None = None
    output: Output = field(default_factory=Output)
    reader: wire.FrameReader = field(init=False)
    control_there: int = 0
    """The rank's descriptor of its end of the control channel; 0 as long as it has not said."""
    _crash_read: int = 0
    _monitor_bytes: bytearray = field(default_factory=bytearray)
    _asked: int = 0
    monitor_lost: bool = False
    """Whether something that is no answer came from the monitor: nothing else that comes from it can be read."""
    closed: bool = False
    output_closed: bool = False

    def __post_init__(self) -> None:
        self.control.setblocking(False)
        self.monitor.setblocking(False)
        os.set_blocking(self.output_fd, False)
        self.reader = wire.FrameReader(self.control)

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        """Write a frame to the rank.  Errors: :class:`WireError` if it has gone, or does not read for ``timeout`` s."""
        self.control.settimeout(timeout)
        try:
            wire.send_parts(self.control, frame)
        finally:
            self.control.setblocking(False)

    def drain_output(self, most: int = 1 << 22) -> bytes:
        """Take what the rank has printed since the last time, at most about ``most`` bytes; never waits."""
        taken = bytearray()
        while len(taken) < most:
            try:
                data = os.read(self.output_fd, 65536)
            except OSError:
                break
            if not data:
                self.output_closed = True
                break
            taken += data
        self.output.add(bytes(taken))
        return bytes(taken)

    # evidence

    def ask_snapshot(self) -> None:
        """Ask the monitor thread where the rank is; :meth:`take_snapshot` has the answer once it came."""
        if self._asked == 0 and not self.monitor_lost:
            try:
                # What came without a question would be taken for the answer to this one.
                self.monitor_lost = bool(self._monitor_bytes or self.monitor.recv(1, socket.MSG_PEEK))
            except OSError:
                pass
            try:
                self.monitor.send(b"s")
                self._asked = 1
            except OSError:
                pass

    def take_snapshot(self) -> dict[str, Any] | None:
        """The monitor's answer, or None as long as it is not there; empty if nothing can be read of it."""
        if self.monitor_lost:
            return {}
        try:
            while len(self._monitor_bytes) <= _MOST_SNAPSHOT and (data := self.monitor.recv(1 << 16)):
                self._monitor_bytes += data
        except OSError:
            pass
        if len(self._monitor_bytes) < 4:
            return None
        (length,) = struct.unpack_from("!I", self._monitor_bytes)
        if length > _MOST_SNAPSHOT:
            self.monitor_lost = True
            return {}
        if len(self._monitor_bytes) < 4 + length:
            return None
        try:
            answer = json.loads(bytes(self._monitor_bytes[4 : 4 + length]))
        except (ValueError, RecursionError):
            answer = None
        del self._monitor_bytes[: 4 + length]
        self._asked = 0
        return answer if isinstance(answer, dict) else {}

    def ask_stack(self) -> None:
        """Make the rank dump its Python stacks from a signal handler: works without its interpreter lock."""
        self.crash_text()
        if self.exit is None and self.pid:
            try:
                os.kill(self.pid, STACK_SIGNAL)
            except OSError:
                pass

    def stack_is_there(self) -> bool:
        """Whether the stack that :meth:`ask_stack` asked for has been written, or never will be."""
        return self.exit is not None or not has_yet_to_handle(self.pid, STACK_SIGNAL)

    def crash_text(self) -> str:
        """What faulthandler has written since the last call."""
        data = os.pread(self.crash_fd, CRASH_SIZE, self._crash_read).split(b"\0", 1)[0]
        self._crash_read += len(data)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Give back every descriptor."""
        if not self.closed:
            self.closed = True
            self.control.close()
            self.monitor.close()
            os.close(self.output_fd)
            os.close(self.crash_fd)
            self.box.close()


class Launcher(Protocol):
    """Starts ranks somewhere and tells how they end."""

    def spawn(self, setups: Sequence[RankSetup]) -> list[RankProcess]:
        """Start a rank for each set-up.  Returns at once; the ranks report for themselves."""
        ...

    def kill(self, process: RankProcess) -> None:
        """Kill a rank and all that it started."""
        ...

    def fileno(self) -> int:
        """Readable when :meth:`poll` has something to do."""
        ...

    def poll(self) -> None:
        """Note which ranks have ended: sets :attr:`RankProcess.exit`."""
        ...

    def check(self) -> bool:
        """See to it that silence is no fault of the launcher's own: called again and again while ranks are waited for.

        Returns whether anything has been noted, as by :meth:`poll`.
        """
        ...

    def close(self) -> None:
        """Kill all ranks and stop."""
        ...


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


def has_yet_to_handle(pid: int, number: int) -> bool:
    """Whether a signal that a process was sent waits for its main thread, or is being handled there.

    False for one that has gone, and for one that has been stopped: it handles nothing.
    """
    try:
        with open(f"/proc/{pid}/status") as f:
            status = dict(line.split(":", 1) for line in f)
        if status["State"].split()[0] in "TtZX":
            return False
        masks = [int(status[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk")]  # blocked while it is handled
    except (OSError, ValueError, LookupError):
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)


def kernel_state(pid: int) -> tuple[str, int, list[str]]:
    """A process as the kernel sees it: state of its main thread, CPU ticks used by all threads, states of all threads.

    ``("", 0, [])`` if it has gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rsplit(b")", 1)[1].split()
        states = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as f:
                states.append(f.read().rsplit(b")", 1)[1].split()[0].decode())
        return fields[0].decode(), int(fields[11]) + int(fields[12]), states
    except (OSError, IndexError):
        return "", 0, []
