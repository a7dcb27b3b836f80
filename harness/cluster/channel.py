"""One connection between the controller and an agent: messages over TLS, without waiting for the peer."""

from __future__ import annotations

import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from harness.cluster.messages import Message

_HEADER = struct.Struct("!IQ")  # bytes of the message, bytes of its payload
_MOST_MESSAGE = 64 << 20
_MOST_PAYLOAD = 64 << 30
_AT_ONCE = 1 << 18
_MOST_A_TURN = 16 << 20  # bytes that are read before others get their turn


class ChannelLost(ConnectionError):
    """The peer has gone, or sent something that is not a message."""


class Arrived(NamedTuple):
    """A message with its payload."""

    message: Any
    payload: bytearray


class Channel:
    """A connection on which TLS has been agreed.

    ``sock``: made with ``suppress_ragged_eofs=False``, or a reset would read as an orderly end; ``receives``: the type
    of the messages that arrive here.  Takes ownership of the socket.  The end of the connection, whatever its reason,
    is :attr:`lost`.
    """

    def __init__(self, sock: ssl.SSLSocket, receives: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._payload: bytearray | None = None
        self._filled = 0
        self._message: Any = None
        self.lost = ""
        """Why nothing can be sent or received any more, in words; empty while it can."""
        self.received = 0
        """The number of bytes that have arrived."""

    def fileno(self) -> int:
        """Return the descriptor, for waiting; negative once it is closed."""
        return self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out) and not self.lost

    @property
    def waiting(self) -> int:
        """How many bytes wait to be sent."""
        return sum(map(len, self._out))

    @property
    def readable(self) -> bool:
        """Whether something has arrived that waiting for the descriptor would not show."""
        return not self.lost and self._sock.pending() > 0

    def send(self, message: Message, payload: Sequence[bytes | bytearray] = ()) -> None:
        """Send a message, or as much as the socket takes now; :meth:`flush` sends the rest."""
        if self.lost:
            return
        body = self._encoder.encode(message)
        head = _HEADER.pack(len(body), sum(map(len, payload)))
        if sum(map(len, payload)) <= _AT_ONCE:
            self._out.append(memoryview(b"".join((head, body, *payload))))
        else:
            self._out += [memoryview(head + body), *(memoryview(part) for part in payload)]
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        try:
            while self._out and not self.lost:
                part = self._out[0]
                sent = self._sock.send(part[:_AT_ONCE])
                if sent == len(part):
                    self._out.popleft()
                else:
                    self._out[0] = part[sent:]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
            pass
        except OSError as e:
            self._lose(e)

    def receive(self) -> list[Arrived]:
        """Return the messages that have arrived completely; [] if there are none, or if the connection is lost."""
        arrived: list[Arrived] = []
        read = 0
        try:
            while not self.lost and read < _MOST_A_TURN:
                if self._payload is not None and self._filled < len(self._payload):
                    got = self._sock.recv_into(memoryview(self._payload)[self._filled :])
                    self._filled += got
                else:
                    data = self._sock.recv(_AT_ONCE)
                    got = len(data)
                    self._in += data
                if not got:
                    self.lost = "the peer closed the connection"
                read += got
                self.received += got
                arrived += self._complete()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            pass
        except OSError as e:
            self._lose(e)
        except (ValueError, MemoryError) as e:  # msgspec's errors are ValueErrors
            self.lost = f"the peer sent something that is not a message: {e}"
        return arrived

    def _complete(self) -> list[Arrived]:
        """Take complete messages from what has been read.  Errors: ValueError for bytes that are not a message."""
        arrived: list[Arrived] = []
        while True:
            if self._payload is not None:
                if self._filled < len(self._payload):
                    return arrived
                arrived.append(Arrived(self._message, self._payload))
                self._payload = None
            if len(self._in) < _HEADER.size:
                return arrived
            body, rest = _HEADER.unpack_from(self._in)
            if body > _MOST_MESSAGE or rest > _MOST_PAYLOAD:
                raise ValueError(f"it announces {body:,} and {rest:,} bytes")
            begin, end = _HEADER.size, _HEADER.size + body
            if len(self._in) < end:
                return arrived
            self._message = self._decoder.decode(memoryview(self._in)[begin:end])
            taken = self._in[end : end + rest]
            del self._in[: end + len(taken)]
            self._filled = len(taken)
            taken.extend(bytes(rest - len(taken)))
            self._payload = taken

    def _lose(self, error: OSError) -> None:
        if isinstance(error, ssl.SSLEOFError):
            # Python before 3.12.3 has no other error for a reset or a timeout, and then no reason.
            ended = "the peer closed the connection" if error.reason else "the connection broke (reset, or timed out)"
        else:
            told = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
            ended = f"the connection broke ({told})"
        self.lost = self.lost or ended

    def close(self) -> None:
        """Close the connection.  May be called twice."""
        self.lost = self.lost or "it has been closed"
        self._out.clear()
        self._sock.close()


def tuned(sock: socket.socket, silent_for: float) -> None:
    """Set a connection so that small messages leave at once, and a peer that is silent for some seconds is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", max(1, round(silent_for)))):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silent_for * 1000))
