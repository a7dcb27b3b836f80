"""The cases of tests: those that a test executed and checked, and those that a property-based test drew.

A property's cases are counted and hashed, so that a second run can be compared. A seed decides them. So the same seed,
on worlds of the same sizes and with the same versions, has the same digest.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from harness.executed import Executed, recording
from harness.plugin.seeds import MARKER
from harness.results import CasesDrawn

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The part of a default ``repr`` that differs from process to process."""
_CASES = pytest.StashKey["_Watch"]()
_EXECUTED = pytest.StashKey[Executed]()


class Cases:
    """Watches tests in the process that runs them, and adds their cases to reports."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with recording() as item.stash[_EXECUTED]:
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        function: Any = getattr(pyfuncitem.obj, "__func__", pyfuncitem.obj)
        handle: Any = getattr(function, "hypothesis", None)
        if handle is None or pyfuncitem.get_closest_marker(MARKER) is None:
            return (yield)
        inner = handle.inner_test
        watch = pyfuncitem.stash[_CASES] = _Watch(frozenset(pyfuncitem.funcargs))
        handle.inner_test = watch.watching(inner)
        try:
            return (yield)
        finally:
            handle.inner_test = inner

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        watch = item.stash.get(_CASES, None)
        if report.when == "call" and report.passed and watch is not None:  # how often a failure is shrunk, time decides
            report.concord_cases = msgspec.to_builtins(watch.cases)
        if report.when == "call" and (executed := item.stash.get(_EXECUTED, None)) is not None:
            report.concord_tried = executed.plain()
            report.concord_issued = msgspec.to_builtins(executed.issued)
            del item.stash[_EXECUTED]
        return report


class _Watch:
    """Counts the cases of one property, and hashes them in their order."""

    def __init__(self, fixtures: frozenset[str]) -> None:
        """``fixtures``: the arguments that are not drawn."""
        self._fixtures = fixtures
        self._count = 0
        self._digest = hashlib.sha256()

    @property
    def cases(self) -> CasesDrawn:
        """The cases so far."""
        return CasesDrawn(self._count, self._digest.hexdigest()[:16])

    def watching(self, inner: Any) -> Any:
        """Return the body of a property that is watched."""

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            drawn = repr([(name, kwargs[name]) for name in sorted(kwargs) if name not in self._fixtures])
            self._count += 1
            self._digest.update(_ADDRESS.sub("", drawn).encode(errors="replace") + b"\n")
            inner(*args, **kwargs)

        return wrapped
