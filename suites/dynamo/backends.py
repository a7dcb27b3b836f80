"""What compiles graphs, where a device may do without it."""

from __future__ import annotations

import pytest

INDUCTOR = pytest.param("inductor", marks=pytest.mark.needs(features=["inductor"]))
"""PyTorch's default, which needs a generator of code for the device."""
