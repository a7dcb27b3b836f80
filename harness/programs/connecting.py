"""Retry runs whose ranks could not connect a process group, which says nothing about the program.

A program makes process groups for its meshes and destroys them, in processes that live on. In that situation gloo fails
to connect a new group about once in a thousand times ("connectFullMesh failed ... Connection closed by peer"), with any
program. The cause is not known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from harness.worlds.postmortem import RanksFailed

T = TypeVar("T")

_SIGN = "connectFullMesh failed"


class NotConnected(UserWarning):
    """A process group could not be connected, so the run was repeated on the ranks of a fresh world."""


def once_connected(run: Callable[[], T]) -> T:
    """Return the result of ``run``, and call it a second time if its ranks could not connect a process group.

    Errors: those of ``run``. Warns with :class:`NotConnected` before the second call.
    """
    __tracebackhide__ = True
    try:
        return run()
    except RanksFailed as e:
        if not _unconnected(e):
            raise
        warnings.warn(f"ranks are asked once more: {e.headline}", NotConnected, stacklevel=2)
    return run()


def _unconnected(error: RanksFailed) -> bool:
    """Return whether a rank reports gloo's message for a failed connection. Gloo has no error type for it."""
    reports = [end.report for end in error.ends if end.report is not None]
    return any(_SIGN in str(report.get(field, "")) for report in reports for field in ("message", "text"))
