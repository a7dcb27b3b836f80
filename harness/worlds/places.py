"""Whose code a file belongs to: PyTorch's, Concord's, or anybody else's.

This is decided by the folder that PyTorch is really in, and not by a name in a path: a user's project may be below a
folder that is called torch.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import stat


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return os.path.join(os.path.dirname(spec.origin), "") if spec is not None and spec.origin else "\0"


TORCH = _folder_of("torch")
"""PyTorch's own folder, with a separator at its end."""
DISTRIBUTED = os.path.join(TORCH, "distributed", "")
OPERATORS = (os.path.join(TORCH, "_ops.py"), os.path.join(TORCH, "_library", ""))
"""Where torch calls an operator's kernel."""
WORLDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of the code that runs ranks."""


_shown_from: list[str] = []
"""Folders that paths are shown relative to, besides the working directory."""


def show_from(*folders: str) -> None:
    """Show files in these folders by their paths relative to the folder."""
    _shown_from[:] = [os.path.join(folder, "") for folder in folders]


def short_path(file: str) -> str:
    """Return a file's name for messages: relative to the working directory or a shown folder if it is below one."""
    try:
        here = [os.path.join(os.getcwd(), "")]
    except OSError:
        here = []  # it no longer exists
    for folder in (*here, *_shown_from):
        if folder != os.sep and file.startswith(folder):
            return file[len(folder) :]
    return file


_LARGEST_SOURCE = 16 << 20  # bytes


def is_source(file: str) -> bool:
    """Return whether the file that code claims to be from can be read as source, or does not exist at all.

    Code may claim to be from a device, a pipe or a file in /proc, and reading those may never end.
    """
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return True  # not a file name, as in "<string>"
    return stat.S_ISREG(status.st_mode) and 0 < status.st_size <= _LARGEST_SOURCE


def source_line(file: str, line: int) -> str:
    """Return a line of source without its indentation; empty if there is none."""
    try:
        return linecache.getline(file, line).strip() if is_source(file) else ""
    except Exception:  # not a text file
        return ""


_OF_INDUCTOR = re.compile(r"c[a-z2-7]{51}\.py")


def is_generated(file: str) -> bool:
    """Return whether code is from a string, from a graph of torch.fx or from a file that Inductor wrote."""
    of_a_string = file == "<string>" or file.startswith("<eval_with_key>")
    return of_a_string or bool(_OF_INDUCTOR.fullmatch(os.path.basename(file)))


def in_torch(file: str) -> bool:
    """Return whether a source file is PyTorch's."""
    return file.startswith(TORCH)


def in_worlds(file: str) -> bool:
    """Return whether a source file belongs to the code that runs ranks."""
    return file.startswith(WORLDS)
