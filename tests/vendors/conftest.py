"""Tests of the vendor's path find their own modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # import-mode=importlib leaves the tests' own modules out of it
