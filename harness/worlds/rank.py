"""The rank's side of a world: the code that runs in the process that was forked for one rank.

A rank joins its process group.  Then it executes the functions that the controller sends, one at a time, on the main
thread, and reports how each ended.  It never decides anything: the controller judges.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness.worlds import answers, evidence, issued, kept, monitor, residue, unpickling, wire
from harness.worlds.blackbox import BlackBox
from harness.worlds.debugging import Debugging
from harness.worlds.frames import roomy
from harness.worlds.launch import AUTOLOAD
from harness.worlds.seeding import seed

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

STACK_SIGNAL = signal.SIGRTMIN + 5
"""The signal that makes a rank write its Python stacks to its crash file, whatever it is doing."""

_NO_NAME = b"The hostname of the client socket cannot be retrieved"
"""A warning of torch where no name server can be reached, as on a private network.  torch needs no host name there."""


@dataclass(frozen=True)
class RankSetup:
    """Everything that a fresh rank has to know; the controller sends it as the first frame."""

    index: int
    size: int
    backend: str
    device: str
    """``cpu``, or an accelerator with its ordinal, as in ``cuda:3``."""
    store: tuple[str, int]
    """Host and port of the rendezvous; rank 0 inherits the listening socket."""
    timeout: float
    """Timeout of the default process group, in seconds."""
    node: int = 0
    """Number of its host in the world, as torchrun's ``GROUP_RANK``."""
    host: int | None = None
    """Number of the agent on whose host its device is; None if any host will do."""
    env: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Environment variables that the server has and the rank must not have."""
    sys_path: list[str] = field(default_factory=list)
    cwd: str = "."
    imports: tuple[str, ...] = ()
    """Modules that register the backend or the device."""
    first: tuple[tuple[str, str], ...] = ()
    """Functions to call before anything else, once the rank is in its group: ``module:function``, and its only
    argument."""
    record: bool = True
    """Whether to keep Concord's own record of collectives."""
    warm: bool = False
    """Whether other tests may use the rank afterwards."""
    leaves_nothing: bool = False
    """Whether the rank records what there is before a test, to say afterwards what is left of it."""
    bind_device: bool = False
    """Whether to give the device, if it is an accelerator, to init_process_group."""
    traceback_style: str = "short"
    show_locals: bool = False
    verbosity: int = 0
    reads: bool = False
    """Whether this process is not a rank, but reads results of ranks first (:mod:`harness.worlds.unpickling`)."""
    debug_rank: int | None = None
    """The rank where a failure or a breakpoint opens a debugger; None if no rank is being debugged."""


class NotPrepared(Exception):
    """A function that a rank calls before anything else has failed."""


class Rank:
    """A process of a world, as seen by a function that runs on it.

    The first argument of every function given to :meth:`World.run <harness.worlds.world.World.run>`.
    """

    def __init__(self, setup: RankSetup, store: dist.Store, box: BlackBox) -> None:  # type: ignore[name-defined]
        import torch

        self.index: int = setup.index
        """Rank in the default process group, from 0."""
        self.size: int = setup.size
        """World size."""
        self.host: int = setup.node
        """Number of the host among those of the world, from 0."""
        self.backend: str = setup.backend
        self.device: torch.device = torch.device(setup.device)
        """The device that this rank owns."""
        self.store: dist.Store = store  # type: ignore[name-defined]
        """The store of the rendezvous.  Use a :class:`torch.distributed.PrefixStore` on it for keys of your own."""
        self._box = box
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}

    def __repr__(self) -> str:
        return f"<rank {self.index} of {self.size} on {self.device}, {self.backend}>"

    @property
    def group(self) -> dist.ProcessGroup:
        """The default process group: all ranks of the world."""
        import torch.distributed as dist

        return dist.group.WORLD  # type: ignore[return-value]

    def subgroup(self, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """Make a process group of some ranks.  Every rank of the world must call it, in the same order.

        ``options`` go to :func:`torch.distributed.new_group`.  Returns None on a rank that is not a member.
        """
        import torch.distributed as dist

        group = dist.new_group(list(ranks), **options)
        return group if self.index in ranks else None

    def progress(self, right: int, begun: int) -> None:
        """Say how far a function of several steps has come, so that the controller knows it if this rank never answers.

        ``right``: how many steps from the first on ended and were right; ``begun``: how many have begun.
        """
        self._box.progress(right, begun)

    def mesh(self, *shape: int, names: Sequence[str] | None = None) -> DeviceMesh:
        """Make a device mesh of the given shape over all ranks of the world.

        Without a shape, the mesh has one dimension with all ranks.  The same shape and names return the same mesh.
        """
        from torch.distributed.device_mesh import init_device_mesh

        shape = shape or (self.size,)
        key = shape, tuple(names) if names else None
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, shape, mesh_dim_names=key[1])
        return self._meshes[key]

    def forget_meshes(self) -> None:
        """Make :meth:`mesh` return new meshes from now on."""
        self._meshes.clear()


def main(fds: dict[str, int], listener: int | None) -> None:
    """Run as a rank until the controller closes it.  Called once, in a forked process; never returns."""
    control = socket.socket(fileno=fds["control"])
    box = BlackBox(fds["box"])
    box.enter("starting")
    crash = os.fdopen(fds["crash"], "wb", buffering=0)  # its content is kept, and its size is fixed
    faulthandler.enable(crash, all_threads=True)
    faulthandler.register(STACK_SIGNAL, crash, all_threads=True, chain=False)
    watch = socket.socket(fileno=fds["monitor"])
    reader = wire.FrameReader(control)
    setup: RankSetup = wire.receive(control, reader)
    process = _RankProcess(setup, control, reader, box)
    if setup.reads:
        process.adopt_environment()
        unpickling.serve(control, reader)
        os._exit(0)
    process.live(watch, listener)


class _RankProcess:
    def __init__(self, setup: RankSetup, control: socket.socket, reader: wire.FrameReader, box: BlackBox) -> None:
        self.setup = setup
        self.control = control
        self.reader = reader
        self.box = box
        self.job = 0
        self.pid = os.getpid()
        self.known: tuple[bytes, Any] = (b"", None)
        self.debugging = Debugging(self, setup.index, setup.debug_rank)

    @roomy
    def live(self, watch: socket.socket, listener: int | None) -> None:
        self.adopt_environment()
        atexit._clear()  # exit handlers of the server's imports are not ours to run, and take longer than all the rest
        monitor.start(watch)
        try:
            self.rank = self.join(listener)
            if self.setup.warm:
                self.connect()
            self.begin()
        except BaseException as e:
            self.send(answers.raised(0, self.describe(e)))
            signal.pause()  # the controller kills us once it has collected the evidence
        sys.breakpointhook = self.debugging.breakpoint
        baseline = residue.take(on_device=":" in self.setup.device) if self.setup.warm else None
        beginning = kept.begin() if self.setup.leaves_nothing else None
        self.answer(answers.Ready(0, self.control.fileno()))
        while True:
            self.box.enter("idle")
            try:
                message = wire.receive_frame(self.control, self.reader)
            except wire.WireError:
                os._exit(71)  # the controller has gone
            try:
                kind, self.job, payload = wire.loads(message)
                if kind == "run" and isinstance(payload[0], bytes):  # a function from the controller's cache
                    payload = (self.function(payload[0]), *payload[1:])
            except BaseException as e:
                self.send(
                    answers.raised(-1, self.describe(e, "the function or its arguments can't be read on the rank"))
                )
                continue
            if kind == "run":
                self.box.progress(0, 0)
                self.box.enter("running", self.job)
                monitor.begin_run()
                self.run(*payload)
            elif kind == "check" and baseline is not None:
                self.rank.forget_meshes()
                left = [*self.meet(), *residue.compare(baseline, restore=self.job)]
                self.send(answers.checked(self.job, left))
            elif kind == "leave" and beginning is not None:
                self.leave_nothing(beginning)
            elif kind == "close":
                self.close()

    def function(self, pickled: bytes) -> Any:
        """Return a function from a pickle with nothing in it that can change.  The last function is cached."""
        if self.known[0] != pickled:
            self.known = pickled, pickle.loads(pickled)
        return self.known[1]

    def adopt_environment(self) -> None:
        setup = self.setup
        for name in setup.unset:
            os.environ.pop(name, None)
        os.environ.update(setup.env)
        sys.path[:] = setup.sys_path
        with contextlib.suppress(OSError):
            os.chdir(setup.cwd)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        evidence.explain_assertions(setup.verbosity)

    def join(self, listener: int | None) -> Rank:
        """Join the world's default process group."""
        import importlib

        forked = "torch" in sys.modules
        import torch
        import torch.distributed as dist

        setup = self.setup
        if forked and setup.device != "cpu":
            _import_device_packages()
        for name in setup.imports:
            importlib.import_module(name)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        seed(accelerators=not forked or setup.device != "cpu")
        device = torch.device(setup.device)
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)
        # torch read the debug level of the server when it was imported.
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch does not export it for mypy
        host, port = setup.store
        options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
        timeout = timedelta(seconds=setup.timeout)
        with _without(_NO_NAME):
            store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not export it for mypy
                host, port, setup.size, setup.index == 0, timeout=timeout, wait_for_workers=False, **options
            )
        dist.init_process_group(
            setup.backend,
            store=store,
            rank=setup.index,
            world_size=setup.size,
            timeout=timeout,
            device_id=device if setup.bind_device and device.index is not None else None,
        )
        return Rank(setup, store, self.box)

    def connect(self) -> None:
        """Have every two ranks exchange something, so that no test leaves a connection that was not there before.

        Many backends connect at the first collective that needs it.  A backend without all-to-all connects as far as
        all-reduce goes.
        """
        import torch
        import torch.distributed as dist

        ones = torch.ones(self.setup.size, device=self.setup.device)
        dist.all_reduce(ones.clone())
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
            dist.all_to_all_single(torch.empty_like(ones), ones)

    def meet(self) -> list[str]:
        """Return what is wrong with the default group after a test, as a list of phrases; [] if nothing.

        A time-out closes its connections, and a collective that one rank alone has issued stays in its queue.
        """
        import torch
        import torch.distributed as dist

        one = torch.ones(1, device=self.setup.device)
        try:
            dist.all_reduce(one)
            total = one.item()
        except Exception as e:
            return [f"a default process group that fails: {type(e).__name__}: {e}"]
        return [] if total == self.setup.size else [f"a default process group in which ranks count {total:g}"]

    def begin(self) -> None:
        """Start the record of collectives and call the setup's ``first`` functions, once the rank is in its group."""
        import importlib

        if self.setup.record:
            from harness.worlds import recorder

            recorder.install(self.box)
        for where, argument in self.setup.first:
            module, _, name = where.partition(":")
            try:
                getattr(importlib.import_module(module), name)(argument)
            except Exception as e:
                raise NotPrepared(f"{where}({argument[:80]!r}): {type(e).__name__}: {e}") from e

    def run(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = issued.begin()
        try:
            value = fn(self.rank, *args, **kwargs)
            self.end_if_forked(None)
        except BaseException as e:
            self.end_if_forked(e)
            self.debugging.failed(e)
            report = self.describe(e)
            e.__traceback__ = None
            self.flush()
            self.send(answers.raised(self.job, report))
            return
        self.flush()
        try:
            pickled = wire.pickled(value) if value is not None else (b"", [])
            frame = answers.returned(self.job, *pickled, *issued.since(before))
        except BaseException as e:
            type_name = evidence.name_of(type(value)).rpartition(".")[2]
            report = self.describe(e, f"its result, a {type_name}, can't be sent to the controller")
            self.send(answers.raised(self.job, report))
            return
        self.send(frame)

    def end_if_forked(self, error: BaseException | None) -> None:
        """Exit if this is a child that the function forked and that returned from it: it must not act as the rank."""
        if os.getpid() == self.pid:
            return
        code = 0
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        elif error is not None:
            code = 1
            with contextlib.suppress(BaseException):
                traceback.print_exception(error)
        self.flush()
        os._exit(code & 0xFF)

    def describe(self, error: BaseException, context: str = "") -> dict[str, Any]:
        """Describe an exception as plain data, so that the controller does not depend on the exception's class."""
        setup = self.setup
        return evidence.describe_exception(
            error, context=context, style=setup.traceback_style, show_locals=setup.show_locals
        )

    def answer(self, answer: answers.Answer) -> None:
        self.send(answers.frame(answer))

    def send(self, frame: list[bytes]) -> None:
        try:
            wire.send_parts(self.control, frame)
        except wire.WireError as e:
            with contextlib.suppress(OSError):  # the function may have closed our socket: say so
                os.write(2, f"rank {self.setup.index} has lost its connection to the harness: {e}\n".encode())
            os._exit(71)

    def flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    def leave_nothing(self, beginning: kept.State) -> None:
        """Report that nothing of the test is still there, or an error that says what is."""
        self.known = b"", None
        try:
            kept.require_nothing(beginning, self.setup.size)
        except Exception as e:
            self.send(answers.raised(self.job, self.describe(e)))
        else:
            self.send(answers.checked(self.job, []))

    def close(self) -> None:
        """End like a program that is done: leave the group, run the exit handlers, exit with code 0."""
        import torch.distributed as dist

        self.box.enter("exiting")
        if dist.is_initialized():
            dist.destroy_process_group()
        self.box.enter("atexit")
        atexit._run_exitfuncs()
        self.flush()
        os._exit(0)


def _import_device_packages() -> None:
    """Import the packages that extend torch, as ``import torch`` does; the server imported torch without them.

    Errors: RuntimeError that names the package.
    """
    from importlib.metadata import entry_points

    if os.environ.get(AUTOLOAD, "1") != "1":
        return
    for point in entry_points(group="torch.backends"):
        try:
            point.load()()
        except Exception as e:
            raise RuntimeError(
                f"the package of torch.backends {point.name!r} ({point.value}) can't be loaded: "
                f"{type(e).__name__}: {e}; {AUTOLOAD}=0 leaves it out"
            ) from e


@contextlib.contextmanager
def _without(message: bytes) -> Iterator[None]:
    """Hold back standard error inside the block, and then write it without the lines that contain ``message``."""
    held, stderr = os.memfd_create("concord-stderr", os.MFD_CLOEXEC), os.dup(2)
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        kept = [line for line in os.pread(held, 1 << 20, 0).splitlines(keepends=True) if message not in line]
        os.close(held)
        if kept:
            os.write(2, b"".join(kept))
