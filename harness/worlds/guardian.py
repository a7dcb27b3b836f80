"""The guardian: the small process above the server, which reports how the server ended and ends everything below it.

It is started before torch is imported and does nothing but wait, so it does not share the server's fate (a crash, the
out-of-memory killer, a signal).  It is the sub-reaper above the server's own, so it becomes the parent of what the
server leaves behind, including daemons in sessions of their own.  It kills a server that somebody has stopped, because
nobody can tell whether the server will ever be continued, and a test must not wait for that.

If the guardian is killed, the server ends as if the controller had gone, and leaves nothing behind either.

It shares the server's socket to the controller and sends two messages on it: ``{"server": pid}`` at once, and
``{"ended": wait status, "stopped": the signal that had stopped it, or 0}`` at the end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from typing import NoReturn

from harness.worlds import processes
from harness.worlds.processes import ORPHANED

_TICK_MS = 200
_TICKS = 5
"""How many times in a row the server must be seen to be stopped before it is given up.  Ticks are counted instead of
seconds, so that a job that is suspended and continued as a whole loses nothing."""
_CLEARING = 1.0
"""Seconds for the remaining processes to end before the end of the server is reported."""


def main(fd: int, parent: int, modules: list[str], private: bool, start: str) -> NoReturn:
    """Fork the server and guard it.

    ``fd``: the socket to the controller, whose process is ``parent``; ``modules``: what the server imports;
    ``private``: whether ranks get a network of their own; ``start``: how their processes begin.
    """
    signal.signal(ORPHANED, lambda *_: None)
    processes.die_with_parent(parent, ORPHANED)
    processes.adopt_orphans()
    processes.mark_below()
    os.set_inheritable(fd, False)
    guardian = os.getpid()
    server = os.fork()
    if server == 0:
        os.setsid()  # a signal to the guardian's group is not meant for the server, and the other way round
        from harness.worlds.server import main as serve

        serve(fd, guardian, modules, private, start)
    _Guardian(socket.socket(fileno=fd), parent, server).watch()


class _Guardian:
    def __init__(self, sock: socket.socket, parent: int, server: int) -> None:
        self.sock = sock
        self.parent = parent
        self.server = server
        self.status: int | None = None
        self.stopped_by = 0
        self.ticks = 0

    def watch(self) -> NoReturn:
        """Wait until the server ends, is stopped, or is no longer needed; then end everything and this process."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, ORPHANED):
            signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock.fileno(), 0)  # reports only that the controller has closed its end
        poll.register(wake_r, select.POLLIN)
        self.tell({"server": self.server})
        needed = True
        while needed and not self.has_ended():
            for fd, _ in poll.poll(_TICK_MS if self.stopped_by else None):
                if fd == wake_r:
                    signals = os.read(wake_r, 4096)
                    told = signal.SIGTERM in signals or signal.SIGHUP in signals
                    needed = needed and not told and os.getppid() == self.parent
                else:
                    needed = False
        processes.kill(self.server)
        cleared = processes.end_children(time.monotonic() + _CLEARING, self.note)
        self.tell({"ended": self.status, "stopped": self.stopped_by})
        if not cleared:
            processes.end_children(float("inf"))
        os._exit(0)

    def has_ended(self) -> bool:
        """Return whether the server has ended, or has been stopped for so long that it is given up."""
        pid, status = os.waitpid(self.server, os.WNOHANG | os.WUNTRACED)
        if pid and not os.WIFSTOPPED(status):
            self.status = status
            return True
        if pid:
            self.stopped_by, self.ticks = os.WSTOPSIG(status), 0
        elif self.stopped_by and not processes.is_stopped(self.server):
            self.stopped_by = 0
        elif self.stopped_by:
            self.ticks += 1
        return self.ticks >= _TICKS

    def note(self, pid: int, status: int) -> None:
        if pid == self.server:
            self.status = status

    def tell(self, message: dict[str, int | None]) -> None:
        try:
            self.sock.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        except OSError:
            pass  # the controller has gone, or does not read
