"""Stand for a process on an agent's host: ``python -m harness.cluster.errand HOST PORT CWD ENV SOCKET ARGUMENTS…``.

Standard input is the session's key.  ``CWD``: where it runs; ``ENV``: its variables, as JSON; ``SOCKET``: a socket
here, to which its stream is connected as soon as the process there has connected to its own
(:mod:`harness.cluster.errands`).  What it prints is printed here, and its exit status is ours.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections import deque

from harness.cluster import messages
from harness.cluster.credentials import Key
from harness.cluster.errands import HOST_LOST, REFUSED
from harness.cluster.facts import facts, passed_on
from harness.cluster.host import Host, HostRefused, connect
from harness.worlds.launch import LaunchError

_AT_ONCE = 1 << 18
_LONGEST = 1.0
_READING = 30.0
"""Seconds for whoever reads the stream here, once the process there has ended."""


class Relay:
    """Relays between a process on a host and a socket here.  ``number``: of the process; ``address``: of the socket."""

    def __init__(self, host: Host, number: int, address: str) -> None:
        self._host = host
        self._number = number
        self._address = address
        self._stream: socket.socket | None = None
        self._waiting: deque[memoryview] = deque()
        self._ended = False
        """Whether nothing more is expected of the stream, on this side or on theirs."""

    def run(self) -> int:
        """Relay until the process has ended; returns its exit status.  Errors: LaunchError if its host has gone."""
        while True:
            self._wait()
            self._host.pump()
            self._host.check()
            for message, payload in self._host.errands():
                if isinstance(message, messages.Output):
                    sys.stdout.buffer.write(payload)
                    sys.stdout.buffer.flush()
                elif isinstance(message, messages.Streamed):
                    self._streamed(payload, message.end)
                else:
                    self._drain()
                    return message.status if message.status >= 0 else 128 - message.status
            if self._host.lost:
                raise LaunchError(self._host.lost)
            self._write()
            self._read()

    def _wait(self) -> None:
        channel = self._host.channel
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.wants_to_write else 0))
        if self._stream is not None:
            poll.register(self._stream.fileno(), select.POLLIN | (select.POLLOUT if self._waiting else 0))
        poll.poll(0 if channel.readable else _LONGEST * 1000)

    def _streamed(self, payload: bytearray, end: bool) -> None:
        if self._stream is None and not self._ended:
            self._stream = socket.socket(socket.AF_UNIX)
            self._stream.connect(self._address)
            self._stream.setblocking(False)
        if payload:
            self._waiting.append(memoryview(payload))
        if end:
            self._drain()
            self._close()

    def _write(self) -> None:
        try:
            while self._waiting and self._stream is not None:
                sent = self._stream.send(self._waiting[0][:_AT_ONCE])
                if sent == len(self._waiting[0]):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = self._waiting[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it any more, or not for a long time
            self._waiting.clear()

    def _drain(self) -> None:
        """Write what is left, as long as somebody reads it."""
        if self._stream is not None:
            self._stream.settimeout(_READING)
            self._write()

    def _read(self) -> None:
        """Pass on what our side says; its end ends the stream there."""
        if self._stream is None:
            return
        try:
            data = self._stream.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._host.send(messages.Stream(self._number, not data), (data,))
        if not data:
            self._close()

    def _close(self) -> None:
        self._ended = True
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def main(host: str, port: str, cwd: str, env: str, address: str, *arguments: str) -> int:
    """Execute it, and return the exit status."""
    key = Key(sys.stdin.read())
    variables = {**passed_on(os.environ), **json.loads(env)}
    try:
        there = connect((host, int(port)), key, facts(), None)
    except HostRefused as e:
        print(e, file=sys.stderr)
        return REFUSED
    try:
        return Relay(there, there.execute(arguments, variables, cwd), address).run()
    except LaunchError as e:
        print(e, file=sys.stderr)
        return HOST_LOST
    finally:
        there.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
