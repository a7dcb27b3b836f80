"""What ranks print, on the controller's terminal; and the terminal itself, lent to a rank's debugger.

What would drive a terminal is shown as escapes.  Colours (``ESC [ ... m``) stay where output is shown as it comes, and
end with their line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from harness.safe_io.shown import printable
from harness.worlds.launch import Output

_LONGEST = 8192  # bytes of a line that are held until its end comes


class Terminal:
    """Shows output line by line as it comes (``pytest -s``), or at the end of each run, where pytest captures it.

    ``release``: a context manager that frees standard input and output from whoever captures them.
    """

    def __init__(self, *, immediately: bool, release: Callable[[], AbstractContextManager[None]]) -> None:
        self._immediately = immediately
        self._release = release
        self._partial: dict[int, bytes] = {}

    def live(self, index: int, data: bytes) -> None:
        """A rank has printed something."""
        if not self._immediately:
            return
        *lines, rest = (self._partial.get(index, b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._partial[index] = rest
        for line in lines:
            _show(prefixed(index, coloured(line.decode(errors="replace"))), flush=True)

    def finished(self, index: int, output: Output) -> None:
        """A run is over, and this is all that the rank printed in it."""
        if self._immediately:
            self.gone(index)
            return
        for line in output.text().rstrip("\n").split("\n"):
            _show(prefixed(index, printable(line)))

    def gone(self, index: int) -> None:
        """A rank will print no more: show what it left of a line, so that the next one's does not continue it."""
        rest = self._partial.pop(index, b"")
        if rest:
            _show(prefixed(index, coloured(rest.decode(errors="replace"))), flush=True)

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[int, int]]:
        """Lend the terminal: yields the file descriptors of standard input and output."""
        with self._release():
            sys.stdout.flush()
            yield 0, 1


def _show(line: str, *, flush: bool = False) -> None:
    try:
        print(line, flush=flush)
    except UnicodeEncodeError:  # a terminal that does not know the letter: spell it
        print(line.encode("ascii", "backslashreplace").decode(), flush=flush)


_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,40}m)")


def coloured(line: str) -> str:
    """A line with its colours, and everything else that is not seen as escapes."""
    parts = _COLOUR.split(line.removesuffix("\r"))
    shown = "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))
    return f"{shown}\x1b[0m" if len(parts) > 1 else shown


def prefixed(index: int, line: str) -> str:
    """``[rank 1] the line``."""
    return f"[rank {index}] {line}"
