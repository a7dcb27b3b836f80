"""Files that are written whole or not at all, and that no link of somebody else's leads astray.

A full disk, a quota or a medium that fails leaves what was there before.  Errors are the system's own, with the name of
the file that was asked for: whoever calls says them once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_DEVICES = ("/dev/", "/proc/")
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def write_whole(path: Path, data: bytes | str, *, follow: bool = True) -> None:
    """Write a file, in place of one that may be there; readers see the old one or the new one, and nothing between.

    ``follow``: a link of this user's leads to the file that is meant; without, the file takes the link's place.  What
    is no plain file (a pipe, ``/dev/stdout``) is written to.  Errors: OSError; there is no trace of the file then.
    """
    content = data.encode(errors="replace") if isinstance(data, str) else data
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if follow and _is_stream(path):
            with open(path, "wb", buffering=0) as stream:
                append(stream.fileno(), content)
            return
        target = _followed(path) if follow else path
        if target.is_dir() and not target.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        fd, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".part", dir=target.parent)
        try:
            try:
                append(fd, content)
                os.fchmod(fd, _mode_of(target))
                os.fsync(fd)  # where space is only promised until now, it is refused here
            finally:
                os.close(fd)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def open_new(path: Path) -> int:
    """Make a file to append to; returns its descriptor.  Errors: OSError, where anything is there, a link as well."""
    with _named(path):
        return os.open(path, _OPEN_NEW, 0o644)


def new_folder(path: Path) -> Path:
    """Make a folder that nobody else can write to, and that was not there: where one is, a number is added.

    What is above it is made, too.  Errors: OSError.
    """
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            found = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                found.mkdir(mode=0o755)
            except FileExistsError:
                continue
            return found
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def own_folder(path: Path) -> Path:
    """Make a folder, unless it is there.

    Errors: OSError, among them PermissionError for a link that another user has put there.
    """
    with _named(path):
        path.mkdir(parents=True, exist_ok=True)
        return _followed(path)


def append(fd: int, data: bytes) -> None:
    """Write all of it.  Errors: OSError."""
    rest = memoryview(data)
    while rest:  # a nearly full disk takes a part, and says so only the next time
        rest = rest[os.write(fd, rest) :]


def append_or_nothing(fd: int, data: bytes) -> None:
    """Append all of it, or nothing.  For whoever is alone with the file, or has locked it.  Errors: OSError."""
    size = os.fstat(fd).st_size
    try:
        append(fd, data)
    except OSError:
        with contextlib.suppress(OSError):  # what can't be cut off is a last line without its end
            os.ftruncate(fd, size)
        raise


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file that was asked for, not a temporary one."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e  # its class follows from its number


def _is_stream(path: Path) -> bool:
    if str(path).startswith(_DEVICES):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _followed(path: Path) -> Path:
    """What a link of this user's, or of whoever owns the folder, leads to.  Errors: PermissionError for another's."""
    try:
        owner = path.lstat().st_uid if path.is_symlink() else None
    except OSError:
        return path
    if owner is None:
        return path
    if owner not in (os.geteuid(), 0, path.parent.stat().st_uid):
        raise PermissionError(errno.EPERM, "a link that another user has put there", str(path))
    return path.resolve()


def _mode_of(path: Path) -> int:
    """The mode of a file that is there, and what the process gives a new one elsewhere."""
    try:
        return stat.S_IMODE(path.lstat().st_mode) & 0o777 if not path.is_symlink() else _new_mode()
    except OSError:
        return _new_mode()


def _new_mode() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
