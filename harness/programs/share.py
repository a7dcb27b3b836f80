"""How many examples a property runs: ``smoke`` (seconds), ``default`` (minutes), ``thorough`` (hours)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from harness.thorough.effort import effort


def examples(count: int) -> Callable[[Any], Any]:
    """A property with so many examples in the default setting; ``CONCORD_EXAMPLES`` names another, or a factor.

    In the thorough setting the plug-in draws them in rounds, and keeps what is done (docs/thorough.md).
    """
    # A busy machine draws slowly, and programs that are not exact, or wild, are given up on purpose.
    given_up = [HealthCheck.too_slow, HealthCheck.filter_too_much]

    def mark(test: Any) -> Any:
        test.concord_examples = count
        return settings(max_examples=effort().examples(count), print_blob=False, suppress_health_check=given_up)(test)

    return mark
