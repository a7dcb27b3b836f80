"""Records of who holds devices and who waits for them, which processes write for each other.

A lock file contains its holder.  A waiting process has a ticket: a file of its own, which it keeps locked while it
waits.
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

_LARGEST = 1 << 16  # bytes that are read from a file
_LONGEST_CLAIM = 5.0  # seconds; longer claims are ignored, so that a change of the clock keeps nobody waiting
_Record = TypeVar("_Record", bound="msgspec.Struct")
_TICKET, _CLAIM, _UNNAMED = ".ticket", ".claim", ".unnamed"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process, described so that it can be recognized."""

    pid: int
    started: int
    """Clock ticks from boot to its start, which differ from those of another process with the same pid."""
    namespace: int
    """The pid namespace that ``pid`` belongs to."""

    @property
    def gone(self) -> bool:
        """Whether it has ended.  Always False for processes of other pid namespaces, whose ends are not seen here."""
        return self.namespace == _namespace() and self.started != _started(self.pid)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a device."""

    process: Process
    session: str
    """The same for all processes of one session."""
    program: str
    """The name of the program, without arguments, because they may contain secrets."""
    folder: str
    """The root directory of its tests."""
    what: str
    """The test that the device is for; empty if it is for none."""
    since: float
    """When it got the device, in seconds since the epoch."""


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A process that waits for devices, or (with ``until``) will be back for them at once."""

    holder: Holder
    """The holder that it will be; ``since`` is when it began to wait."""
    kind: str
    """The kind of the devices."""
    keys: tuple[str, ...]
    """The keys of all devices that it may get."""
    count: int
    """How many devices it waits for."""
    number: int
    """When it entered the queue, in nanoseconds since the epoch."""
    until: float = 0.0
    """When it stops waiting, in seconds since the epoch; 0: when it gives up or gets the devices."""

    @property
    def place(self) -> Place:
        """Its place in the queue."""
        return Place(self.holder.session, self.count, self.number, f"{self.holder.process.pid}")


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """The introduction of this process to others."""

    session: str
    program: str
    folder: str


_introduced: list[Introduction] = []
_numbers = itertools.count()


def introduce(session: str, program: str, folder: str) -> None:
    """Set what this process tells other processes about itself.

    session: the same for all processes of one session.  program: its name, without arguments.  folder: the root
    directory of its tests.
    """
    _introduced[:] = [Introduction(session=session, program=program, folder=folder)]


def session() -> str:
    """Return the session of this process: its own, unless it was introduced as part of another."""
    return _introduced[0].session if _introduced else f"{os.getpid()}-{_started(os.getpid())}"


def myself(what: str = "") -> Holder:
    """Return this process as a holder.  what: the test that the devices are for."""
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
    """Return the path of a device's lock file."""
    return folder / f"{quote(key, safe='')}.lock"


def share_file(folder: Path, key: str, share: int) -> Path:
    """Return the path of the lock file of one of the shares of a device."""
    return folder / f"{quote(key, safe='')}+{share}.lock"  # a quoted key has no plus sign


def sign(fd: int, holder: Holder) -> None:
    """Write the holder into a lock file that it has locked.  Nothing is written if the disk is full."""
    data = msgspec.json.encode(holder)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, data, 0)
    except OSError:
        pass  # the lock is what counts; without the text, others just can't say who holds it


def unsign(fd: int) -> None:
    """Remove the holder from a lock file before it is unlocked."""
    try:
        os.ftruncate(fd, 0)
    except OSError:
        pass  # the next holder overwrites it


def signed(path: Path) -> Holder | None:
    """Return the holder that a lock file names; None if it names none that is alive.  Does not check the lock."""
    holder = _read(path, Holder)
    return None if holder is None or holder.process.gone else holder


def holders(folder: Path, keys: Sequence[str]) -> list[Holder | None]:
    """Return the holders of those devices that are held, in order; None for a holder that is unknown.

    A device that is shared has a holder for each share.
    """
    return [holder for key in keys for holder in sharers(folder, key) or _owner(folder, key)]


def _owner(folder: Path, key: str) -> list[Holder | None]:
    """Return who has a device for itself; empty if nobody has."""
    path = lock_file(folder, key)
    return [signed(path)] if held_by_others(path) else []


def sharers(folder: Path, key: str) -> list[Holder | None]:
    """Return who holds shares of a device; empty if somebody has it for itself, or nobody has it."""
    paths = itertools.takewhile(Path.exists, (share_file(folder, key, share) for share in itertools.count()))
    return [signed(path) for path in paths if held_by_others(path)]


# the queue


def starting_now(holder: Holder) -> Holder:
    """Return a holder that got its devices just now."""
    return msgspec.structs.replace(holder, since=time.time())


def back_within(waiter: Waiter, seconds: float) -> Waiter:
    """Return a waiter that gives its devices back now and will be back for as many within ``seconds``."""
    now = time.time()
    return msgspec.structs.replace(waiter, number=time.time_ns(), until=now + seconds)


def ticket(folder: Path, waiter: Waiter) -> tuple[Path, int]:
    """Put a waiter into the queue; returns its ticket and the descriptor that keeps the ticket locked.

    Errors: OSError.
    """
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
    """Announce that this process will be back for devices before ``waiter.until``.  A process has one claim at most."""
    path, unnamed = folder / f"{os.getpid()}{_CLAIM}", folder / f"{os.getpid()}-{next(_numbers)}{_UNNAMED}"
    try:
        unnamed.write_bytes(msgspec.json.encode(waiter))
        unnamed.rename(path)
    except OSError:
        unnamed.unlink(missing_ok=True)  # without it, others may come first; nothing else depends on it


def withdraw(folder: Path) -> None:
    """Withdraw the claim of this process."""
    try:
        (folder / f"{os.getpid()}{_CLAIM}").unlink(missing_ok=True)
    except OSError:
        pass  # it expires by itself


def waiters(folder: Path, *, other_than: Path | None = None) -> list[Waiter]:
    """Return who waits for devices, by live tickets and current claims.  Removes dead tickets and expired claims.

    other_than: the ticket of the caller, which is left out.
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
            pass  # the next process to look tries again


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
    """Return when a process started, in clock ticks since boot; 0 if it does not exist."""
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
