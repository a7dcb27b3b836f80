"""Remove credentials from everything that pytest shows and writes about a run, before anybody sees it.

Reports are redacted where they are made, in workers, too: the environment of a worker may have credentials that the
process that prints does not have. This applies only to runs whose results are kept. Those are passed on, and so are the
terminal's text and the JUnit files of the same run.
"""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

from harness.plugin.folder import has_folder
from harness.redaction import HIDDEN, Redactor, current, names_credential

_DEEPEST = 20
_NAMES = ("nodeid", "location", "keywords", "when", "outcome", "result")
"""Attributes that identify a report in this process and to other plug-ins."""


class Redacting:
    """Gets reports, warnings and errors before all other plug-ins, and removes the credentials from them."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        current()  # notes the environment now: a credential of this phase may be gone when the next report is made
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> Generator[None, Any, Any]:
        redact(report)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collectreport(self, report: Any) -> Generator[None, Any, Any]:
        redact(report)
        return (yield)

    @pytest.hookimpl(tryfirst=True)  # not a wrapper: pytest repeats warnings to plug-ins that register later
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        _redact_warning(warning_message)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_internalerror(self, excrepr: Any) -> Generator[None, Any, Any]:
        _Without(current()).error(excrepr)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: Any) -> Generator[None, Any, Any]:
        error = excinfo.value
        without = _Without(current())
        error.args = without(error.args)
        if isinstance(error, pytest.exit.Exception):
            error.msg = without(error.msg)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        for name in ("shouldfail", "shouldstop"):  # the terminal shows why a session ended early
            if isinstance(getattr(session, name), str):
                setattr(session, name, current()(getattr(session, name)))
        return (yield)


@pytest.fixture(scope="session")
def record_testsuite_property(
    pytestconfig: pytest.Config, record_testsuite_property: Callable[[str, object], None]
) -> Callable[[str, object], None]:
    """Record a property as pytest does. If results are kept, JUnit files get it without credentials."""
    return _recording(record_testsuite_property) if has_folder(pytestconfig) else record_testsuite_property


@pytest.fixture
def record_xml_attribute(
    pytestconfig: pytest.Config, record_xml_attribute: Callable[[str, object], None]
) -> Callable[[str, object], None]:
    """Record an attribute as pytest does. If results are kept, JUnit files get it without credentials."""
    return _recording(record_xml_attribute) if has_folder(pytestconfig) else record_xml_attribute


def _recording(record: Callable[[str, object], None]) -> Callable[[str, object], None]:
    def without_credentials(name: str, value: object) -> None:
        __tracebackhide__ = True
        record(*_Without(current())((name, str(value))))

    return without_credentials


def redact(report: Any) -> None:
    """Remove this process's credentials from a report: error, captured output, properties, reasons, labels."""
    without = _Without(current())
    for name, value in list(vars(report).items()):
        if name == "longrepr":
            report.longrepr = without.error(value)
        elif name not in _NAMES and isinstance(value, (str, list, tuple, dict)):
            setattr(report, name, without(value))
    label = getattr(report, "context", None)  # of a subtest
    for name in ("msg", "kwargs"):
        if hasattr(label, name):
            object.__setattr__(label, name, without(getattr(label, name)))


def _redact_warning(warning: Any) -> None:
    without = current()
    text = str(warning.message)
    if without(text) != text:
        warning.message = UserWarning(without(text))  # pytest shows its text, and takes the category from elsewhere
    line = warning.line if warning.line is not None else linecache.getline(warning.filename, warning.lineno)
    if without(line) != line:
        warning.line = without(line)


class _Without:
    """Redacts every text in a value."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._seen: set[int] = set()

    def __call__(self, value: Any) -> Any:
        """Redact plain data. An object whose text has credentials is replaced by its redacted text."""
        return self._within(value, self._shown)

    def error(self, value: Any) -> Any:
        """Redact what pytest made of an exception: texts, or objects of its own, which are changed in place."""
        return self._within(value, self._changed)

    def _within(self, value: Any, objects: Callable[[Any], Any], depth: int = 0) -> Any:
        if isinstance(value, str):
            return self._redactor(value)
        if value is None or isinstance(value, (int, float)) or depth > _DEEPEST:
            return value
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, str) for each in value):
            return (self._redactor(value[0]), self._named(*value))
        if isinstance(value, (list, tuple)):
            items = [self._within(each, objects, depth + 1) for each in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, dict):
            return {
                self._within(k, objects, depth + 1): self._named(k, v)
                if isinstance(v, str)
                else self._within(v, objects, depth + 1)
                for k, v in value.items()
            }
        return objects(value)

    def _named(self, name: object, value: str) -> str:
        """Redact the value of a property, argument or label. It is hidden if the name is that of a credential."""
        return HIDDEN if isinstance(name, str) and value and names_credential(name) else self._redactor(value)

    def _shown(self, value: Any) -> Any:
        try:
            text = str(value)
        except Exception:  # whoever writes it gets the same error
            return value
        redacted = self._redactor(text)
        return value if redacted == text else redacted

    def _changed(self, value: Any) -> Any:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            for name, each in list(getattr(value, "__dict__", {}).items()):
                with contextlib.suppress(AttributeError, TypeError):  # some attributes can't be set, such as properties
                    object.__setattr__(value, name, self._within(each, self._changed))
        return value
