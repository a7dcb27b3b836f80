"""A process beside pytest that starts agents, says so in lines of text, and ends with pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from harness.safe_io.shown import printable
from harness.safe_io.waiting import readable
from harness.worlds.processes import die_with_parent

_ENDING = 30.0
_SAYING = 10.0
_SHOWN = 4
"""The number of lines of its errors that a message repeats."""


class StarterEnded(RuntimeError):
    """The error for a process that has ended, or says nothing; it repeats the end of what it said on standard error."""


class Starter:
    """Starts the process.

    ``told``: what it reads on standard input; ``kept``: whether its standard input stays open until :meth:`stop`.
    It is signaled with SIGTERM when this process ends, in any way.
    """

    def __init__(self, command: Sequence[str], told: str, env: Mapping[str, str], *, kept: bool = False) -> None:
        ours = os.getpid()
        self._name = os.path.basename(command[0])
        self._given = self._until = 0.0
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(env),
            start_new_session=True,  # Ctrl-C is pytest's
            preexec_fn=lambda: die_with_parent(ours, signal.SIGTERM),
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(told.encode())
            self._process.stdin.flush()
            if not kept:
                self._process.stdin.close()
        except OSError:
            pass  # it has ended, and says why

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the lines that it prints.  Says that it is waited for, once in every silence that is long.

        Errors: :class:`StarterEnded` when it has ended, or says no more in time (:meth:`expect`).
        """
        assert self._process.stdout is not None
        text = b""
        self.expect(seconds)
        while True:
            if not self._heard(min(_SAYING, self._until - time.monotonic())):
                if time.monotonic() < self._until:
                    print(f"concord: waiting for {self._name}{self._why()}", file=sys.stderr, flush=True)
                if not self._heard(self._until - time.monotonic()):
                    raise StarterEnded(f"{self._name} was not ready after {self._given:g} s{self._why()}")
            more = os.read(self._process.stdout.fileno(), 65536)
            if not more:
                self._end()
                raise StarterEnded(f"{self._name} ended with status {self._process.returncode}{self._why()}")
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")

    def expect(self, seconds: float) -> None:
        """Give it so many seconds from now on."""
        self._given, self._until = seconds, time.monotonic() + seconds

    def _heard(self, seconds: float) -> bool:
        assert self._process.stdout is not None
        return readable(self._process.stdout, seconds)

    def _why(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").split("\n") if line.strip()]
        said = "; ".join(printable(line)[:300] for line in lines[-_SHOWN:])
        return f": {said}" if said else ""

    def _end(self) -> None:
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End the process, and wait until it has gone.  May be called twice."""
        if self._errors.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it has ended before it read everything
        self._process.terminate()
        self._end()
        self._process.stdout.close()
        self._errors.close()
