"""The controller's end of a side: a process in its environment, asked over pipes, never waited for without limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness.bench.duet import messages
from harness.bench.duet.messages import Answer, Counted, Described, Done, Measured, Prepared, Request, Wrong
from harness.redaction import redacted
from harness.safe_io.shown import one_line
from harness.safe_io.waiting import readable

_T = TypeVar("_T")

RUNNER = "harness.bench.duet.runner"
PATIENCE = 180.0
"""Seconds for an answer, longer than a run on ranks may take."""
_END = 10.0
_TAIL = 2000


class SideFailed(Exception):
    """A side that can't go on.  The message names the side and says why.

    ``kind``: ``input`` if what was asked of it can't be done; ``values`` or ``ranks`` if its ranks are wrong or failed;
    ``gone`` if its process has ended, is silent, or says something else than an answer.
    """

    def __init__(self, side: str, kind: str, why: str) -> None:
        super().__init__(f"{side}: {why}")
        self.side = side
        self.kind = kind
        self.why = why


@dataclass(frozen=True)
class Setting:
    """What makes a side: its Python, where its harness is, and what its ranks get."""

    name: str
    """``A`` or ``B``."""
    python: Path
    root: Path
    """Folder in which it runs."""
    variables: tuple[tuple[str, str], ...] = ()
    """All environment variables of the process."""
    profile: str = ""
    faults: tuple[str, ...] = ()


class Side:
    """A running side.  ``log``: the file for what it prints."""

    def __init__(
        self, setting: Setting, log: Path, *, patience: float = PATIENCE, command: Sequence[str] = ("-m", RUNNER)
    ) -> None:
        self.setting = setting
        self.name = setting.name
        self._log = log
        self._patience = patience
        self._buffer = bytearray()
        with open(log, "ab") as errors:
            try:
                self._process = subprocess.Popen(
                    [str(setting.python), *command],
                    cwd=setting.root,
                    env=dict(setting.variables),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for the controller, which ends the sides
                )
            except OSError as e:
                raise SideFailed(self.name, "input", f"{setting.python}: {e.strerror}") from e

    @property
    def pid(self) -> int:
        """The process id of the side, whose descendants its ranks are."""
        return self._process.pid

    def ask(self, request: Request) -> Answer:
        """Send a request and return the answer.  Errors: :class:`SideFailed`."""
        self.send(request)
        return self.receive()

    def send(self, request: Request) -> None:
        """Send a request without waiting for the answer.  Errors: :class:`SideFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(messages.encoded(request))
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def receive(self) -> Answer:
        """Wait for an answer.  Errors: :class:`SideFailed`."""
        try:
            found = messages.answer(self._line())
        except messages.Protocol as e:
            raise SideFailed(self.name, "gone", f"it gave no answer but something else ({one_line(str(e))})") from None
        if isinstance(found, Wrong):
            raise SideFailed(self.name, found.kind, one_line(found.text))
        return found

    def described(self) -> Described:
        """Receive what the side is and offers, after a :class:`~harness.bench.duet.messages.Begin`."""
        return self._as(Described, self.receive())

    def prepare(self, series: int) -> Prepared:
        """Ask for a series to be prepared."""
        return self._as(Prepared, self.ask(messages.Prepare(series)))

    def round(self, series: int, count: int, lead: int) -> tuple[float, ...]:
        """Ask for a round: the slowest rank's seconds of each iteration."""
        seconds = self._as(Measured, self.ask(messages.Round(series, count, lead))).seconds
        if len(seconds) != count or not all(0 < one < float("inf") for one in seconds):
            raise SideFailed(self.name, "gone", f"it measured {len(seconds)} iterations, not {count}, or no times")
        return seconds

    def counted(self) -> Counted:
        """Receive counts, after a :class:`~harness.bench.duet.messages.Count`."""
        return self._as(Counted, self.receive())

    def do(self, request: Request) -> None:
        """Ask for something that has no result."""
        self._as(Done, self.ask(request))

    def _as(self, kind: type[_T], answer: object) -> _T:
        if not isinstance(answer, kind):
            raise SideFailed(self.name, "gone", f"it answered another question ({type(answer).__name__})")
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        until = time.monotonic() + self._patience
        while (end := self._buffer.find(b"\n")) < 0:
            if not readable(self._process.stdout, until - time.monotonic()):
                raise SideFailed(self.name, "gone", f"no answer within {self._patience:g} s{self._last_words()}")
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise self._gone()
            self._buffer += part
            if len(self._buffer) > messages.LONGEST:
                raise SideFailed(self.name, "gone", f"an answer of more than {messages.LONGEST >> 20} MiB")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _gone(self) -> SideFailed:
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return SideFailed(self.name, "gone", f"it no longer listens{self._last_words()}")
        how = f"exited with {status}" if status >= 0 else f"was killed by {_signal(-status)}"
        return SideFailed(self.name, "gone", f"its process {how}{self._last_words()}")

    def _last_words(self) -> str:
        """Return the last line that it printed, without credentials."""
        with contextlib.suppress(OSError), open(self._log, "rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL))
            lines = log.read().decode(errors="replace").strip().splitlines()
            if lines:
                return f"; its last words: {one_line(redacted(lines[-1]))[:300]} (all in {self._log})"
        return ""

    def close(self) -> None:
        """End the side and its ranks: it ends with its input, or is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its servers and ranks end with it
            self._process.wait()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def variables_of(inherited: Mapping[str, str], more: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the environment variables of a side: those inherited, and its own."""
    return tuple(sorted({**inherited, **more}.items()))
