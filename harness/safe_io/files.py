"""Bounded reading of whole files that anybody may have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileError(ValueError):
    """A file that is not read.  The message says which and why."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.why = why


def contents(path: Path, most: int) -> bytes:
    """Read a regular file of at most ``most`` bytes, and follow links.

    Other kinds of files are not opened: a pipe would block, and a device may do anything.  Errors: FileError.
    """
    try:
        require_regular(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            _check(path, os.fstat(descriptor))  # the path may lead to another file by now
            data = file.read(most + 1)
    except OSError as e:
        raise FileError(path, f"{e.strerror or e}") from e
    except ValueError as e:  # a name with a NUL in it
        raise e if isinstance(e, FileError) else FileError(repr(str(path)), str(e)) from e
    if len(data) > most:
        raise FileError(path, f"larger than {_amount(most)}")
    return data


def require_regular(path: Path) -> None:
    """Check that a path leads to a regular file.  Errors: FileError; OSError if there is no file."""
    _check(path, os.stat(path))


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FileError(path, f"{_KINDS.get(stat.S_IFMT(found.st_mode), 'no regular file')}, not a file")


def _amount(most: int) -> str:
    return f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB" if most >> 10 else f"{most} bytes"
