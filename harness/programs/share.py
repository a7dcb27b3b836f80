"""The number of examples of a property: ``smoke`` (seconds), ``default`` (minutes), ``thorough`` (hours)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

from harness.thorough.effort import effort


def examples(count: int) -> Callable[[Any], Any]:
    """Set the number of a property's examples in the default setting.

    ``CONCORD_EXAMPLES`` names another setting or a factor. In the thorough setting the plug-in draws the examples in
    rounds, and saves its progress (docs/thorough.md).
    """
    # A busy machine draws slowly, and inexact or wild programs are rejected on purpose.
    given_up = [HealthCheck.too_slow, HealthCheck.filter_too_much]

    def mark(test: Any) -> Any:
        test.concord_examples = count
        return settings(max_examples=effort().examples(count), print_blob=False, suppress_health_check=given_up)(test)

    return mark
