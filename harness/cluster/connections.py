"""Connections of a process to other hosts that are not answered, as its kernel knows them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_ESTABLISHED, _CONNECTING = 1, 2
_LEAST_RETRIES = 3
"""A packet that was sent again so often has been without an answer for more than a second."""
_SHOWN = 4


def unanswered(pid: int) -> list[str]:
    """Return the addresses of peers that have not acknowledged what a process sent them, though it was sent again.

    Each address is a text without a port, as in ``10.0.0.2``.  Returns [] if nothing is known of the process.
    """
    inodes = set(_inodes(pid))
    tables = ((f"/proc/{pid}/net/tcp", socket.AF_INET), (f"/proc/{pid}/net/tcp6", socket.AF_INET6))
    rows = [row for file, family in tables for row in _rows(file, family)]
    return sorted({address for address, inode in rows if inode in inodes})[:_SHOWN]


def _inodes(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                name = os.readlink(f"/proc/{pid}/fd/{fd}")
                if name.startswith("socket:["):
                    yield name[len("socket:[") : -1]


def _rows(file: str, family: int) -> list[tuple[str, str]]:
    """Return peer and inode of connections that wait for an answer, from a table of :manpage:`proc(5)`."""
    try:
        with open(file) as table:
            lines = table.readlines()[1:]
    except OSError:  # a kernel without IPv6, or the process has gone
        return []
    found = []
    for line in lines:
        fields = line.split()
        peer, state, retries, inode = fields[2], int(fields[3], 16), int(fields[6], 16), fields[9]
        if state in (_ESTABLISHED, _CONNECTING) and retries >= _LEAST_RETRIES:
            found.append((_address(peer.partition(":")[0], family), inode))
    return found


def _address(text: str, family: int) -> str:
    """Return an address that the kernel shows as words in the machine's own order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    found = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return found.removeprefix("::ffff:")
