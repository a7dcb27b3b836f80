"""Frames of ranks are in one chunk, so that no depth of calls is dearer than another."""

from __future__ import annotations

import inspect
import resource
from collections.abc import Callable

from harness.worlds.frames import roomy

DEPTHS = range(0, 600, 2)
CALLS = 200


def leaf() -> None:
    """Returns at once."""


def call_below(depth: int) -> None:
    """Call a function again and again, ``depth`` calls further down."""
    if depth:
        call_below(depth - 1)
        return
    for _ in range(CALLS):
        leaf()


def call_at_every_depth() -> int:
    """Return how many pages the kernel had to give meanwhile."""
    call_below(DEPTHS[-1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for depth in DEPTHS:
        call_below(depth)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_needs_new_pages() -> None:
    """A call of a plain function at the end of a chunk gets pages in each turn; below a roomy function, none does.

    If the first half fails, this Python no longer gives a chunk back at once, and frames.py is not needed there.
    """
    assert call_at_every_depth() >= CALLS
    assert roomy(call_at_every_depth)() < CALLS / 2


def test_function_stays_the_same() -> None:
    """Arguments, defaults, closure, name, documentation and signature are those of the function."""
    captured = [4]

    def plain(a: int, b: int = 2, *rest: int, c: int = 3) -> tuple[int, ...]:
        """Add nothing up."""
        return a, b, *rest, c, captured[0]

    found: Callable[..., tuple[int, ...]] = roomy(plain)
    assert found(1) == plain(1) == (1, 2, 3, 4)
    assert found(1, 5, 6, c=7) == (1, 5, 6, 7, 4)
    assert (found.__name__, found.__qualname__, found.__doc__) == (plain.__name__, plain.__qualname__, plain.__doc__)
    assert inspect.signature(found) == inspect.signature(plain)
    assert not hasattr(found, "__wrapped__")


def test_recursion_ends_as_before() -> None:
    """The limit of recursion is still what ends an endless one."""

    def endless() -> None:
        endless()

    @roomy
    def begin() -> str:
        try:
            endless()
        except RecursionError as e:
            return str(e)
        return ""

    assert "maximum recursion depth exceeded" in begin()
