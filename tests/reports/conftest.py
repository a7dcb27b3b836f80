"""Runs for reports to be made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # import-mode=importlib leaves the tests' own modules out of it


@pytest.fixture(autouse=True)
def minimums_of_the_invented_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented suite has minimums of its own, as it has tests of its own."""
    from invented import MINIMUMS

    monkeypatch.setattr("reports.minimums.shipped", lambda: MINIMUMS)
