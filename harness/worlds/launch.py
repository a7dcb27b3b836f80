"""Starting ranks: the launcher's interface, and the local launcher, which forks them from a warm server."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.shown import printable
from harness.worlds import wire
from harness.worlds.blackbox import CRASH_SIZE, BlackBox, fixed_file
from harness.worlds.rank import STACK_SIGNAL, RankSetup

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.parallel.fsdp",
    "torch.distributed._composable.replicate",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "torch._dynamo.convert_frame",
    "torch._dynamo.backends.registry",
    "torch._dynamo.testing",
    "torch._functorch.aot_autograd",
    "torch._functorch.compilers",
    "torch._inductor.compile_fx",
    "functorch.compile",
    "torch.fx.experimental.symbolic_shapes",
    "torch.profiler._cupti_monitor",
    "sympy",
    "cloudpickle",
    "_pytest.assertion",
    "_pytest._code",
    "harness.worlds.rank",
    "harness.worlds.recorder",
    "harness.oracles.exact",
)
"""Imported once in the server, so that no rank pays for it; what a PyTorch does not have is passed over."""

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # as torchrun does: many ranks share the cores
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "GLOO_SOCKET_IFNAME": "lo",  # loopback only, and no dependence on how the host's name resolves
}
"""Defaults; what the caller has set wins."""


_MOST_SNAPSHOT = 8 << 20  # bytes of a monitor's answer


class LaunchError(RuntimeError):
    """The machinery that starts ranks does not work; says what it printed."""


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended."""

    status: int
    """As from :func:`os.wait`."""
    time_ns: int
    """Monotonic clock, when the server noticed."""
    maxrss_kib: int = 0
    left: tuple[str, ...] = ()
    """What it left running, now killed."""

    @property
    def signal(self) -> signal.Signals | int | None:
        if not os.WIFSIGNALED(self.status):
            return None
        number = os.WTERMSIG(self.status)
        try:
            return signal.Signals(number)
        except ValueError:
            return number

    @property
    def code(self) -> int | None:
        return os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None

    @property
    def clean(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            name = self.signal.name if isinstance(self.signal, signal.Signals) else f"signal {self.signal}"
            hint = {"SIGKILL": " (by someone, or by the kernel for want of memory)"}.get(name, "")
            return f"killed by {name}{hint}"
        return f"exited with code {self.code}"


class Output:
    """What a rank printed: the first and the last of it, however much it was."""

    HEAD = 256 * 1024
    TAIL = 256 * 1024

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.HEAD - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self.TAIL:
                del self._tail[: -self.TAIL]

    def text(self) -> str:
        head, tail = bytes(self._head), bytes(self._tail[-self.TAIL :])
        left_out = self.total - len(head) - len(tail)
        note = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
        return (head + note + tail).decode(errors="replace")


@dataclass
class RankProcess:
    """The controller's end of one rank."""

    index: int
    token: int
    control: socket.socket
    monitor: socket.socket
    output_fd: int
    box: BlackBox
    crash_fd: int
    pid: int = 0
    exit: Exit | None = None
    output: Output = field(default_factory=Output)
    reader: wire.FrameReader = field(init=False)
    control_there: int = 0
    """The rank's descriptor of its end of the control channel; 0 as long as it has not said."""
    _crash_read: int = 0
    _monitor_bytes: bytearray = field(default_factory=bytearray)
    _asked: int = 0
    monitor_lost: bool = False
    """Whether something that is no answer came from the monitor: nothing else that comes from it can be read."""
    closed: bool = False
    output_closed: bool = False

    def __post_init__(self) -> None:
        self.control.setblocking(False)
        self.monitor.setblocking(False)
        os.set_blocking(self.output_fd, False)
        self.reader = wire.FrameReader(self.control)

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        """Write a frame to the rank.  Errors: :class:`WireError` if it has gone, or does not read for ``timeout`` s."""
        self.control.settimeout(timeout)
        try:
            wire.send_parts(self.control, frame)
        finally:
            self.control.setblocking(False)

    def drain_output(self, most: int = 1 << 22) -> bytes:
        """Take what the rank has printed since the last time, at most about ``most`` bytes; never waits."""
        taken = bytearray()
        while len(taken) < most:
            try:
                data = os.read(self.output_fd, 65536)
            except OSError:
                break
            if not data:
                self.output_closed = True
                break
            taken += data
        self.output.add(bytes(taken))
        return bytes(taken)

    # evidence

    def ask_snapshot(self) -> None:
        """Ask the monitor thread where the rank is; :meth:`take_snapshot` has the answer once it came."""
        if self._asked == 0 and not self.monitor_lost:
            try:
                # What came without a question would be taken for the answer to this one.
                self.monitor_lost = bool(self._monitor_bytes or self.monitor.recv(1, socket.MSG_PEEK))
            except OSError:
                pass
            try:
                self.monitor.send(b"s")
                self._asked = 1
            except OSError:
                pass

    def take_snapshot(self) -> dict[str, Any] | None:
        """The monitor's answer, or None as long as it is not there; empty if nothing can be read of it."""
        if self.monitor_lost:
            return {}
        try:
            while len(self._monitor_bytes) <= _MOST_SNAPSHOT and (data := self.monitor.recv(1 << 16)):
                self._monitor_bytes += data
        except OSError:
            pass
        if len(self._monitor_bytes) < 4:
            return None
        (length,) = struct.unpack_from("!I", self._monitor_bytes)
        if length > _MOST_SNAPSHOT:
            self.monitor_lost = True
            return {}
        if len(self._monitor_bytes) < 4 + length:
            return None
        try:
            answer = json.loads(bytes(self._monitor_bytes[4 : 4 + length]))
        except (ValueError, RecursionError):
            answer = None
        del self._monitor_bytes[: 4 + length]
        self._asked = 0
        return answer if isinstance(answer, dict) else {}

    def ask_stack(self) -> None:
        """Make the rank dump its Python stacks from a signal handler: works without its interpreter lock."""
        self.crash_text()
        if self.exit is None and self.pid:
            try:
                os.kill(self.pid, STACK_SIGNAL)
            except OSError:
                pass

    def stack_is_there(self) -> bool:
        """Whether the stack that :meth:`ask_stack` asked for has been written, or never will be."""
        return self.exit is not None or not has_yet_to_handle(self.pid, STACK_SIGNAL)

    def crash_text(self) -> str:
        """What faulthandler has written since the last call."""
        data = os.pread(self.crash_fd, CRASH_SIZE, self._crash_read).split(b"\0", 1)[0]
        self._crash_read += len(data)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Give back every descriptor."""
        if not self.closed:
            self.closed = True
            self.control.close()
            self.monitor.close()
            os.close(self.output_fd)
            os.close(self.crash_fd)
            self.box.close()


class Launcher(Protocol):
    """Starts ranks somewhere and tells how they end."""

    def spawn(self, setups: Sequence[RankSetup]) -> list[RankProcess]:
        """Start a rank for each set-up.  Returns at once; the ranks report for themselves."""
        ...

    def kill(self, process: RankProcess) -> None:
        """Kill a rank and all that it started."""
        ...

    def fileno(self) -> int:
        """Readable when :meth:`poll` has something to do."""
        ...

    def poll(self) -> None:
        """Note which ranks have ended: sets :attr:`RankProcess.exit`."""
        ...

    def close(self) -> None:
        """Kill all ranks and stop."""
        ...


class LocalLauncher:
    """Forks ranks on this machine from a server that has torch imported.

    The server starts at construction; the first :meth:`spawn` waits for its imports.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD, start_timeout: float = 120.0) -> None:
        self._processes: dict[int, RankProcess] = {}
        self._next_token = 1
        self._start_timeout = start_timeout
        self._ready: dict[str, Any] | None = None
        self.environment = {**RANK_ENVIRONMENT, **os.environ}
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log_fd = os.memfd_create("concord-server-log", os.MFD_CLOEXEC)
        code = (
            "import json, sys\n"
            "path, fd, parent, modules = json.loads(sys.argv[1])\n"
            "sys.path[:] = path\n"
            "from harness.worlds.server import main\n"
            "main(fd, parent, modules)\n"
        )
        argument = json.dumps([import_path(), theirs.fileno(), os.getpid(), list(preload)])
        # Imports of numpy and torch start helper threads in BLAS unless told not to, and a process with threads
        # must not be forked.
        environment = {**self.environment, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", code, argument],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log_fd,
            stderr=self._log_fd,
            start_new_session=True,
            env=environment,
        )
        theirs.close()

    @property
    def server_pid(self) -> int:
        return self._server.pid

    @property
    def alive(self) -> bool:
        return self._server.poll() is None

    def fileno(self) -> int:
        return self._sock.fileno()

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the server has imported what it preloads; returns what it said of itself."""
        deadline = time.monotonic() + self._start_timeout
        while self._ready is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchError(f"the server was not ready after {self._start_timeout:.0f} s\n{self._log()}")
            if select.select([self._sock], [], [], min(left, 1.0))[0]:
                self.poll()
            if self._ready is None and not self.alive:
                raise LaunchError(f"the server that ranks are forked from did not start\n{self._log()}")
        return self._ready

    def _log(self) -> str:
        size = os.fstat(self._log_fd).st_size
        return printable(os.pread(self._log_fd, 4000, max(0, size - 4000)).decode(errors="replace"))

    def spawn(self, setups: Sequence[RankSetup]) -> list[RankProcess]:
        self.wait_ready()
        listener = socket.create_server(("127.0.0.1", 0), backlog=max(64, 2 * len(setups)))
        address = listener.getsockname()[:2]
        wanted = {**RANK_ENVIRONMENT, **os.environ}
        changed = {k: v for k, v in wanted.items() if self.environment.get(k) != v}
        unset = tuple(k for k in self.environment if k not in wanted)
        processes: list[RankProcess] = []
        try:
            for setup in setups:
                env = {
                    **changed,
                    "RANK": str(setup.index),
                    "LOCAL_RANK": str(setup.index),
                    "WORLD_SIZE": str(setup.size),
                    "LOCAL_WORLD_SIZE": str(setup.size),
                    "MASTER_ADDR": address[0],
                    "MASTER_PORT": str(address[1]),
                    # Rank 0 has the store already: nobody may bind its port again.
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    **setup.env,
                }
                setup = dataclasses.replace(setup, env=env, unset=unset, store=address)
                processes.append(self._spawn_one(setup, listener.fileno() if setup.index == 0 else None))
        except BaseException:
            for process in processes:
                self.kill(process)
                process.close()
            raise
        finally:
            listener.close()
        return processes

    def _spawn_one(self, setup: RankSetup, listener: int | None) -> RankProcess:
        token, self._next_token = self._next_token, self._next_token + 1
        control, rank_control = socket.socketpair()
        watch, rank_watch = socket.socketpair()
        output_r, output_w = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(output_w, fcntl.F_SETPIPE_SZ, 1 << 18)
        box_fd = BlackBox.create(f"concord-rank-{setup.index}")
        crash_fd = fixed_file(f"concord-crash-{setup.index}", CRASH_SIZE)
        process = RankProcess(setup.index, token, control, watch, output_r, BlackBox(box_fd), crash_fd)
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

    def _tell(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(self._sock, [json.dumps(message).encode()], list(fds))
        except OSError as e:
            raise LaunchError(f"the server that ranks are forked from has gone ({e})\n{self._log()}") from e

    def kill(self, process: RankProcess) -> None:
        if process.exit is None:
            try:
                self._tell({"kill": process.token})
            except LaunchError:
                pass  # the kernel has killed its ranks with it

    def poll(self) -> None:
        while True:
            try:
                data = self._sock.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._gone()
                return
            self._note(json.loads(data))

    def _note(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self._ready = dict(message)
        elif "spawned" in message:
            process = self._processes.get(message["spawned"])
            if process is not None:
                process.pid = message["pid"]
        elif "exited" in message:
            process = self._processes.pop(message["exited"], None)
            if process is not None:
                left = tuple(message["left"])
                process.exit = Exit(message["status"], message["time_ns"], message["maxrss_kib"], left)

    def _gone(self) -> None:
        """The server died, and by the kernel's hand all of its ranks with it."""
        for process in self._processes.values():
            process.exit = Exit(int(signal.SIGKILL), time.monotonic_ns())
        self._processes.clear()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._sock.close()  # the server kills what is left and ends
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        os.close(self._log_fd)


def import_path() -> list[str]:
    """``sys.path`` without what is no string, which the import system passes over as well."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def working_directory() -> str:
    """The current directory; empty if it is there no more."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def environment_of(extra: Mapping[str, str]) -> dict[str, str]:
    """A copy of a rank's extra environment, checked: names and values must be strings."""
    for key, value in extra.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"environment of a world: {key!r}={value!r}: names and values must be strings")
    return dict(extra)


def has_yet_to_handle(pid: int, number: int) -> bool:
    """Whether a signal that a process was sent waits for its main thread, or is being handled there.

    False for one that has gone, and for one that has been stopped: it handles nothing.
    """
    try:
        with open(f"/proc/{pid}/status") as f:
            status = dict(line.split(":", 1) for line in f)
        if status["State"].split()[0] in "TtZX":
            return False
        masks = [int(status[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk")]  # blocked while it is handled
    except (OSError, ValueError, LookupError):
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)


def kernel_state(pid: int) -> tuple[str, int, list[str]]:
    """A process as the kernel sees it: state of its main thread, CPU ticks used by all threads, states of all threads.

    ``("", 0, [])`` if it has gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rsplit(b")", 1)[1].split()
        states = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as f:
                states.append(f.read().rsplit(b")", 1)[1].split()[0].decode())
        return fields[0].decode(), int(fields[11]) + int(fields[12]), states
    except (OSError, IndexError):
        return "", 0, []
