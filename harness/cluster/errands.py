"""Processes that agents execute for a session and that are not ranks, each with a stream to the session.

The session's end is :mod:`harness.cluster.errand`, a process that stands for the one on the agent's host: it has its
output, its stream and its exit status.  So whatever starts processes here can start them there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from harness.cluster import messages
from harness.worlds.processes import die_with_parent

FOLDER = "{folder}"
"""In arguments and variables, the folder of the process."""
SOCKET = "socket"
"""The name of the socket in that folder, to which the process connects for its stream."""
REFUSED, HOST_LOST = 76, 75
"""Exit statuses of the process that stands for one: the host can't be used; it has gone, and the process with it."""
_AT_ONCE = 1 << 18

Send = Callable[[messages.Message, Sequence[bytes]], None]


class Errand:
    """A process on this host, for a session that is not on it.

    ``send``: sends a message to the session.  Errors: OSError if it can't be started.
    """

    def __init__(self, asked: messages.Execute, send: Send) -> None:
        self.number = asked.number
        self._send = send
        self._stream: socket.socket | None = None
        self._waiting: deque[memoryview] = deque()
        self._closing = False
        self._stack = contextlib.ExitStack()
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="concord-errand-"))
            self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(f"{folder}/{SOCKET}")
            self._listener.listen(1)
            self._listener.setblocking(False)
            ours = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, *(each.replace(FOLDER, folder) for each in asked.arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=asked.cwd if os.path.isdir(asked.cwd) else None,
                env={**os.environ, **{name: value.replace(FOLDER, folder) for name, value in asked.env.items()}},
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(ours),
            )
        except BaseException:
            self._stack.close()
            raise
        assert self._process.stdout is not None
        self._output = self._stack.enter_context(self._process.stdout)
        os.set_blocking(self._output.fileno(), False)
        self._output_ended = self._stream_ended = False

    def descriptors(self, busy: bool) -> Iterator[tuple[int, int]]:
        """Yield what to wait for, as for :class:`select.poll`.  ``busy``: whether the controller has enough to read."""
        if not busy and not self._output_ended:
            yield self._output.fileno(), select.POLLIN
        if self._stream is None:
            yield self._listener.fileno(), select.POLLIN
        elif not self._stream_ended or self._waiting:
            reading = select.POLLIN if not (busy or self._stream_ended) else 0
            yield self._stream.fileno(), reading | (select.POLLOUT if self._waiting else 0)

    def feed(self, payload: bytearray, *, end: bool) -> None:
        """Give something to the stream."""
        if payload:
            self._waiting.append(memoryview(payload))
        self._closing = self._closing or end

    def turn(self, busy: bool) -> bool:
        """Relay what there is, without waiting; returns whether the process has ended and everything has been sent."""
        self._accept()
        self._write()
        if not busy:
            self._read_stream()
            self._read_output()
        if not self._output_ended or (self._stream is not None and not self._stream_ended):
            return False
        if self._process.poll() is None:
            return False
        self._send(messages.Exited(self.number, self._process.returncode), ())
        self.close()
        return True

    def close(self) -> None:
        """Kill the process, and what it has started in its session; remove its folder."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._stream is not None:
            self._stream.close()
        self._stack.close()

    def _accept(self) -> None:
        if self._stream is None:
            try:
                self._stream, _ = self._listener.accept()
            except OSError:  # nobody has connected yet
                return
            self._stream.setblocking(False)
            self._send(messages.Streamed(self.number, False), ())

    def _write(self) -> None:
        if self._stream is None:
            return
        try:
            while self._waiting:
                sent = self._stream.send(self._waiting[0][:_AT_ONCE])
                if sent == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][sent:]
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            self._waiting.clear()
        if self._closing and not self._waiting:
            self._closing = False
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_WR)

    def _read_stream(self) -> None:
        if self._stream is None or self._stream_ended:
            return
        ended = self._process.poll() is not None
        try:
            data = self._stream.recv(_AT_ONCE)
        except BlockingIOError:
            if not ended:
                return
            data = b""
        except OSError:
            data = b""
        self._stream_ended = not data
        self._send(messages.Streamed(self.number, self._stream_ended), (data,))

    def _read_output(self) -> None:
        """Relay what it prints, up to its end: nobody waits for what it has started."""
        if self._output_ended:
            return
        ended = self._process.poll() is not None
        try:
            data = os.read(self._output.fileno(), _AT_ONCE)
        except BlockingIOError:
            self._output_ended = ended
            return
        self._output_ended = not data
        if data:
            self._send(messages.Output(self.number), (data,))
