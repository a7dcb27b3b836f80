"""Where code lies: PyTorch's, ours, everybody else's.

By the folder that PyTorch is really in, and not by a name in a path: a user's project may lie below a folder that is
called torch.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import stat


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return os.path.join(os.path.dirname(spec.origin), "") if spec is not None and spec.origin else "\0"


TORCH = _folder_of("torch")
"""PyTorch's own folder, with a separator at its end."""
DISTRIBUTED = os.path.join(TORCH, "distributed", "")
WORLDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of the code that runs ranks."""


_shown_from: list[str] = []
"""Folders that paths are shown relative to, besides the working directory."""


def show_from(*folders: str) -> None:
    """Show files in these folders by their path from there."""
    _shown_from[:] = [os.path.join(folder, "") for folder in folders]


def short_path(file: str) -> str:
    """A file as a message names it: by its path from the working directory, where it is below that."""
    try:
        here = [os.path.join(os.getcwd(), "")]
    except OSError:
        here = []  # it is there no more
    for folder in (*here, *_shown_from):
        if folder != os.sep and file.startswith(folder):
            return file[len(folder) :]
    return file


_LARGEST_SOURCE = 16 << 20  # bytes


def is_source(file: str) -> bool:
    """Whether a file that code says it is from can be read as source, or is not there at all.

    Code may say that it is from a device, a pipe or a file in /proc: reading those may never end.
    """
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return True  # a name that is none, as "<string>"
    return stat.S_ISREG(found.st_mode) and 0 < found.st_size <= _LARGEST_SOURCE


def source_line(file: str, line: int) -> str:
    """A line of source without its indentation; empty where there is none."""
    try:
        return linecache.getline(file, line).strip() if is_source(file) else ""
    except Exception:  # a file that is no text
        return ""


def in_torch(file: str) -> bool:
    """Whether a source file is PyTorch's."""
    return file.startswith(TORCH)


def in_worlds(file: str) -> bool:
    """Whether a source file is of the code that runs ranks."""
    return file.startswith(WORLDS)
