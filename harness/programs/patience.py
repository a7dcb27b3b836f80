"""Limits on the time that a property spends on ranks, and on shrinking, after its first failure.

A deadlock that the watchdog proves costs a second. Ranks that compute forever cost a whole timeout, and do so again for
each example that shrinking tries. So only the first failure gets all the time that the test gives. Later runs get
:data:`TIMES` times as long as the slowest healthy run, and at least :data:`LEAST` seconds. :data:`SHRINKING` seconds
after the first failure, only examples that failed before are run again. The example that is reported runs once more
with :data:`SURER` times the timeout. A healthy example that was slow once is then not reported as hanging: Hypothesis
says that the test is flaky.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from hypothesis import reject
from hypothesis.control import current_build_context, currently_in_test_context

from harness.thorough.effort import effort

LEAST = 5.0
"""The shortest timeout of a run on ranks, in seconds."""
TIMES = 10.0
SURER = 3.0
SHRINKING = 35.0
"""Seconds after the first failure in which new examples are tried."""
SHRINKING_THOROUGHLY = 240.0


class Patience:
    """The times that a property's examples took, and the examples that failed."""

    def __init__(self) -> None:
        self.slowest = 0.0
        """Seconds that the slowest healthy run on ranks took."""
        self._first = 0.0
        self._failed: set[str] = set()

    def timeout(self, most: float) -> float:
        """Return the timeout of the next run in seconds: ``most``, the test's own, if nothing has failed yet."""
        if not self._first:
            return most
        return min(most, max(LEAST, TIMES * self.slowest) * (SURER if _last_run() else 1))

    def begin(self, what: object) -> None:
        """Begin an example. A new example is rejected if the time for shrinking is over."""
        if self.ended and repr(what) not in self._failed and not _last_run():
            reject()

    def passed(self, seconds: float) -> None:
        """Record how many seconds a run on ranks took in which all ranks answered."""
        self.slowest = max(self.slowest, seconds)

    def failed(self, what: object) -> None:
        """Record that an example has failed."""
        self._first = self._first or time.monotonic()
        self._failed.add(repr(what))

    @property
    def ended(self) -> bool:
        """Whether the time for shrinking is over."""
        most = SHRINKING_THOROUGHLY if effort().thorough else SHRINKING
        return bool(self._first) and time.monotonic() - self._first > most


def _last_run() -> bool:
    """Return whether Hypothesis runs an example in order to report it."""
    return not currently_in_test_context() or bool(current_build_context().is_final)


_known: weakref.WeakKeyDictionary[Any, Patience] = weakref.WeakKeyDictionary()


def patience_of(worlds: Any) -> Patience:
    """Return the patience of the property that has these worlds."""
    try:
        return _known.setdefault(worlds, Patience())
    except TypeError:  # the worlds can't be weakly referenced or hashed
        return Patience()
