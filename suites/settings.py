"""How many examples a property runs: ``smoke`` (seconds), ``default`` (minutes), ``thorough`` (hours)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

SHARES = {"smoke": 0.1, "default": 1.0, "thorough": 50.0}


def examples(count: int) -> Callable[[Any], Any]:
    """A property with so many examples in the default setting; ``CONCORD_EXAMPLES`` names another, or a factor."""
    asked = os.environ.get("CONCORD_EXAMPLES", "default")
    share = SHARES[asked] if asked in SHARES else float(asked)
    # A busy machine draws slowly, and programs that are not exact, or wild, are given up on purpose.
    given_up = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=max(1, round(count * share)), print_blob=False, suppress_health_check=given_up)
