"""Message sizes of sweeps, as large as the profile and the machine allow."""

from __future__ import annotations

import pytest

from harness.bench.figures import sizes
from harness.bench.measuring.sweeps import SIZES
from harness.plugin.perf import asked_for, largest_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``size``: bytes of a message, from 8 B to the largest; only a few sizes if nothing is measured."""
    if "size" in metafunc.fixturenames:
        config = metafunc.config
        largest = largest_of(config, 4)
        swept = sizes(largest) if asked_for(config) else [8, *SIZES]
        metafunc.parametrize("size", swept, ids=[f"{size}B" for size in swept])
