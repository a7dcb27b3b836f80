"""How much of the space of cases a run covers."""

from __future__ import annotations

import pytest


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether the run sweeps what is sampled by default (``--thorough``)."""
    return bool(request.config.getoption("thorough"))
