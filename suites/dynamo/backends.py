"""Compiler backends that a device may not support."""

from __future__ import annotations

import pytest

INDUCTOR = pytest.param("inductor", marks=pytest.mark.needs(features=["inductor"]))
"""PyTorch's default backend, which needs a code generator for the device."""
