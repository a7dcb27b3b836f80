"""Safe writing of files: whole or not at all, and without following links of other users.

A full disk, a quota or a failing medium leaves the previous file.  Errors are the system's own, with the name of the
requested file, so that a caller reports them once.
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
    """Write a file atomically, in place of an existing one: readers see the old or the new contents, nothing between.

    ``follow``: write to the target of a link of this user, and directly to a path that is not a plain file (a pipe,
    ``/dev/stdout``).  Otherwise, the file replaces a link.  Errors: OSError, which leaves no new file.
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
                os.fsync(fd)  # delayed allocation reports a lack of space only here
            finally:
                os.close(fd)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def nearest(path: Path) -> Path:
    """Return an absolute path itself if it exists, or what is nearest above it."""
    return next(place for place in (path, *path.parents) if place.exists())


def open_new(path: Path) -> int:
    """Create a file to append to, and return its descriptor.  Errors: OSError, also if a file or a link exists."""
    with _named(path):
        return os.open(path, _OPEN_NEW, 0o644)


def new_folder(path: Path) -> Path:
    """Create a new folder that nobody else can write to, and return it; its parents are created too.

    If the folder exists, a number is added to the name.  Errors: OSError.
    """
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                folder.mkdir(mode=0o755)
            except FileExistsError:
                continue
            return folder
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def own_folder(path: Path) -> Path:
    """Create a folder unless it exists, and return it, with links resolved.

    Errors: OSError; PermissionError for a link of another user.
    """
    with _named(path):
        path.mkdir(parents=True, exist_ok=True)
        return _followed(path)


def append(fd: int, data: bytes) -> None:
    """Write all of the data.  Errors: OSError."""
    rest = memoryview(data)
    while rest:  # a nearly full disk writes a part, and fails only at the next call
        rest = rest[os.write(fd, rest) :]


def append_or_nothing(fd: int, data: bytes) -> None:
    """Append all of the data or nothing.  The caller must be the only writer, or hold a lock.  Errors: OSError."""
    size = os.fstat(fd).st_size
    try:
        append(fd, data)
    except OSError:
        with contextlib.suppress(OSError):  # if this fails, the file ends with an incomplete line
            os.ftruncate(fd, size)
        raise


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Make errors name the requested file, not a temporary one."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e  # OSError chooses its subclass by errno


def _is_stream(path: Path) -> bool:
    if str(path).startswith(_DEVICES):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _followed(path: Path) -> Path:
    """Resolve a link of this user, of root, or of the folder's owner.  Errors: PermissionError for others' links."""
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
    """Return the mode of an existing file; for a link or a missing file, the mode of a new file."""
    try:
        return stat.S_IMODE(path.lstat().st_mode) & 0o777 if not path.is_symlink() else _new_mode()
    except OSError:
        return _new_mode()


def _new_mode() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
