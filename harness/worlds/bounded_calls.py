"""Calls of code that may never return, such as the ``__str__`` of a user's exception."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TooLongError(Exception):
    """A call did not finish in time.

    ``seconds``: how long it had; ``frames``: (file, line, function) of where it is, outermost first.
    """

    def __init__(self, seconds: float, frames: tuple[tuple[str, int, str], ...]) -> None:
        self.seconds = seconds
        self.frames = frames
        super().__init__(f"not done after {seconds:.3g} s")


class _AbandonedError(BaseException):
    """Raised in the thread of a call that nobody waits for any more."""


def within(seconds: float, function: Callable[[], Result]) -> Result:
    """Call ``function`` in a thread of its own, and wait for it for at most ``seconds``.

    Returns what it returns.  If it does not finish in time, an exception is raised in its thread as soon as the thread
    executes Python code, and nobody waits for that.  Code that holds the interpreter lock for longer blocks this whole
    process.  If no thread can be started, the function is called here, without a time limit.

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
    frames: list[tuple[str, int, str]] = []
    while frame is not None and frame.f_code.co_filename not in (__file__, threading.__file__) and len(frames) < most:
        frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames[::-1])
