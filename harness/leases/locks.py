"""Locks on files, which the kernel drops when the process that holds them ends.

filelock is not used, because the holder is written into the file while it is locked, and a forked child must not keep
the lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_held: set[int] = set()
"""Descriptors of locks that this process holds."""


def lock(path: Path, *, shared: bool = False) -> int | None:
    """Lock a file, which is made if it is missing; returns its descriptor, or None if it is locked already.

    ``shared``: others that lock it so may hold it, too.
    Errors: OSError if it can't be opened or locked; a symbolic link is not followed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # else it was removed in between, and this lock would keep nobody out
            _held.add(fd)
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def unlock(fd: int) -> None:
    """Release a lock."""
    _held.discard(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child may have a copy of the descriptor
    finally:
        os.close(fd)


def held_by_others(path: Path) -> bool:
    """Return whether a file is locked by one process for itself, by this one or any other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # not exclusively: others may look at the same time
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _forget() -> None:
    """Close the locks in a forked child: they are the parent's, and end with the parent."""
    for fd in _held:
        try:
            os.close(fd)
        except OSError:
            pass  # the child's copy is closed already
    _held.clear()


os.register_at_fork(after_in_child=_forget)
