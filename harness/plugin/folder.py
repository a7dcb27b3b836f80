"""Where a run writes what it comes to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

_FOLDER = pytest.StashKey[Path]()


def folder_of(config: pytest.Config) -> Path | None:
    """The run's own folder for results and figures; None if it is to write nothing."""
    above = config.getoption("concord_results") or config.getini("concord_results")
    if not above:
        return None
    if _FOLDER not in config.stash:
        name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
        config.stash[_FOLDER] = config.rootpath / above / name
    return config.stash[_FOLDER]
