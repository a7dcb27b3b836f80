"""The server: the warm process that ranks are forked from, or the bare one that spawns them.

It is started fresh, and never forked from the controller.  It imports torch and its lazy parts once, touches no
accelerator, and stays single-threaded, so that a fork of it is a clean and fast start for a rank.  It forks on request,
reaps, and tells the controller how each rank ended.

It makes sure that nothing stays behind.  Ranks die with the server, the server ends with its guardian
(``guardian.py``), and the guardian ends with the controller.  Processes that a rank leaves behind are killed once the
rank has gone.

The protocol on the control socket (a SOCK_SEQPACKET pair, so one message is one packet) is JSON:

- controller to server: ``{"listen": backlog}``; ``{"spawn": token}`` with the rank's five file descriptors;
  ``{"kill": token}``; ``{"ping": n}``
- server to controller: ``{"ready": pid, "unforkable": [why], "missing": [...], "network": [why the host's, remedy]}``,
  ``{"listening": port}`` with the listening socket, which is made here because a socket belongs to its maker's network,
  ``{"spawned": token, "pid": pid}``, ``{"pong": n}``,
  ``{"exited": token, "status": wait status, "time_ns": monotonic, "maxrss_kib": n, "left": [what a rank left behind]}``
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from harness.profiles.vocabulary import SPAWN
from harness.worlds import network, pages, runtimes, segments, tables
from harness.worlds.network import Refusal
from harness.worlds.preloading import PRELOAD
from harness.worlds.processes import (
    ORPHANED,
    adopt_orphans,
    children,
    command_line,
    die_with_parent,
    end_children,
    kill,
    kill_group,
    parent_and_session,
)
from harness.worlds.seeding import seed

RANK_FDS = ("control", "monitor", "output", "box", "crash")
_MOST_PACKET = 65536
_MOST_LEFT = 20  # left-over processes that are named
_ENDING = 2.0  # seconds for the processes below the server to end before it does
_MANY = 40  # forks after which the server's memory is put into huge pages, for as long as these then save


_RANK = (
    "import json, sys\n"
    "path, fds, listener = json.loads(sys.argv[1])\n"
    "sys.path[:] = path\n"
    "from harness.worlds import rank\n"
    "rank.main(fds, listener)\n"
)
"""The code of a rank that is spawned."""


def _preload(modules: list[str]) -> list[str]:
    """Import what ranks will need; returns what could not be imported, which ranks then import themselves.

    A module of :data:`PRELOAD` that this PyTorch does not have is no loss.
    """
    missing = []
    with runtimes.out_of_reach() if "torch" in modules else contextlib.nullcontext():
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as e:
                if not (isinstance(e, ModuleNotFoundError) and name in PRELOAD and f"{name}.".startswith(f"{e.name}.")):
                    missing.append(f"{name}: {e}")
        if "torch" in modules:
            _find_backend()
        if "torch" in sys.modules:  # it may have failed to import
            seed()
        tables.fill(modules)
    return missing


def _find_backend() -> None:
    """Have torch find its backend for the CPU.

    Since 2.14, it searches the metadata of all installed packages for it, which would cost each rank 16 ms or more.
    """
    with contextlib.suppress(Exception):  # ranks will meet it again, and report it
        backend: Any = importlib.import_module("torch.distributed").Backend
        find = getattr(backend, "_ensure_backend_registered", None)
        if find is not None:
            find(backend.default_device_backend_map["cpu"])


def _unforkable() -> list[str]:
    """Say why children of this process would not be sound, a sentence each; none if they are."""
    threads = runtimes.other_threads()
    used = [f"it has used the runtime of an accelerator: {sentence}" for sentence in runtimes.touched()]
    if not threads:
        return used
    plural = "s" if len(threads) > 1 else ""
    return [f"it has {len(threads)} thread{plural} beside its own: {', '.join(map(repr, threads))}", *used]


class _Server:
    def __init__(self, sock: socket.socket, parent: int, start: str) -> None:
        self.sock = sock
        self.start = start
        self.pid = os.getpid()
        self.parent = parent
        self.pids: dict[int, int] = {}  # pid -> token
        self.forked = 0
        self.mapped: dict[int, set[segments.Segment]] = {}  # by pid of a killed rank
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> int:
        """Serve requests until the controller or the guardian goes; returns the signal that ended the server, or 0."""
        for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, ORPHANED):
            signal.signal(sig, lambda *_: None)  # seen through the wake-up pipe, as SIGCHLD is
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        poll.register(self.wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.wake_r:
                    signals = os.read(self.wake_r, 4096)
                    self.reap()
                    told = [sig for sig in (signal.SIGTERM, signal.SIGHUP) if sig in signals]
                    if told or os.getppid() != self.parent:
                        return told[0] if told else 0
                elif not self.request():
                    return 0

    def request(self) -> bool:
        """Serve one message; returns False once the controller has gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _MOST_PACKET, len(RANK_FDS) + 1)
        except OSError:
            return False
        if not data:
            return False
        message: dict[str, Any] = json.loads(data)
        if "spawn" in message:
            self.spawn(message["spawn"], fds)
        elif "kill" in message:
            for pid, token in self.pids.items():
                if token == message["kill"]:
                    self.mapped.setdefault(pid, set()).update(segments.mapped_by(pid))
                    kill_group(pid)
        elif "listen" in message:
            self.listen(message["listen"])
        elif "ping" in message:
            self.tell({"pong": message["ping"]})
        return True

    def listen(self, backlog: int) -> None:
        """Make the listening socket of a rendezvous, on a port that the kernel chooses."""
        with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listener:
            self.tell({"listening": listener.getsockname()[1]}, [listener.fileno()])

    def spawn(self, token: int, fds: list[int]) -> None:
        self.forked += 1
        if self.start != SPAWN:
            tables.INDUCTOR.fill_next()
            if self.forked == _MANY:
                pages.collapse()
        pid = os.fork()
        if pid == 0:
            try:
                self.become_rank(fds)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        for fd in fds:
            os.close(fd)
        self.pids[pid] = token
        self.tell({"spawned": token, "pid": pid})

    def become_rank(self, fds: list[int]) -> None:
        die_with_parent(self.pid)
        signal.set_wakeup_fd(-1)
        for sig in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, ORPHANED):
            signal.signal(sig, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.sock.close()
        os.close(self.wake_r)
        os.close(self.wake_w)
        os.setsid()
        named = dict(zip(RANK_FDS, fds, strict=False))
        os.dup2(named["output"], 1)
        os.dup2(named["output"], 2)
        os.close(named["output"])
        listener = fds[len(RANK_FDS)] if len(fds) > len(RANK_FDS) else None
        if self.start == SPAWN:
            named.pop("output")
            for fd in (*named.values(), *([] if listener is None else [listener])):
                os.set_inheritable(fd, True)
            arguments = [sys.executable, "-c", _RANK, json.dumps([sys.path, named, listener])]
            os.execv(arguments[0], arguments)  # noqa: S606 - our own interpreter
        from harness.worlds import rank

        rank.main(named, listener)

    def reap(self) -> None:
        """Collect every process that has ended, and report those that were ranks."""
        ended: list[dict[str, Any]] = []
        reaped = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            reaped = True
            token = self.pids.pop(pid, None)
            if token is not None:
                when = time.monotonic_ns()
                ended.append({"exited": token, "status": status, "time_ns": when, "maxrss_kib": usage.ru_maxrss})
                ended[-1]["left"] = self.sweep(pid)
                segments.remove(self.mapped.pop(pid, ()))
        if reaped and not ended:
            self.sweep(0)  # children of processes that were killed last time are ours now
        for message in ended:
            self.tell(message)

    def sweep(self, dead: int) -> list[str]:
        """Kill what a dead rank left: its process group, and orphans, which are our children now.

        ``dead``: its pid, or 0 for orphans only.  Returns descriptions of the orphans.
        """
        left = []
        for pid in children():
            if pid not in self.pids and parent_and_session(pid)[1] not in self.pids:
                left.append(f"process {pid} ({command_line(pid)})")
                kill(pid)
        if dead:
            kill_group(dead)
        return left if len(left) <= _MOST_LEFT else [*left[:_MOST_LEFT], f"{len(left) - _MOST_LEFT} more processes"]

    def tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self.sock, [json.dumps(message).encode()], list(fds))
        except OSError:
            pass  # the controller has gone: the next read notices

    def end(self) -> None:
        """Kill everything below the server.  Ends of ranks are not reported: the end of the server caused them."""
        for pid in list(self.pids):
            kill_group(pid)
        end_children(time.monotonic() + _ENDING)


def main(fd: int, parent: int, modules: list[str], private: bool, start: str) -> NoReturn:
    """Run the server on a socket until the controller goes.  Called once, in a process with one thread.

    ``parent``: the guardian; ``private``: whether ranks get a network of their own, where the kernel allows it;
    ``start``: how their processes begin.
    """
    signal.signal(ORPHANED, lambda *_: None if os.getppid() == parent else os._exit(0))
    refusal = network.refusal() if private else Refusal("asked for")
    if not refusal:
        network.enter()
    die_with_parent(parent, ORPHANED)  # only now: a change of credentials makes the kernel forget it
    adopt_orphans()
    missing = _preload(modules)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    server = _Server(socket.socket(fileno=fd), parent, start)
    # Imported objects are never garbage: keep them out of every rank's garbage collections, and their pages shared.
    gc.collect()
    gc.freeze()
    told = [refusal.why, refusal.remedy]
    unforkable = [] if start == SPAWN else _unforkable()
    server.tell({"ready": server.pid, "unforkable": unforkable, "missing": missing, "network": told})
    ended_by, code = 0, 0
    try:
        ended_by = server.serve()
    except BaseException:  # the controller quotes its last line as the reason for the server's end
        traceback.print_exc()
        code = 1
    server.end()
    if ended_by:  # so that the guardian can say what ended it
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(server.pid, ended_by)
    os._exit(code)
