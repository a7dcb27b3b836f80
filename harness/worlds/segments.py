"""Shared memory that NCCL leaves behind when its process is killed: files ``nccl-*`` in ``/dev/shm``.

NCCL makes such a file for ranks of one host and removes it itself, but a killed rank removes nothing.  A file is taken
for a rank's only if the rank had it mapped just before it was killed.  Its communicator has lost a member then, so
nobody will open the file again, and processes that have mapped it keep it without its name.  RCCL uses the same names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

_FOLDER, _PREFIX = "/dev/shm", "nccl-"  # noqa: S108 - where NCCL makes them


class Segment(NamedTuple):
    """A file, and what tells it from a later one of the same name."""

    path: str
    inode: int


def mapped_by(pid: int) -> set[Segment]:
    """Return NCCL's files that a process has mapped; empty if it has none or has ended."""
    if not any(name.startswith(_PREFIX) for name in _names()):
        return set()  # the list of a process's mappings is long, and most worlds have no such file
    segments = set()
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                fields = line.split(None, 5)  # addresses, access, offset, device, inode, path
                if len(fields) == 6 and fields[5].startswith(f"{_FOLDER}/{_PREFIX}".encode()):
                    segments.add(Segment(os.fsdecode(fields[5].rstrip(b"\n")), int(fields[4])))
    except OSError:
        pass  # it has ended
    return segments


def remove(segments: Iterable[Segment]) -> None:
    """Remove files of this user that are still there."""
    for segment in segments:
        try:
            found = os.lstat(segment.path)
            if found.st_ino == segment.inode and found.st_uid == os.geteuid():
                os.unlink(segment.path)
        except OSError:
            pass  # the name has gone already: NCCL removes it once every rank has mapped the file


def _names() -> list[str]:
    try:
        return os.listdir(_FOLDER)
    except OSError:
        return []
