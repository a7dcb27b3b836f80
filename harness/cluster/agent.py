"""The agent of a host: takes connections of controllers that have the key, each in a process of its own."""

from __future__ import annotations

import os
import select
import signal
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from harness.cluster import credentials
from harness.cluster.channel import Channel, tuned
from harness.cluster.interfaces import plain
from harness.cluster.messages import TO_AGENT, VERSION, Hello
from harness.cluster.session import Session
from harness.worlds.processes import die_with_parent

_HANDSHAKE = 5.0
"""Seconds in which a peer must prove that it has the key."""
_MOST_PENDING = 256
"""Peers that may be in that state at once.  If there are more, the oldest goes, which has had the most time."""
MOST_SESSIONS = 64
"""Sessions that an agent serves at once; each has a server of its own, with torch imported."""
_ENDING = 10.0
"""Seconds for sessions to end their ranks, before they are killed, and their ranks with them."""


@dataclass
class _Pending:
    """A peer that has yet to prove that it has the key."""

    sock: ssl.SSLSocket
    since: float


class Agent:
    """Listens on an address of this host.

    ``key``: of the session (:mod:`harness.cluster.credentials`); ``host``, ``port``: where to listen; with port 0 the
    kernel chooses; ``silence``: seconds after which a controller is given up whose host does not answer.

    Errors: OSError if it can't listen there.
    """

    def __init__(self, key: credentials.Key, host: str = "127.0.0.1", port: int = 0, *, silence: float = 30.0) -> None:
        self._tls = credentials.context(key, server=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        self._silence = silence
        self._pending: dict[int, _Pending] = {}
        self._sessions: set[int] = set()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.refused = 0
        """How many peers did not prove that they have the key."""

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that it listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, or until ``until()``, which is asked once a second.

        Ends every session and its ranks then.  Called in the main thread.
        """
        told: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: told.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        poll = select.epoll()
        poll.register(self._listener.fileno(), select.EPOLLIN)
        poll.register(self._wake_r, select.EPOLLIN)
        try:
            while not told and not until():
                for fd, _ in poll.poll(1.0):
                    if fd == self._wake_r:
                        os.read(self._wake_r, 4096)
                    elif fd == self._listener.fileno():
                        self._accept(poll)
                    elif fd in self._pending:
                        self._shake(fd, poll)
                self._reap()
                self._expire(poll)
        finally:
            signal.set_wakeup_fd(-1)
            self.close()

    def close(self) -> None:
        """End every session, and wait until its ranks have gone."""
        self._listener.close()
        for pending in self._pending.values():
            pending.sock.close()
        self._pending.clear()
        for pid in self._sessions:
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + _ENDING
        while self._sessions and time.monotonic() < until:
            self._reap()
            time.sleep(0.01)
        for pid in self._sessions:  # stopped, perhaps
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._sessions.clear()

    # peers

    def _accept(self, poll: select.epoll) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody is there, or no descriptor is left
                return
            sock.setblocking(False)
            tuned(sock, self._silence)
            wrapped = self._tls.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            if len(self._pending) >= _MOST_PENDING:
                self._drop(next(iter(self._pending)), poll)
            self._pending[wrapped.fileno()] = _Pending(wrapped, time.monotonic())
            poll.register(wrapped.fileno(), select.EPOLLIN)
            self._shake(wrapped.fileno(), poll)

    def _shake(self, fd: int, poll: select.epoll) -> None:
        """Go on with a handshake; begin a session once the peer has proven that it has the key."""
        pending = self._pending[fd]
        try:
            pending.sock.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLWantWriteError:
            poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
            return
        except (OSError, ValueError):
            self._drop(fd, poll)
            return
        poll.unregister(fd)
        del self._pending[fd]
        if len(self._sessions) < MOST_SESSIONS:
            self._begin(pending.sock)
            pending.sock.close()
        else:
            full = Channel(pending.sock, TO_AGENT)
            full.send(Hello(VERSION, {"refused": f"it has {MOST_SESSIONS} sessions already"}))
            full.close()

    def _drop(self, fd: int, poll: select.epoll) -> None:
        self.refused += 1
        poll.unregister(fd)
        self._pending.pop(fd).sock.close()

    def _expire(self, poll: select.epoll) -> None:
        before = time.monotonic() - _HANDSHAKE
        for fd in [fd for fd, pending in self._pending.items() if pending.since < before]:
            self._drop(fd, poll)

    # sessions

    def _begin(self, sock: ssl.SSLSocket) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_session(sock, parent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        self._sessions.add(pid)

    def _become_session(self, sock: ssl.SSLSocket, parent: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the agent decides, and says so by SIGTERM
        signal.signal(signal.SIGTERM, _leave)
        die_with_parent(parent)
        self._listener.close()
        for pending in self._pending.values():
            socket.socket(fileno=pending.sock.detach()).close()
        os.close(self._wake_r)
        os.close(self._wake_w)
        host, number = sock.getpeername()[:2]
        channel = Channel(sock, TO_AGENT)
        try:
            why = Session(channel, plain(sock.getsockname()[0])).serve()
        except _Told:
            why = "the agent ends"
        print(f"concord agent: the session of {host} port {number} has ended: {why}", file=sys.stderr, flush=True)
        os._exit(0)

    def _reap(self) -> None:
        for pid in list(self._sessions):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._sessions.discard(pid)


class _Told(BaseException):
    """Raised in a session that is told to end."""


def _leave(*_: object) -> None:
    raise _Told
