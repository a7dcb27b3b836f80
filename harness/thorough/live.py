"""Lines on the terminal while tests run, written by a thread of the process that owns it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest


class Live:
    """Calls a function at intervals, and shows the text that it returns.

    ``config``: pytest's. ``lines``: returns whole lines, or "" if there is nothing to show. ``every``: seconds.
    ``name``: the thread's.
    """

    def __init__(self, config: pytest.Config, lines: Callable[[], str], every: float, name: str) -> None:
        self._config, self._lines, self._every = config, lines, every
        self._column = 0
        # Tests' output is captured at its descriptor; a copy of this one keeps leading to pytest's own output.
        self._out = os.dup(sys.stdout.fileno()) if _has_descriptor() else -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was started before or there is no terminal or file to write to."""
        if self._out >= 0 and self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
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
                continue  # a full disk or a closed pipe, which pytest reports, too

    def _break(self) -> str:
        """Return a line break if pytest has written something on this line since the last time."""
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        writer = getattr(reporter, "_tw", None)
        before, self._column = self._column, getattr(writer, "width_of_current_line", 0)
        return "\n" if self._column and self._column != before else ""


def _has_descriptor() -> bool:
    try:
        return sys.stdout.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
