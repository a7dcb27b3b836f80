"""Prepare test functions for ranks: how they are shipped, and which Hypothesis settings they get."""

from __future__ import annotations

from typing import Any

import pytest


def ship_test_code() -> None:
    """Pickle functions by value if pytest rewrites their module: test modules, conftests and others.

    Ranks then need not be able to import them, and run the assertions that pytest has rewritten.
    """
    import sys

    import cloudpickle
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from harness.worlds.shipping import is_test_code

    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__loader__", None), AssertionRewritingHook) and is_test_code(module):
            cloudpickle.register_pickle_by_value(module)


def fit_hypothesis(item: pytest.Item) -> None:
    """Fit Hypothesis's settings to a property with a world.

    A world outlives the examples on purpose, and an example may take as long as ranks need.
    """
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
        # The explain phase would name lines of the harness, because the test's lines run in another process.
        phases=[phase for phase in before.phases if phase is not Phase.explain],
    )


def separate_databases(item: pytest.Item) -> None:
    """Give each test a Hypothesis database of its own: examples that fail at one world size mean nothing at another."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is not None:
        inner._hypothesis_internal_add_digest = item.nodeid.encode()
