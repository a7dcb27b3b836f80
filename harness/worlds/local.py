"""The local launcher: forks ranks from a warm server, watches that server, and reports what became of it."""

from __future__ import annotations

import array
import dataclasses
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.profiles.vocabulary import FORK, SPAWN
from harness.safe_io.shown import printable
from harness.safe_io.waiting import readable
from harness.worlds import processes, wire
from harness.worlds.blackbox import CRASH_SIZE, BlackBox, fixed_file
from harness.worlds.compiled import cache_folder, remove_unfinished
from harness.worlds.handle import Clock, Heard, RankHandle
from harness.worlds.launch import AUTOLOAD, Exit, LaunchError, ServerLost, import_path
from harness.worlds.listening import LocalListener
from harness.worlds.local_rank import LocalRank
from harness.worlds.network import Refusal
from harness.worlds.preloading import preload_of
from harness.worlds.rank import RankSetup

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # as torchrun does: many ranks share the cores
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "GLOO_SOCKET_IFNAME": "lo",  # loopback only, and no dependence on how the host's name resolves
}
"""Default environment variables of ranks; those that the caller has set take precedence."""


_SERVER = "the server that ranks are forked from"
_UNFORKABLE = (
    "Something that Python imports at its start (a .pth file, sitecustomize) or with torch did that: remove it, or "
    "start each rank as a new Python with --rank-start spawn"
)
_ENDING = 3.0  # seconds for the guardian to end everything below it
_MOST_PACKET = 65536


class LocalLauncher:
    """Starts ranks on this machine: forks them from a server that has torch imported, or spawns them.

    The constructor starts the server below a guardian.  When the server ends, the guardian ends everything that the
    server started.  The first :meth:`spawn` waits for the server's imports.

    ``preload``: modules that the server imports, by default :func:`preload_of` the environment; ``start_timeout``:
    seconds that this may take; ``private``: whether ranks get a network of their own, if the kernel allows it;
    ``patience``: how many seconds the server may leave questions unanswered; ``start``: ``fork``, or ``spawn``: the
    server imports nothing, and each rank is a new Python.
    """

    def __init__(
        self,
        preload: Sequence[str] | None = None,
        start_timeout: float = 120.0,
        *,
        private: bool = True,
        patience: int = 10,
        start: str = FORK,
    ) -> None:
        self.clock: Clock = time
        self._processes: dict[int, LocalRank] = {}
        self._next_token = 1
        self._start_timeout = start_timeout
        self._patience = patience
        self._unanswered = 0
        self._heard = 0  # messages
        self._next_question = 0.0
        self._ready: dict[str, Any] | None = None
        self._listeners: list[socket.socket] = []
        self._server_pid = 0
        self._server_fd = -1
        self._network_fd = -1
        self.lost = ""
        """What became of the server, once it can't be used any more; empty until then."""
        # Packages that extend torch start threads and touch devices, so ranks import them, and the server does not.
        before_torch = {} if start == SPAWN else {AUTOLOAD: "0"}
        self.environment = {**RANK_ENVIRONMENT, **os.environ, **before_torch}
        self._mark = uuid.uuid4().hex
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A write that nobody reads must not block forever.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", patience, 0))
        self._log_fd = os.memfd_create("concord-server-log", os.MFD_CLOEXEC)
        code = (
            "import json, sys\n"
            "path, *arguments = json.loads(sys.argv[1])\n"
            "sys.path[:] = path\n"
            "from harness.worlds.guardian import main\n"
            "main(*arguments)\n"
        )
        modules = [] if start == SPAWN else list(preload_of(os.environ) if preload is None else preload)
        argument = json.dumps([import_path(), theirs.fileno(), os.getpid(), modules, private, start])
        # Imports of numpy and torch start helper threads in BLAS unless told not to, and a process with threads
        # must not be forked.
        single = {} if start == SPAWN else {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**self.environment, **single, processes.MARK: self._mark}
        self._guardian = subprocess.Popen(
            [sys.executable, "-c", code, argument],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log_fd,
            stderr=self._log_fd,
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        remove_unfinished(cache_folder(self.environment))  # while the server imports: ranks come later

    @property
    def server_pid(self) -> int:
        """The server's process id; 0 until it is known, which it is once the server is ready."""
        return self._server_pid

    @property
    def guardian_pid(self) -> int:
        """The process id of the guardian above the server."""
        return self._guardian.pid

    @property
    def alive(self) -> bool:
        """Whether ranks can be forked, as far as is known."""
        self.poll()
        return not self.lost

    @property
    def refusal(self) -> Refusal:
        """Why ranks are on the host's network; false if they have one of their own.  Waits until that is known."""
        return Refusal(*self.wait_ready()["network"])

    @property
    def network(self) -> str:
        """Which network ranks are on, in words; empty until it is known."""
        if self._ready is None:
            return ""
        refusal = self.refusal
        return f"host: {refusal.why}" if refusal else "private"

    @property
    def interfaces(self) -> Sequence[str]:
        """None: ranks are on this host alone."""
        return ()

    @property
    def settled(self) -> bool:
        """Whether the server is ready or was lost, so that :meth:`spawn` does not wait for it."""
        self.poll()
        return self._ready is not None or bool(self.lost)

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the server has imported what it preloads; returns its ``ready`` message.

        Errors: :class:`LaunchError` if it ends before, is not ready in time, or can't be forked.
        """
        deadline = time.monotonic() + self._start_timeout
        while self._ready is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"{_SERVER} was not ready after {self._start_timeout:.0f} s\n{self._log()}")
            if readable(self._sock, min(left, 1.0)):
                self.poll()
            if self._ready is None and self.lost:
                raise LaunchError(f"{self.lost}, before it was ready\n{self._log()}")
        if why := self._ready["unforkable"]:
            raise LaunchError(f"{_SERVER} can't be forked: {'; '.join(why)}. {_UNFORKABLE}\n{self._log()}")
        return self._ready

    def _log(self) -> str:
        size = os.fstat(self._log_fd).st_size
        return printable(os.pread(self._log_fd, 4000, max(0, size - 4000)).decode(errors="replace"))

    def spawn(self, setups: Sequence[RankSetup], rendezvous: socket.socket | None = None) -> list[LocalRank]:
        """Start a rank for each setup.  Returns handles at once; ranks report when they are ready.

        If the setups have a rendezvous already, other ranks of their world run elsewhere.  ``rendezvous``: then its
        listening socket, if rank 0 runs here.  The caller keeps it.

        Errors: :class:`LaunchError` if no server comes up; :class:`ServerLost` if the server has gone since.
        """
        self.wait_ready()
        if setups[0].store[1]:
            return self._spawn(setups, setups[0].store, rendezvous)
        with self._listen(max(64, 2 * len(setups))) as listener:
            return self._spawn(setups, listener.getsockname()[:2], listener)

    def _spawn(
        self, setups: Sequence[RankSetup], address: tuple[str, int], listener: socket.socket | None
    ) -> list[LocalRank]:
        wanted = {**RANK_ENVIRONMENT, **os.environ}
        changed = {k: v for k, v in wanted.items() if self.environment.get(k) != v}
        unset = tuple(k for k in self.environment if k not in wanted)
        processes: list[LocalRank] = []
        try:
            for setup in setups:
                env = {
                    **changed,
                    "RANK": str(setup.index),
                    "LOCAL_RANK": _local_rank(setup),
                    "WORLD_SIZE": str(setup.size),
                    "LOCAL_WORLD_SIZE": str(setup.size),
                    "MASTER_ADDR": address[0],
                    "MASTER_PORT": str(address[1]),
                    # Rank 0 has the store already: nobody may bind its port again.
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    **setup.env,
                }
                setup = dataclasses.replace(setup, env=env, unset=unset, store=address)
                inherited = listener.fileno() if listener is not None and setup.index == 0 else None
                processes.append(self._spawn_one(setup, inherited))
        except BaseException:
            for process in processes:
                self.kill(process)
                process.close()
            raise
        return processes

    def _spawn_one(self, setup: RankSetup, listener: int | None) -> LocalRank:
        token, self._next_token = self._next_token, self._next_token + 1
        control, rank_control = socket.socketpair()
        watch, rank_watch = socket.socketpair()
        output_r, output_w = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(output_w, fcntl.F_SETPIPE_SZ, 1 << 18)
        box_fd = BlackBox.create(f"concord-rank-{setup.index}")
        crash_fd = fixed_file(f"concord-crash-{setup.index}", CRASH_SIZE)
        process = LocalRank(setup.index, token, control, watch, output_r, BlackBox(box_fd), crash_fd)
        fds = [rank_control.fileno(), rank_watch.fileno(), output_w, box_fd, crash_fd]
        try:
            self._tell({"spawn": token}, fds if listener is None else [*fds, listener])
            self._processes[token] = process
            process.send(wire.dumps(setup))
        except BaseException:
            process.close()
            raise
        finally:
            rank_control.close()
            rank_watch.close()
            os.close(output_w)
            os.close(box_fd)
        return process

    def _listen(self, backlog: int) -> socket.socket:
        """Have the server make a listening socket on the ranks' network, and return it."""
        self._tell({"listen": backlog})
        while not self._listeners:
            if self.lost:
                raise ServerLost(f"{self.lost}\n{self._log()}")
            if readable(self._sock, 1.0):
                self.poll()
            else:
                self.check()
        return self._listeners.pop()

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._sock, [json.dumps(message).encode()], list(fds))
        except OSError as e:
            self.poll()  # a message may say what has happened
            if not self.lost:
                late = f"{_SERVER} did not read for {self._patience} s{self._state()}"
                self._lose(late if isinstance(e, BlockingIOError) else self._guardian_gone())
            raise ServerLost(f"{self.lost} ({e})\n{self._log()}") from e

    def kill(self, rank: RankHandle) -> None:
        """Kill a rank and everything that it started, without waiting for its end."""
        process = _own(rank)
        if process.exit is None:
            try:
                self._tell({"kill": process.token})
            except LaunchError:
                pass  # the ranks have ended with the server

    def listen(self, ranks: Sequence[RankHandle], to: Collection[Heard]) -> LocalListener:
        """Return a listener to ranks of this launcher; see :class:`~harness.worlds.handle.Launcher`."""
        return LocalListener(self._sock.fileno(), self.poll, self.check, [_own(rank) for rank in ranks], to)

    def refresh(self, ranks: Sequence[RankHandle]) -> None:
        """Do nothing: what this host's kernel knows of a rank is asked when it is needed."""

    def poll(self) -> None:
        """Take messages without waiting: record which ranks have ended, and what has become of the server."""
        while not self.lost:
            try:
                data, fds = _received(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # our last questions were never read; what the server sent before can still be read
            except OSError:
                data, fds = b"", []
            self._listeners += [socket.socket(fileno=fd) for fd in fds]
            if not data:
                self._lose(self._guardian_gone())
                return
            self._unanswered = 0
            self._heard += 1
            self._note(json.loads(data))

    def check(self) -> bool:
        """Ask the server from time to time whether it is there, and give it up if it does not answer for too long.

        At most one question is asked per second, and unanswered questions are counted instead of seconds, so that a
        process that was suspended does not mistake its own sleep for the server's.  Returns whether this call received
        anything or gave the server up.
        """
        now = time.monotonic()
        if now < self._next_question or self.lost or self._ready is None:
            return False
        self._next_question, before = now + 1.0, self._heard
        if not self.alive:
            return True
        if self._unanswered >= self._patience:
            self._lose(f"{_SERVER} did not answer for {self._patience} s{self._state()}")
            return True
        try:
            self._sock.send(json.dumps({"ping": self._unanswered}).encode(), socket.MSG_DONTWAIT)
        except OSError:
            pass  # the socket is full of unread questions; or the server has gone, which the next poll notices
        self._unanswered += 1
        return self._heard > before

    def _state(self) -> str:
        stopped = [
            name
            for name, pid in (("it", self._server_pid), ("its guardian", self._guardian.pid))
            if processes.is_stopped(pid)
        ]
        return f" ({' and '.join(stopped)} had been stopped by a signal)" if stopped else ""

    def _note(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self._ready = dict(message)
            self._network_fd = processes.namespace_of(message["ready"])
        elif "server" in message:
            self._server_pid = message["server"]
            try:
                self._server_fd = os.pidfd_open(self._server_pid)
            except OSError:
                pass  # it has gone, and its guardian will say so
        elif "spawned" in message:
            process = self._processes.get(message["spawned"])
            if process is not None:
                process.pid = message["pid"]
        elif "exited" in message:
            process = self._processes.pop(message["exited"], None)
            if process is not None:
                left = tuple(message["left"])
                process.exit = Exit(message["status"], message["time_ns"], message["maxrss_kib"], left)
        elif "ended" in message:
            self._lose(self._server_gone(message["ended"], message["stopped"]))

    def _server_gone(self, status: int | None, stopped_by: int) -> str:
        if stopped_by:
            return f"{_SERVER} was stopped by {signal.Signals(stopped_by).name}, and given up"
        if status is None:
            return f"{_SERVER} was ended by its guardian"
        ended = Exit(status, 0)
        last = "" if ended.signal is not None else self._log().strip().split("\n")[-1]
        return f"{_SERVER} {'was ' if ended.signal is not None else ''}{ended}{f': {last}' if last else ''}"

    def _guardian_gone(self) -> str:
        """Describe what became of the guardian, which has gone without a message about the server."""
        try:
            code = self._guardian.wait(1)
        except subprocess.TimeoutExpired:
            return f"{_SERVER} has closed its connection"
        ended = Exit(-code if code < 0 else code << 8, 0)
        return f"the guardian of {_SERVER} {'was ' if ended.signal is not None else ''}{ended}"

    def _lose(self, why: str) -> None:
        """Give the server up: end it and everything that it started, and record that its ranks are gone."""
        if self.lost:
            return
        self.lost = why
        self._kill_server()
        self._end_guardian()
        processes.kill_marked(self._mark, self._network_fd)  # in case both were killed or stopped
        for process in self._processes.values():
            process.exit = Exit(int(signal.SIGKILL), time.monotonic_ns(), server=why)
        self._processes.clear()

    def _kill_server(self) -> None:
        if self._server_fd >= 0:
            try:
                signal.pidfd_send_signal(self._server_fd, signal.SIGKILL)
            except OSError:
                pass  # it has ended

    def _end_guardian(self) -> None:
        """Wait for the guardian, which ends once everything below it has; if it does not end, do its work."""
        try:
            self._guardian.wait(0 if processes.is_stopped(self._guardian.pid) else _ENDING)
        except subprocess.TimeoutExpired:
            self._kill_server()
            self._guardian.kill()
            self._guardian.wait()
            processes.kill_marked(self._mark, self._network_fd)

    def close(self) -> None:
        """Kill all ranks and stop."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._sock.close()  # the guardian then ends the server, everything that is left, and itself
        self._end_guardian()
        for listener in self._listeners:
            listener.close()
        for fd in (self._server_fd, self._network_fd):
            if fd >= 0:
                os.close(fd)
        os.close(self._log_fd)


def _local_rank(setup: RankSetup) -> str:
    """Return ``LOCAL_RANK``, which scripts take for the index of the rank's device; on the host, the rank."""
    return setup.device.partition(":")[2] or str(setup.index)


def _own(rank: RankHandle) -> LocalRank:
    """Return a rank as a :class:`LocalRank`.  Errors: TypeError if it is not on this host."""
    if not isinstance(rank, LocalRank):
        raise TypeError(f"rank {rank.index} is not on this host: {type(rank).__name__}")
    return rank


def _received(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet and its descriptors, without waiting.  (:func:`socket.recv_fds` ignores its flags.)

    Errors: BlockingIOError if there is none.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(_MOST_PACKET, socket.CMSG_LEN(fds.itemsize), flags)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
