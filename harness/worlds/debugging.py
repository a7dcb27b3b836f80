"""The debugger of a rank (``--rank-pdb``), on the controller's own terminal, which the rank borrows."""

from __future__ import annotations

import bdb
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from harness.worlds import answers, wire
from harness.worlds.blackbox import BlackBox


class Process(Protocol):
    """What the debugger needs of the rank's process."""

    control: socket.socket
    reader: wire.FrameReader
    box: BlackBox
    job: int
    """The number of the function that runs."""

    def answer(self, answer: answers.Answer) -> None:
        """Send a message to the controller."""


class Debugging:
    """Opens a debugger on one rank of a world: where a function fails, and at ``breakpoint()``.

    ``index``: the rank of this process; ``debugged``: the rank that is being debugged; None if there is none.
    """

    def __init__(self, process: Process, index: int, debugged: int | None) -> None:
        self._process, self._index, self._debugged = process, index, debugged

    def failed(self, error: BaseException) -> None:
        """Debug where a function failed, if this rank is being debugged; a no-op for an exit and a debugger's end."""
        if self._debugged != self._index or isinstance(error, SystemExit | bdb.BdbQuit):
            return
        with contextlib.suppress(BaseException):
            where = error.__traceback__.tb_next if error.__traceback__ is not None else None
            stdin, stdout = self._borrow_terminal()
            try:
                _debugger(self._index, stdin, stdout).interaction(None, where)
            finally:
                stdin.close()
                stdout.close()
                self._process.answer(answers.Debugged(self._process.job))

    def breakpoint(self, *_args: Any, **_kwargs: Any) -> None:
        """Implement ``breakpoint()``: debug here if this rank is being debugged; a no-op if another one is.

        Errors: RuntimeError if no rank is being debugged.
        """
        if self._debugged is None:
            raise RuntimeError(
                f"breakpoint() on rank {self._index}, which has no terminal: run pytest with --rank-pdb {self._index}"
            )
        if self._debugged != self._index:
            return
        stdin, stdout = self._borrow_terminal()

        def leave() -> None:
            stdin.close()
            stdout.close()
            self._process.box.enter("running", self._process.job)
            self._process.answer(answers.Debugged(self._process.job))

        _debugger(self._index, stdin, stdout, leave).set_trace(sys._getframe(1))

    def _borrow_terminal(self) -> tuple[Any, Any]:
        """Borrow the controller's own terminal; returns its input and output streams."""
        process = self._process
        process.box.enter("debugging", process.job)
        process.answer(answers.Debug(process.job))
        stdin, stdout = wire.receive(process.control, process.reader)
        try:
            return _open_terminal(stdin, os.O_RDONLY), _open_terminal(stdout, os.O_WRONLY)
        except OSError as e:
            process.answer(answers.Debugged(process.job))
            raise RuntimeError(f"no terminal to debug on: {e}") from e


def _open_terminal(ways: Sequence[str], flags: int) -> Any:
    """Open a stream on the controller's terminal, by the first path that leads there.

    The terminal must not become our controlling terminal: it would be hung up when we end.
    """
    for path in ways:
        try:
            return os.fdopen(os.open(path, flags | os.O_NOCTTY), "r" if flags == os.O_RDONLY else "w")
        except OSError as e:
            error = e
    raise error


def _debugger(index: int, stdin: Any, stdout: Any, leave: Any = None) -> Any:
    import pdb  # noqa: T100  --rank-pdb needs it

    class RankPdb(pdb.Pdb):
        left = False

        def leave(self) -> None:
            if leave is not None and not self.left:
                self.left = True
                leave()

        def set_continue(self) -> None:
            super().set_continue()
            self.leave()

        def set_quit(self) -> None:
            super().set_quit()
            self.leave()

    debugger = RankPdb(stdin=stdin, stdout=stdout, nosigint=True)
    debugger.prompt = f"(rank {index}) "
    debugger.reset()
    return debugger
