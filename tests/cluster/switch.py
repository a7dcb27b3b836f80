"""An Ethernet switch in user space: hosts are network namespaces, and every link can be slow, lossy or cut.

Run as a program, by root: ``switch.py NAMESPACE NAMESPACE ...``.  Namespace i gets the interface ``eth0`` with the
addresses 10.77.0.(i+1)/24 and fd77::(i+1)/64.  Each line of standard input is a JSON list of links ``[from, to, {}]``
with fields of :class:`Link`, which replace what the links were.  The kernel's own emulation (netem) is a module
that many kernels lack.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_MOST = 65536
_MOST_WAITING = 1 << 20
"""Bytes that wait for a slow link; more is dropped, as a router does."""

libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Link:
    """One direction between two hosts."""

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    """Bytes per second; 0 for as fast as possible."""
    cut: bool = False
    free_at: float = 0.0
    """When the last frame will have been sent."""


def enter(namespace: int) -> None:
    """Move this thread into a network namespace, by a descriptor.  Errors: OSError."""
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def plugged(number: int, name: str) -> int:
    """Make the interface of a host, and return the descriptor with its frames."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/run/netns/{name}", os.O_RDONLY)
    enter(theirs)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"eth0", _TAP_WITHOUT_HEADER))
    enter(own)
    os.close(own)
    os.close(theirs)
    for command in (
        "link set lo up",
        f"link set eth0 address 02:00:00:00:00:{number + 1:02x}",
        f"addr add 10.77.0.{number + 1}/24 dev eth0",
        f"addr add fd77::{number + 1}/64 dev eth0 nodad",
        "link set eth0 up",
    ):
        subprocess.run(["ip", "-n", name, *command.split()], check=True)
    return tap


def main(names: list[str]) -> None:
    """Switch frames until standard input is closed."""
    taps = [plugged(number, name) for number, name in enumerate(names)]
    links = {pair: Link() for pair in itertools.permutations(range(len(taps)), 2)}
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    chance = random.Random(0)
    poll = select.poll()
    for fd in (0, *taps):
        poll.register(fd, select.POLLIN)
    print("ready", flush=True)
    told = b""
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, frame = heapq.heappop(waiting)
            send(taps[to], frame)
        for fd, _ in poll.poll(max(0.0, waiting[0][0] - now) * 1000 if waiting else None):
            if fd == 0:
                data = os.read(0, 65536)
                if not data:
                    return
                told += data
                while b"\n" in told:
                    line, _, told = told.partition(b"\n")
                    for source, target, changes in json.loads(line):
                        links[source, target] = Link(**changes)
                    print("set", flush=True)
                continue
            source = taps.index(fd)
            try:
                frame = os.read(fd, _MOST)
            except OSError:
                continue
            targets = [frame[5] - 1] if frame[0] == 2 and 0 < frame[5] <= len(taps) else range(len(taps))
            for to in targets:
                link = links.get((source, to))
                if link is None or link.cut or chance.random() < link.loss:
                    continue
                now = time.monotonic()
                link.free_at = max(link.free_at, now) + (len(frame) / link.rate if link.rate else 0.0)
                if link.rate and (link.free_at - now) * link.rate > _MOST_WAITING:
                    link.free_at -= len(frame) / link.rate
                    continue
                if link.delay or link.rate:
                    heapq.heappush(waiting, (link.free_at + link.delay, next(order), to, frame))
                else:
                    send(taps[to], frame)


def send(tap: int, frame: bytes) -> None:
    """Send a frame, or lose it, as Ethernet does."""
    try:
        os.write(tap, frame)
    except OSError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
