"""Which part of the space of cases a run covers."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Return whether the run sweeps the cases that are sampled by default (``--thorough``)."""
    return bool(request.config.getoption("thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise the time limit of a sweep, which takes longer than pytest-timeout allows a test by default."""
    if config.getoption("thorough"):
        for item in items:
            if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(3600))
