"""Prepare the functions of tests for ranks: how they are shipped, and what Hypothesis may do with them."""

from __future__ import annotations

from typing import Any

import pytest


def ship_test_code() -> None:
    """Ship functions of test modules, conftests and what else pytest rewrites by value.

    A rank need not be able to import them, and keeps the assertions that pytest has rewritten.
    """
    import sys

    import cloudpickle
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from harness.worlds.shipping import is_test_code

    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__loader__", None), AssertionRewritingHook) and is_test_code(module):
            cloudpickle.register_pickle_by_value(module)


def fit_hypothesis(item: pytest.Item) -> None:
    """A world outlives the examples of a property on purpose, and an example may take as long as ranks need."""
    function: Any = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    if not getattr(function, "is_hypothesis_test", False):
        return
    from hypothesis import HealthCheck, Phase, settings

    before: Any = getattr(function, "_hypothesis_internal_use_settings", settings.default)
    checks = {*before.suppress_health_check, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors}
    deadline = None if before.deadline == settings.get_profile("default").deadline else before.deadline
    function._hypothesis_internal_use_settings = settings(
        parent=before,
        suppress_health_check=list(checks),
        deadline=deadline,
        # It would name lines of the harness: those of the test run in another process.
        phases=[phase for phase in before.phases if phase is not Phase.explain],
    )


def separate_databases(item: pytest.Item) -> None:
    """Examples that fail at one world size are no examples for another."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is not None:
        inner._hypothesis_internal_add_digest = item.nodeid.encode()
