"""Hostile inputs, made by hand and at random."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "reports")]  # import-mode=importlib leaves the tests' own modules out
