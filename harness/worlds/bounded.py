"""Calls of code that may never come back, such as the ``__str__`` of somebody's exception."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TooLongError(Exception):
    """A call was not done in time.  ``seconds``: how long it had; ``frames``: (file, line, function) of where it is,
    outermost first."""

    def __init__(self, seconds: float, frames: tuple[tuple[str, int, str], ...]) -> None:
        self.seconds = seconds
        self.frames = frames
        super().__init__(f"not done after {seconds:.3g} s")


class _AbandonedError(BaseException):
    """Raised in the thread of a call that nobody waits for any more."""


def within(seconds: float, function: Callable[[], Result]) -> Result:
    """Call ``function`` in a thread of its own and wait for it for at most so many seconds.

    Returns what it returns.  A function that is not done in time is told to end by an exception, which reaches it as
    soon as it executes Python code; whatever it does until then, nobody waits.  Code that holds the interpreter lock
    for longer holds everything in this process.

    Errors: whatever it raises; :class:`TooLongError`.
    """
    outcome: list[tuple[Result | None, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as e:
            outcome.append((None, e))

    thread = threading.Thread(target=work, name="concord-bounded", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had: out of memory, mostly
        return function()
    thread.join(seconds)
    if not outcome:
        frames = _frames_of(thread)
        if thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_AbandonedError))
        raise TooLongError(seconds, frames)
    value, error = outcome.pop()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only where the function returned it


def _frames_of(thread: threading.Thread, most: int = 100) -> tuple[tuple[str, int, str], ...]:
    frame = sys._current_frames().get(thread.ident or 0)
    found: list[tuple[str, int, str]] = []
    while frame is not None and frame.f_code.co_filename not in (__file__, threading.__file__) and len(found) < most:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found[::-1])
