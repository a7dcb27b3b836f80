"""How long a property waits for ranks, and for a smaller example, once something has failed.

A deadlock that the watchdog proves costs a second, but ranks that compute for ever cost a whole timeout, again for each
example that shrinking tries.  So after the first failure, which had all the time that the test gives, a run has
:data:`TIMES` times what the slowest healthy one took, and at least :data:`LEAST`; after :data:`SHRINKING` seconds only
what has failed before is run again.  The example that is reported is run once more with :data:`SURER` times as long, so
a healthy one that was slow for once is not reported as hanging: Hypothesis says then that the test is flaky.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from hypothesis import reject
from hypothesis.control import current_build_context, currently_in_test_context

from harness.thorough.effort import effort

LEAST = 5.0
"""Seconds that a run on ranks has at least."""
TIMES = 10.0
SURER = 3.0
SHRINKING = 35.0
"""Seconds from the first failure, after which no new example is tried."""
SHRINKING_THOROUGHLY = 240.0


class Patience:
    """Of one property: what its examples took, and what failed."""

    def __init__(self) -> None:
        self.slowest = 0.0
        """Seconds that the slowest healthy run on ranks took."""
        self._first = 0.0
        self._failed: set[str] = set()

    def timeout(self, most: float) -> float:
        """Seconds for the next run; ``most``, the test's own, where nothing has failed yet."""
        if not self._first:
            return most
        return min(most, max(LEAST, TIMES * self.slowest) * (SURER if _last_run() else 1))

    def begin(self, what: object) -> None:
        """An example begins.  Gives it up where there is no time for smaller ones any more."""
        if self.ended and repr(what) not in self._failed and not _last_run():
            reject()

    def passed(self, seconds: float) -> None:
        """A run on ranks took so long, and all answered."""
        self.slowest = max(self.slowest, seconds)

    def failed(self, what: object) -> None:
        """An example has failed."""
        self._first = self._first or time.monotonic()
        self._failed.add(repr(what))

    @property
    def ended(self) -> bool:
        """Whether shrinking has had its time."""
        most = SHRINKING_THOROUGHLY if effort().thorough else SHRINKING
        return bool(self._first) and time.monotonic() - self._first > most


def _last_run() -> bool:
    """Whether Hypothesis runs an example to report it."""
    return not currently_in_test_context() or bool(current_build_context().is_final)


_known: weakref.WeakKeyDictionary[Any, Patience] = weakref.WeakKeyDictionary()


def patience_of(worlds: Any) -> Patience:
    """Of the property that has these worlds."""
    try:
        return _known.setdefault(worlds, Patience())
    except TypeError:  # it has no weak references, or can't be hashed
        return Patience()
