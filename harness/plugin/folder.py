"""The folder to which a run writes its results."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from harness.safe_io.writing import new_folder

_FOLDER = pytest.StashKey[Path]()


def folder_of(config: pytest.Config) -> Path | None:
    """Return the run's own folder for results and figures, created on first use; None if it writes nothing.

    Errors: OSError if it can't be created.
    """
    above = _above(config)
    if not above:
        return None
    if _FOLDER not in config.stash:
        name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        config.stash[_FOLDER] = new_folder(config.rootpath / above / name)
    return config.stash[_FOLDER]


def has_folder(config: pytest.Config) -> bool:
    """Return whether the run writes results. Creates nothing."""
    return bool(_above(config))


def _above(config: pytest.Config) -> str:
    return config.getoption("concord_results") or config.getini("concord_results") or ""


LOST = pytest.StashKey[list[str]]()
"""Files of this run that could not be kept whole, each with the reason. They are shown at the end and fail the run."""


def lose(config: pytest.Config, what: str, error: OSError) -> None:
    """Note that a file can't be written any more. The run continues without it."""
    file = Path(error.filename or what)
    if file.is_relative_to(config.rootpath):
        file = file.relative_to(config.rootpath)
    config.stash.setdefault(LOST, []).append(f"{file}: {error.strerror or error}")
