"""Reports of tests without credentials, before pytest shows them or writes them into a JUnit file."""

from __future__ import annotations

from typing import Any

import pytest

from harness.redaction import Redactor, current

_DEEPEST = 20


def redact(report: pytest.TestReport) -> None:
    """Take the credentials of this process's environment out of a report: error, captured output, properties."""
    without = current()
    if report.sections:
        report.sections[:] = [(title, without(text)) for title, text in report.sections]
    if report.user_properties:
        report.user_properties[:] = [(name, _plain(value, without)) for name, value in report.user_properties]
    text = report.longreprtext
    if text and without(text) != text:
        report.longrepr = _plain(report.longrepr, without)


def _plain(value: Any, without: Redactor, depth: int = 0) -> Any:
    """A value with every text in it redacted; objects (pytest's, that make up a traceback) are changed in place."""
    if isinstance(value, str):
        return without(value)
    if depth > _DEEPEST:
        return value
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(each, without, depth + 1) for each in value])
    for name, each in list(getattr(value, "__dict__", {}).items()):
        if isinstance(each, (str, list, tuple)) or hasattr(each, "__dict__"):
            object.__setattr__(value, name, _plain(each, without, depth + 1))
    return value
