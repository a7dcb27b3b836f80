"""The black box of a rank: shared memory that the rank writes and that outlives it.

The controller maps the same memory, so it knows what a rank was doing even if the rank is stuck in C, stopped, or
dead.  The box holds the rank's phase and a ring of the collectives that it issued from Python.  (PyTorch's Flight
Recorder knows more, including collectives issued from C++, but it dies with its process.)

The sizes of files that a rank shares with the controller are sealed.  Otherwise, a rank could truncate a mapped file,
so that reading it ends the reader with SIGBUS, or make a file grow until the machine is out of memory.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
from dataclasses import dataclass

PHASES = ("starting", "idle", "running", "exiting", "atexit", "debugging")

_STATE = struct.Struct("<QQQ")  # phase, job, time in ns
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQH")  # sequence number of the entry, time in ns, length of the text
_COUNT_AT = 64
_PROGRESS = struct.Struct("<QQ")  # steps that were right from the first on, steps that have begun
_PROGRESS_AT = 72
_RING_AT = 128
_SLOT = 320
_SLOTS = 128
SIZE = _RING_AT + _SLOT * _SLOTS
CRASH_SIZE = 1 << 20
"""Size in bytes of a crash file, into which faulthandler writes; anything beyond it is not written."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def fixed_file(name: str, size: int) -> int:
    """Make an anonymous file of zeros whose size is sealed; returns its descriptor.

    The file has no name in any file system, and disappears with its last user.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass(frozen=True)
class Issued:
    """One collective, as the rank's Python code issued it."""

    number: int
    """Counts from 1 in this rank."""
    time_ns: int
    """When it was issued, on the monotonic clock."""
    op: str
    tensors: str
    """Data type and shape of the first tensor, as in ``float32[4]``, and how many there are if there are more."""
    group: str
    """Name of the process group."""
    where: str
    """``file:line`` of the code that called into torch.distributed."""


class BlackBox:
    """The black box, as the rank or the controller uses it.

    ``fd``: from :meth:`create`.  Errors: ValueError for a file whose size is not sealed.
    """

    def __init__(self, fd: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size != SIZE:
            raise ValueError("a black box is a page of a fixed size: use BlackBox.create")
        self._map = mmap.mmap(fd, SIZE)
        self._count = 0

    @staticmethod
    def create(name: str) -> int:
        """Make the file for a black box; returns its descriptor."""
        return fixed_file(name, SIZE)

    def close(self) -> None:
        self._map.close()

    # the rank's side

    def enter(self, phase: str, job: int = 0) -> None:
        """Record the phase that the rank enters, one of :data:`PHASES`, and its job."""
        _STATE.pack_into(self._map, 0, PHASES.index(phase), job, time.monotonic_ns())

    def progress(self, right: int, begun: int) -> None:
        """Record how far the function has come that the rank runs (:meth:`Rank.progress`)."""
        _PROGRESS.pack_into(self._map, _PROGRESS_AT, right, begun)

    def issued(self, op: str, tensors: str, group: str, where: str) -> None:
        """Record a collective.  Long texts are cut."""
        self.write(self.entry(op, tensors, group, where))

    @staticmethod
    def entry(op: str, tensors: str, group: str, where: str) -> bytes:
        """Return the bytes that :meth:`write` takes, for callers that write the same entry again and again."""
        text = _entry(op, tensors[:80], group[:40], where[-120:])
        if len(text) > _SLOT - _ENTRY.size:
            text = _entry(op[:40], "", "", where[-60:])
        if len(text) > _SLOT - _ENTRY.size:  # hardly any of it is ASCII
            text = _entry(op[:20], "", "", where[-20:])
        return text

    def write(self, text: bytes) -> int:
        """Record a collective from its :meth:`entry`; returns the time in ns, on the monotonic clock."""
        self._count += 1
        now = time.monotonic_ns()
        at = _RING_AT + (self._count - 1) % _SLOTS * _SLOT
        self._map[at + _ENTRY.size : at + _ENTRY.size + len(text)] = text
        _ENTRY.pack_into(self._map, at, self._count, now, len(text))
        _COUNT.pack_into(self._map, _COUNT_AT, self._count)
        return now

    # the controller's side

    @property
    def phase(self) -> str:
        index = int(_STATE.unpack_from(self._map, 0)[0])
        return PHASES[index] if index < len(PHASES) else "unknown"

    @property
    def reached(self) -> tuple[int, int]:
        """How far the function has come that the rank runs or ran last (:meth:`progress`)."""
        right, begun = _PROGRESS.unpack_from(self._map, _PROGRESS_AT)
        return int(right), int(begun)

    @property
    def count(self) -> int:
        """The number of collectives that the rank has issued from Python."""
        return int(_COUNT.unpack_from(self._map, _COUNT_AT)[0])

    @property
    def whole(self) -> bool:
        """Whether the ring still holds all of them."""
        return self.count <= _SLOTS

    def recent(self, most: int = 8) -> list[Issued]:
        """Return the last collectives, oldest first.  An entry that is just being written is left out."""
        count = self.count
        entries = []
        for number in range(max(1, count - min(most, _SLOTS) + 1), count + 1):
            at = _RING_AT + (number - 1) % _SLOTS * _SLOT
            seen, when, length = _ENTRY.unpack_from(self._map, at)
            if seen != number or length > _SLOT - _ENTRY.size:
                continue
            texts = _texts(self._map[at + _ENTRY.size : at + _ENTRY.size + length])
            if texts is not None and _ENTRY.unpack_from(self._map, at)[0] == number:
                entries.append(Issued(number, when, *texts))
        return entries


def _texts(data: bytes) -> tuple[str, str, str, str] | None:
    """Return the four texts of an entry; None if the data is not an entry."""
    try:
        texts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(texts, list) or len(texts) != 4 or not all(isinstance(text, str) for text in texts):
        return None
    op, tensors, group, where = texts
    return op, tensors, group, where


def _entry(*texts: str) -> bytes:
    # At most 6 bytes a character (a control character, escaped).
    return json.dumps(texts, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
