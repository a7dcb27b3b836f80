"""Libraries in Inductor's cache on disk that nobody has finished.

The linker writes a library in place, and PyTorch never writes one again that is there.  If a rank is killed meanwhile,
every later process of that user fails at it ("file too short"), until somebody deletes it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

_FINISHED = 60.0
"""Seconds after its last change from which no linker is expected to be still at work on a file."""
_HEADER = struct.Struct("=4sB35xQ10xHH2x")
"""Of an ELF header of 64 bits: its magic number, its class, where the table of sections begins, how large each of its
entries is, and how many there are."""
_MAGIC, _OF_64_BITS = b"\x7fELF", 2


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return Inductor's cache on disk for processes with these environment variables."""
    if folder := environment.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder)
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def remove_unfinished(folder: Path) -> list[Path]:
    """Delete the shared libraries below a folder that end before their table of sections; returns their paths.

    Those that were changed within the last minute stay, because another session may be writing them.
    """
    removed = []
    for path in folder.rglob("*.so"):
        with contextlib.suppress(OSError):  # another session was faster, or it is not ours
            status = path.lstat()
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > _FINISHED and not _is_whole(path, status.st_size):
                path.unlink()
                removed.append(path)
    return removed


def _is_whole(path: Path, size: int) -> bool:
    """Return whether a library has all that its header promises; of other kinds of files, nothing is known."""
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        return False
    magic, bits, sections, each, count = _HEADER.unpack(head)
    if magic != _MAGIC:
        return any(head)  # a linker may have written nothing but zeros
    end: int = sections + each * count
    return bits != _OF_64_BITS or end <= size
