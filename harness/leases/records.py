"""Who holds devices and who waits for them, as one process tells the others.

A lock file has its holder in it, and whoever waits has a ticket: a file of its own that stays locked for as long.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from harness.leases.locks import held_by_others, lock, unlock
from harness.leases.turns import Place

_LARGEST = 1 << 16  # bytes that are read of a file
_LONGEST_CLAIM = 5.0  # seconds: a clock that was set must not keep others waiting
_Record = TypeVar("_Record", bound="msgspec.Struct")
_TICKET, _CLAIM, _UNNAMED = ".ticket", ".claim", ".unnamed"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process, told so that it can be recognised."""

    pid: int
    started: int
    """Clock ticks from boot to its start: another process of the same number has another."""
    namespace: int
    """The pid namespace in which ``pid`` is its number."""

    @property
    def gone(self) -> bool:
        """Whether it has ended.  Processes of other pid namespaces are never known to have."""
        return self.namespace == _namespace() and self.started != _started(self.pid)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a device."""

    process: Process
    session: str
    """Same for all processes of one session."""
    program: str
    """What runs, by its name alone: arguments may have secrets in them."""
    folder: str
    """The root directory of its tests."""
    what: str
    """The test that it is for; empty if it is for none."""
    since: float
    """Seconds since the epoch."""


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits for devices, or (with ``until``) will be back for them at once."""

    holder: Holder
    """As it will be the holder; ``since`` is when it began to wait."""
    kind: str
    """Of the devices."""
    keys: tuple[str, ...]
    """Of all devices that it may get."""
    count: int
    number: int
    """Nanoseconds since the epoch."""
    until: float = 0.0
    """Seconds since the epoch; 0: until it gives up or gets them."""

    @property
    def place(self) -> Place:
        """Its place in the queue."""
        return Place(self.holder.session, self.count, self.number, f"{self.holder.process.pid}")


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """What others are told of this process."""

    session: str
    program: str
    folder: str


_introduced: list[Introduction] = []
_numbers = itertools.count()


def introduce(session: str, program: str, folder: str) -> None:
    """Say what other processes are to be told of this one.

    session: same for all processes of one session.  program: what runs, without arguments.  folder: root directory.
    """
    _introduced[:] = [Introduction(session=session, program=program, folder=folder)]


def session() -> str:
    """The session of this process: its own, unless it was introduced as one of several."""
    return _introduced[0].session if _introduced else f"{os.getpid()}-{_started(os.getpid())}"


def myself(what: str = "") -> Holder:
    """This process as a holder.  what: the test."""
    told = _introduced[0] if _introduced else None
    return Holder(
        process=Process(pid=os.getpid(), started=_started(os.getpid()), namespace=_namespace()),
        session=session(),
        program=told.program if told else Path(sys.argv[0]).name or "python",
        folder=told.folder if told else _working_directory(),
        what=what,
        since=time.time(),
    )


# holders, in the lock files


def lock_file(folder: Path, key: str) -> Path:
    """The lock file of a device."""
    return folder / f"{quote(key, safe='')}.lock"


def sign(fd: int, holder: Holder) -> None:
    """Write the holder into a lock file that it holds.  Nothing is written where the disk is full."""
    data = msgspec.json.encode(holder)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
    except OSError:
        pass  # the lock is what counts; without the text, others only can't say who holds it


def unsign(fd: int) -> None:
    """Take the holder out of a lock file before it is unlocked."""
    try:
        os.ftruncate(fd, 0)
    except OSError:
        pass  # whoever locks it next writes itself into it


def signed(folder: Path, key: str) -> Holder | None:
    """The holder that a lock file names; None if it names none that is alive.  The lock itself is not looked at."""
    holder = _read(lock_file(folder, key), Holder)
    return None if holder is None or holder.process.gone else holder


def holders(folder: Path, keys: Sequence[str]) -> list[Holder | None]:
    """The holders of those devices that are held, in order; None for one that has not told who it is."""
    return [signed(folder, key) for key in keys if held_by_others(lock_file(folder, key))]


# the queue


def starting_now(holder: Holder) -> Holder:
    """A holder that has just got what it waited for."""
    return msgspec.structs.replace(holder, since=time.time())


def back_within(waiter: Waiter, seconds: float) -> Waiter:
    """A waiter that gives its devices back now and comes for as many in some seconds at most."""
    now = time.time()
    return msgspec.structs.replace(waiter, number=time.time_ns(), until=now + seconds)


def ticket(folder: Path, waiter: Waiter) -> tuple[Path, int]:
    """Put a waiter into the queue; returns its file and the descriptor that keeps it alive.  Errors: OSError."""
    name = f"{waiter.number:020}-{os.getpid()}-{next(_numbers)}"
    path, unnamed = folder / f"{name}{_TICKET}", folder / f"{name}{_UNNAMED}"
    fd = lock(unnamed)
    if fd is None:
        raise OSError(f"{unnamed} is locked")
    try:
        os.pwrite(fd, msgspec.json.encode(waiter), 0)
        unnamed.rename(path)
    except BaseException:
        unlock(fd)
        unnamed.unlink(missing_ok=True)
        raise
    return path, fd


def claim(folder: Path, waiter: Waiter) -> None:
    """Say that this process will be back for devices until ``waiter.until``; one claim for a process."""
    path, unnamed = folder / f"{os.getpid()}{_CLAIM}", folder / f"{os.getpid()}-{next(_numbers)}{_UNNAMED}"
    try:
        unnamed.write_bytes(msgspec.json.encode(waiter))
        unnamed.rename(path)
    except OSError:
        unnamed.unlink(missing_ok=True)  # without it, others may come first; nothing else depends on it


def withdraw(folder: Path) -> None:
    """Take back the claim of this process."""
    try:
        (folder / f"{os.getpid()}{_CLAIM}").unlink(missing_ok=True)
    except OSError:
        pass  # it lapses by itself


def waiters(folder: Path, *, other_than: Path | None = None) -> list[Waiter]:
    """Who waits for devices: live tickets, and claims that have not lapsed.  Files of processes that died are removed.

    other_than: the ticket of the caller.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith((_TICKET, _CLAIM)))
    except OSError:
        return []
    return [w for name in names if (path := folder / name) != other_than for w in _live(path)]


def _live(path: Path) -> Iterator[Waiter]:
    waiter = _read(path, Waiter)
    if path.suffix == _TICKET:
        alive = held_by_others(path)
    else:
        alive = waiter is not None and 0 < waiter.until - time.time() < _LONGEST_CLAIM
    if alive and waiter is not None:
        yield waiter
    elif not alive:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # whoever comes next tries again


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return msgspec.json.decode(os.read(fd, _LARGEST), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    finally:
        os.close(fd)


def _started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
