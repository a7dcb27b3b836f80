"""Ranks that did not find each other say nothing about a program.

A program makes process groups for its meshes and destroys them, in processes that live on.  About one in a thousand
times gloo fails to connect a new group under that ("connectFullMesh failed ... Connection closed by peer"), with any
program; the cause is not known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from harness.worlds.postmortem import RanksFailed

T = TypeVar("T")

_SIGN = "connectFullMesh failed"


class NotConnected(UserWarning):
    """A process group could not be connected; ranks of a fresh world were asked once more."""


def once_connected(run: Callable[[], T]) -> T:
    """What ``run`` returns; where its ranks could not connect a process group, what it returns the second time.

    Errors: those of ``run``; warns with :class:`NotConnected`.
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
    """Whether gloo told a rank that it could not connect a group: by its message, as it has no error of its own."""
    reports = [end.report for end in error.ends if end.report is not None]
    return any(_SIGN in str(report.get(field, "")) for report in reports for field in ("message", "text"))
