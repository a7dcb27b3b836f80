"""The controller's terminal: shows what ranks print, and is lent to a rank's debugger.

Characters that would control a terminal are shown as escapes.  Colors (``ESC [ ... m``) are kept where output is shown
live, and are reset at the end of their line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from harness.safe_io.shown import printable
from harness.worlds.launch import Output

_LONGEST = 8192  # bytes of an unfinished line that are held back; a longer one is shown before its end


class Terminal:
    """Shows output line by line as it arrives (``pytest -s``), or at the end of each run if pytest captures it.

    ``release``: returns a context manager that frees standard input and output from capturing.
    """

    def __init__(self, *, immediately: bool, release: Callable[[], AbstractContextManager[None]]) -> None:
        self._immediately = immediately
        self._release = release
        self._partial: dict[int, bytes] = {}

    def live(self, index: int, data: bytes) -> None:
        """Show what a rank has just printed, if output is shown immediately."""
        if not self._immediately:
            return
        *lines, rest = (self._partial.get(index, b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._partial[index] = rest
        for line in lines:
            _show(prefixed(index, colored(line.decode(errors="replace"))), flush=True)

    def finished(self, index: int, output: Output) -> None:
        """Show everything that a rank printed in a run, or only its unfinished last line if the rest was shown live."""
        if self._immediately:
            self.gone(index)
            return
        for line in output.text().rstrip("\n").split("\n"):
            _show(prefixed(index, printable(line)))

    def gone(self, index: int) -> None:
        """Show the unfinished last line of a rank that prints no more, so that the next output does not continue it."""
        rest = self._partial.pop(index, b"")
        if rest:
            _show(prefixed(index, colored(rest.decode(errors="replace"))), flush=True)

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[int, int]]:
        """Lend the terminal; yields the file descriptors of standard input and output."""
        with self._release():
            sys.stdout.flush()
            yield 0, 1


def _show(line: str, *, flush: bool = False) -> None:
    try:
        print(line, flush=flush)
    except UnicodeEncodeError:  # the terminal's encoding lacks the character: print its escape
        print(line.encode("ascii", "backslashreplace").decode(), flush=flush)


_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,40}m)")


def colored(line: str) -> str:
    """Return a line with its colors kept and all other unprintable characters escaped."""
    parts = _COLOUR.split(line.removesuffix("\r"))
    shown = "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))
    return f"{shown}\x1b[0m" if len(parts) > 1 else shown


def prefixed(index: int, line: str) -> str:
    """Return ``[rank 1] the line``."""
    return f"[rank {index}] {line}"
