"""Connections of a process, as its kernel knows them: where they begin, and which are not answered."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ESTABLISHED, _CONNECTING = 1, 2
_LEAST_RETRIES = 3
"""A packet that was sent again so often has been without an answer for more than a second."""
_SHOWN = 4


def unanswered(pid: int) -> list[str]:
    """Return the addresses of peers that have not acknowledged what a process sent them, though it was sent again.

    Each address is a text without a port, as in ``10.0.0.2``.  Returns [] if nothing is known of the process.
    """
    return sorted({row.peer for row in _of(pid) if row.unanswered})[:_SHOWN]


def connected(pid: int) -> dict[str, str]:
    """Return this host's end of each connection of a process, by the inode of its socket.

    Each end is an address as a text without a port.  Returns {} if nothing is known of the process.
    """
    return {row.inode: row.own for row in _of(pid) if row.state == _ESTABLISHED}


def _inodes(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has been closed meanwhile
                name = os.readlink(f"/proc/{pid}/fd/{fd}")
                if name.startswith("socket:["):
                    yield name[len("socket:[") : -1]


@dataclass(frozen=True)
class _Row:
    """A connection, as a table of :manpage:`proc(5)` has it."""

    own: str
    peer: str
    state: int
    retries: int
    inode: str

    @property
    def unanswered(self) -> bool:
        """Whether what was sent waits for an answer, though it was sent again."""
        return self.state in (_ESTABLISHED, _CONNECTING) and self.retries >= _LEAST_RETRIES


def _of(pid: int) -> list[_Row]:
    """Return the connections of a process."""
    inodes = set(_inodes(pid))
    tables = ((f"/proc/{pid}/net/tcp", socket.AF_INET), (f"/proc/{pid}/net/tcp6", socket.AF_INET6))
    return [row for file, family in tables for row in _rows(file, family) if row.inode in inodes]


def _rows(file: str, family: int) -> list[_Row]:
    """Return the connections in a table of :manpage:`proc(5)`."""
    try:
        with open(file) as table:
            lines = table.readlines()[1:]
    except OSError:  # a kernel without IPv6, or the process has gone
        return []
    found = []
    for fields in map(str.split, lines):
        own, peer = (_address(end.partition(":")[0], family) for end in fields[1:3])
        found.append(_Row(own, peer, int(fields[3], 16), int(fields[6], 16), fields[9]))
    return found


def _address(text: str, family: int) -> str:
    """Return an address that the kernel shows as words in the machine's own order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    found = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return found.removeprefix("::ffff:")
