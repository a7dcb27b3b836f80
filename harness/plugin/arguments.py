"""Files and folders that pytest's arguments name."""

from __future__ import annotations

from pathlib import Path

import pytest


def path_of(config: pytest.Config, argument: str) -> Path:
    """Return the file or folder of an argument of pytest, which may name a test in it."""
    return config.invocation_params.dir / argument.partition("[")[0].partition("::")[0]
