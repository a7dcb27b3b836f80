"""Counters of the kernel for this process: instructions, page faults, context switches, bytes on connections.

Each is read before and after a number of calls.  What the kernel does not allow or the machine does not have is absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import socket
import struct
import sys
from pathlib import Path

from harness.bench.counting.names import FAULTS, INSTRUCTIONS, INTERFACE, SEGMENTS, SENT, SWITCHES

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _COUNT_INSTRUCTIONS = 0, 1
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
_INFO = 216
_AGAIN_AT, _SEGMENTS_AT, _SENT_AT, _SENT_AGAIN_AT = 100, 156, 200, 208
"""Places of tcpi_total_retrans and tcpi_data_segs_out (32 bits), tcpi_bytes_sent and tcpi_bytes_retrans (64 bits) in
Linux' struct tcp_info.  A busy machine sends again what was not acknowledged soon, even on the loopback."""


class Instructions:
    """Instructions that the present threads of this process execute in user space, where the machine counts them.

    ``why``: why there is no counter; empty if there is one.
    """

    def __init__(self) -> None:
        self._open: list[int] = []
        self.why = ""
        for thread in map(int, os.listdir("/proc/self/task")):
            descriptor = _event(thread)
            if descriptor < 0:
                self.why = os.strerror(ctypes.get_errno()) or "not on this processor"
                self.close()
                return
            self._open.append(descriptor)

    def read(self) -> int | None:
        """Return the instructions so far; None if there is no counter."""
        if self.why:
            return None
        return sum(int.from_bytes(os.read(descriptor, 8), sys.byteorder) for descriptor in self._open)

    def close(self) -> None:
        """Close the counters."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()


def _event(thread: int) -> int:
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        return -1
    attributes = ctypes.create_string_buffer(120)
    struct.pack_into("<IIQ", attributes, 0, _HARDWARE, len(attributes), _COUNT_INSTRUCTIONS)
    struct.pack_into("<Q", attributes, 40, _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR)
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, attributes, thread, -1, -1, 8))  # 8: close on exec


def counters(instructions: Instructions, without: int = 0) -> dict[str, float]:
    """Return the counters of this process and of the network namespace that it is in.

    ``without``: a port, the connections from and to which do not count.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    found: dict[str, float] = {FAULTS: used.ru_minflt, SWITCHES: used.ru_nvcsw}
    found |= connections(_infos(without))
    executed = instructions.read()
    if executed is not None:
        found[INSTRUCTIONS] = executed
    interface = interfaces()
    if interface is not None:
        found[INTERFACE] = interface
    return found


def connections(infos: list[bytes]) -> dict[str, float]:
    """Return the payload and the segments that were sent on TCP connections.  ``infos``: struct tcp_info of each."""

    def total(kind: str, place: int, again: int) -> float:
        return float(sum(struct.unpack_from(kind, i, place)[0] - struct.unpack_from(kind, i, again)[0] for i in infos))

    return {SENT: total("Q", _SENT_AT, _SENT_AGAIN_AT), SEGMENTS: total("I", _SEGMENTS_AT, _AGAIN_AT)}


def _infos(without: int) -> list[bytes]:
    """Return struct tcp_info of each TCP connection of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    continue
                if without in (one.getsockname()[1], one.getpeername()[1]):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
                if len(info) >= _INFO:
                    found.append(info)
    return found


def interfaces(devices: Path = Path("/proc/self/net/dev"), own: bool | None = None) -> float | None:
    """Return the bytes that all interfaces of this network namespace have sent; None if others use it, too.

    ``own``: whether the namespace is of ranks alone; by default, if it has no interface but the loopback.
    """
    try:
        lines = devices.read_text().splitlines()[2:]
    except OSError:
        return None
    sent = {match[1]: int(match[2].split()[8]) for line in lines if (match := re.match(r"\s*(\S+?):\s*(.*)", line))}
    alone = set(sent) <= {"lo"} if own is None else own
    return float(sum(sent.values())) if alone else None
