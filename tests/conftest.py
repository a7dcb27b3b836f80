"""What takes minutes runs in the nightly job, and where somebody asks for it: ``-m nightly``."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked ``nightly``, unless ``-m`` says something about them."""
    if "nightly" in str(config.getoption("markexpr")):
        return
    later = [item for item in items if item.get_closest_marker("nightly")]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
