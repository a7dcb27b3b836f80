"""Lines on the terminal while tests run, from a thread of the process that owns it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest


class Live:
    """Calls a function every so often, and shows the text that it gives.

    config: pytest's.  lines: gives whole lines, or "" for nothing to show.  every: seconds.  name: the thread's.
    """

    def __init__(self, config: pytest.Config, lines: Callable[[], str], every: float, name: str) -> None:
        self._config, self._lines, self._every = config, lines, every
        self._column = 0
        # The tests' output is captured at its descriptor; pytest's own goes here.
        self._out = os.dup(sys.stdout.fileno()) if _has_descriptor() else -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name=name, daemon=True)

    def start(self) -> None:
        """Begin; does nothing if it has begun, or there is no terminal or file to write to."""
        if self._out >= 0 and self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End."""
        if self._out >= 0:
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
            os.close(self._out)
            self._out = -1

    def _show(self) -> None:
        while not self._ended.wait(self._every):
            text = self._lines()
            try:
                if text:
                    os.write(self._out, (self._break() + text).encode(errors="replace"))
            except OSError:
                continue  # a full disk, or nobody reads: pytest meets it, too

    def _break(self) -> str:
        """A line's end where pytest has written something since the last time."""
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        writer = getattr(reporter, "_tw", None)
        before, self._column = self._column, getattr(writer, "width_of_current_line", 0)
        return "\n" if self._column and self._column != before else ""


def _has_descriptor() -> bool:
    try:
        return sys.stdout.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
