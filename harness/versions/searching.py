"""Binary search for the first bad of some candidates in order, some of which cannot be tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GOOD, BAD, SKIPPED = "good", "bad", "skipped"


@dataclass(frozen=True)
class Found:
    """Where a search ended: ``good`` is the last good candidate, and ``bad`` the first that is known to be bad."""

    good: int
    bad: int

    @property
    def suspects(self) -> range:
        """The candidates of which one is the first bad one: those between that were skipped, and ``bad``."""
        return range(self.good + 1, self.bad + 1)


def search(count: int, state: Callable[[int], str]) -> Found:
    """Search candidates ``0 … count - 1``, of which the first is good and the last is bad.

    ``state``: tests a candidate and returns :data:`GOOD`, :data:`BAD` or :data:`SKIPPED`. It is called at most once for
    each, and neither for the first nor for the last. A skipped candidate is replaced by the next nearest to the middle,
    so the result has several suspects only if all between ``good`` and ``bad`` were skipped.
    """
    good, bad = 0, count - 1
    skipped: set[int] = set()
    while untested := [i for i in range(good + 1, bad) if i not in skipped]:
        middle = (good + bad) / 2
        candidate = min(untested, key=lambda i: abs(i - middle))
        said = state(candidate)
        if said == GOOD:
            good = candidate
        elif said == BAD:
            bad = candidate
        else:
            skipped.add(candidate)
    return Found(good, bad)


def most_steps(count: int) -> int:
    """Return how many candidates a search tests at most if none is skipped, without the first and the last."""
    return max(count - 2, 0).bit_length()
