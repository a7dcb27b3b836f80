"""A rank on this host: its descriptors, the files that it shares, and its process as this kernel sees it."""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.worlds import wire
from harness.worlds.blackbox import CRASH_SIZE, BlackBox
from harness.worlds.handle import HERE, Frame, KernelState, Place
from harness.worlds.launch import Exit
from harness.worlds.rank import STACK_SIGNAL

_MOST_SNAPSHOT = 8 << 20  # bytes of a monitor's answer


@dataclass(eq=False)
class LocalRank:
    """The handle of a rank on this host; see :class:`~harness.worlds.handle.RankHandle`.

    ``token``: the name by which the server knows it.  The object takes ownership of the descriptors.
    """

    index: int
    token: int
    control: socket.socket
    monitor: socket.socket
    output_fd: int
    box: BlackBox
    crash_fd: int
    pid: int = 0
    exit: Exit | None = None
    reader: wire.FrameReader = field(init=False)
    receive: Callable[[], Frame | None] = field(init=False)
    monitor_lost: bool = False
    output_closed: bool = False
    closed: bool = False
    _crash_read: int = 0
    _monitor_bytes: bytearray = field(default_factory=bytearray)
    _asked: bool = False

    def __post_init__(self) -> None:
        self.control.setblocking(False)
        self.monitor.setblocking(False)
        os.set_blocking(self.output_fd, False)
        self.reader = wire.FrameReader(self.control)
        self.receive = self.reader.read  # saves a call for every answer

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        if len(frame) == 1:
            # The socket takes a small frame at once, and nearly all are small.  Other ranks are waiting for theirs.
            try:
                sent = self.control.send(frame[0])
            except BlockingIOError:
                sent = 0
            except OSError as e:
                raise wire.WireError(f"the peer has gone ({e.strerror or e})") from e
            if sent == len(frame[0]):
                return
            frame = [frame[0][sent:]]
        self.control.settimeout(timeout)
        try:
            wire.send_parts(self.control, frame)
        finally:
            self.control.setblocking(False)

    def offer(self, data: memoryview) -> int:
        """Send as much as the rank's socket takes now, and return how many bytes that is.

        For callers that must not wait.  Errors: :class:`~harness.worlds.wire.WireError` if the rank has gone.
        """
        try:
            return self.control.send(data)
        except BlockingIOError:
            return 0
        except OSError as e:
            raise wire.WireError(f"the peer has gone ({e.strerror or e})") from e

    @property
    def more(self) -> bool:
        return bool(self.reader.ahead)

    @property
    def begun(self) -> str:
        return self.reader.begun

    def take_output(self, most: int = 1 << 22) -> bytes:
        """Take about ``most`` bytes of output at most; see :class:`~harness.worlds.handle.RankHandle`."""
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
        return bytes(taken)

    def lend(self, stdin: int, stdout: int) -> None:
        self.send(wire.dumps((_ways_to(stdin), _ways_to(stdout))))

    # evidence

    def ask_snapshot(self) -> None:
        if self._asked or self.monitor_lost:
            return
        try:
            # Bytes that came without a question would be taken for the answer to this one.
            self.monitor_lost = bool(self._monitor_bytes or self.monitor.recv(1, socket.MSG_PEEK))
        except OSError:
            pass
        try:
            self.monitor.send(b"s")
            self._asked = True
        except OSError:
            pass

    def take_snapshot(self) -> dict[str, Any] | None:
        if self.monitor_lost:
            return {}
        at_end = False
        try:
            while len(self._monitor_bytes) <= _MOST_SNAPSHOT:
                data = self.monitor.recv(1 << 16)
                self._monitor_bytes += data
                if at_end := not data:
                    break
        except BlockingIOError:
            pass
        except OSError:
            at_end = True
        length = struct.unpack_from("!I", self._monitor_bytes)[0] if len(self._monitor_bytes) >= 4 else 0
        if length > _MOST_SNAPSHOT:
            self.monitor_lost = True
            return {}
        if len(self._monitor_bytes) < 4 + length:
            return {} if at_end else None
        try:
            answer = json.loads(bytes(self._monitor_bytes[4 : 4 + length]))
        except (ValueError, RecursionError):
            answer = None
        del self._monitor_bytes[: 4 + length]
        self._asked = False
        return answer if isinstance(answer, dict) else {}

    def ask_stack(self) -> None:
        self.crash_text()
        if self.exit is None and self.pid:
            try:
                os.kill(self.pid, STACK_SIGNAL)
            except OSError:
                pass

    def stack_is_there(self) -> bool:
        return self.exit is not None or not has_yet_to_handle(self.pid, STACK_SIGNAL)

    def crash_text(self) -> str:
        data = os.pread(self.crash_fd, CRASH_SIZE, self._crash_read).split(b"\0", 1)[0]
        self._crash_read += len(data)
        return data.decode(errors="replace")

    def kernel_state(self) -> KernelState:
        return kernel_state(self.pid)

    def alarms(self, threads: Iterable[tuple[int, bool]]) -> dict[int, bool]:
        return alarms(self.pid, threads)

    def time_here(self, time_ns: int) -> int:
        return time_ns

    @property
    def place(self) -> Place:
        return HERE

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.control.close()
            self.monitor.close()
            os.close(self.output_fd)
            os.close(self.crash_fd)
            self.box.close()


def _ways_to(fd: int) -> list[str]:
    """Return paths by which a rank may open the file that our descriptor refers to.

    A terminal has a name.  Everything else can be reached through our process, but not by ranks in a user namespace of
    their own.
    """
    return [*([os.ttyname(fd)] if os.isatty(fd) else []), f"/proc/{os.getpid()}/fd/{fd}"]


def has_yet_to_handle(pid: int, number: int) -> bool:
    """Return whether a signal sent to a process is pending for its main thread, or is being handled there.

    False for a process that has gone or is stopped, because it handles nothing.
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


def kernel_state(pid: int) -> KernelState:
    """Return a process as the kernel sees it; ``("", 0, [])`` if it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rsplit(b")", 1)[1].split()
        states = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as f:
                states.append(f.read().rsplit(b")", 1)[1].split()[0].decode())
        return KernelState(fields[0].decode(), int(fields[11]) + int(fields[12]), states)
    except (OSError, IndexError):
        return KernelState("", 0, [])


_FUTEX = {"x86_64": (202, 3), "aarch64": (98, 3)}
_SLEEPS = {  # nanosleep, clock_nanosleep; wait4, waitid
    "x86_64": {35, 230, 61, 247},
    "aarch64": {101, 115, 260, 95},
}
_UNTIMED = {"x86_64": {0, 45, 47}, "aarch64": {63, 207, 212}}  # read, recvfrom, recvmsg


def alarms(pid: int, threads: Iterable[tuple[int, bool]]) -> dict[int, bool]:
    """:meth:`RankHandle.alarms <harness.worlds.handle.RankHandle.alarms>` for any process."""
    machine = platform.machine()
    number, timeout_at = _FUTEX.get(machine, (-1, 3))
    may_wake: dict[int, bool] = {}
    for native, main in threads:
        try:
            # After a fork, the native id that Python 3.11 reports for the main thread is its parent's.
            with open(f"/proc/{pid}/task/{pid if main else native}/syscall") as f:
                call = f.read().split()
        except OSError:
            continue
        if len(call) > timeout_at + 1 and call[0].isdigit():
            if main:
                may_wake[native] = int(call[0]) in _SLEEPS.get(machine, set())
                continue
            untimed_futex = int(call[0]) == number and int(call[1 + timeout_at], 16) == 0
            may_wake[native] = not (untimed_futex or int(call[0]) in _UNTIMED.get(machine, set()))
    return may_wake
