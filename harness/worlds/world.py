"""The controller's side of a world: N ranks, and the one primitive (``run``) that everything else is built on."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness import executed
from harness.devices import backend_for, host_and_name
from harness.placement import blocks
from harness.profiles.vocabulary import FORK, STARTS
from harness.safe_io.shown import printable
from harness.worlds import wire
from harness.worlds.handle import Launcher, RankHandle
from harness.worlds.launch import ServerLost, environment_of, import_path, working_directory
from harness.worlds.network import AUTO, NETWORKS
from harness.worlds.postmortem import RanksFailed
from harness.worlds.rank import RankSetup
from harness.worlds.rank_set import Ranks
from harness.worlds.shipping import frame_of
from harness.worlds.waiting import EXIT, Waiting

if TYPE_CHECKING:
    from harness.worlds.terminal import Terminal

_CHECK_WAIT = 10.0
_CLOSE_WAIT = 15.0  # closing takes milliseconds, but may take seconds on a busy machine
_JOIN_WAIT = 60.0
_GROUP_WAIT = 86400.0  # timeout of a process group in seconds: so long that the run's timeout ends a wait instead


@dataclass(frozen=True)
class WorldSpec:
    """The specification of a world; two worlds with equal specs are interchangeable."""

    size: int
    backend: str = ""
    """Empty: torch's default for the device."""
    device: str = "cpu"
    """Type of the device, as torch names it."""
    warm: bool = False
    """Whether another test may use the world afterwards, if it is clean."""
    timeout: float = 60.0
    """Seconds for one run, unless the run has a timeout of its own."""
    env: tuple[tuple[str, str], ...] = ()
    shared_device_env: tuple[tuple[str, str], ...] = ()
    """Further environment variables of ranks that share a device with another rank; ``{rank}`` in them is the rank."""
    imports: tuple[str, ...] = ()
    """Modules that a rank imports first, because they register the backend or the device."""
    subject: str = "torch"
    """The name that reports use for the implementation of the stacks that ``first`` puts into ranks."""
    first: tuple[tuple[str, str], ...] = ()
    """Functions that a rank calls before anything else, once it is in its group: ``module:function``, and its only
    argument."""
    record: bool = True
    """Whether ranks keep Concord's own record of collectives."""
    leaves_nothing: bool = False
    """Whether ranks record what there is before a test, for :meth:`World.require_nothing_left`."""
    exclusive: bool = False
    """Whether nothing else may run on the machine's devices at the same time."""
    network: str = AUTO
    """``private``: ranks are on a network of their own, which nobody else can reach.  ``host``: on the machine's.
    ``auto``: on one of their own if the kernel allows it and nothing shows that they need the machine's."""
    start: str = FORK
    """``fork``: ranks are forked from a process that has imported torch.  ``spawn``: each rank is a new Python process
    that imports torch itself, for runtimes that do not survive a fork of a process with torch."""
    bind_device: bool = False
    """Whether ranks on an accelerator give their device to init_process_group."""
    hosts: int = 1
    """Number of hosts that its ranks are spread over, in blocks of nearly the same size."""
    debug_rank: int | None = None
    """The rank that opens a debugger when it fails."""
    traceback_style: str = "short"
    show_locals: bool = False
    verbosity: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(f"a world has at least 1 rank, not {self.size!r}")
        if not 1 <= self.hosts <= self.size:
            raise ValueError(f"a world of {self.size} has at least 1 host and at most {self.size}, not {self.hosts!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout of a world: a number of seconds above 0, not {self.timeout!r}")
        if self.network not in NETWORKS:
            raise ValueError(f"network of a world: {', '.join(NETWORKS[:-1])} or {NETWORKS[-1]}, not {self.network!r}")
        if self.start not in STARTS:
            raise ValueError(f"start of ranks: {' or '.join(STARTS)}, not {self.start!r}")
        environment_of(dict(self.env))
        environment_of(dict(self.shared_device_env))
        if not self.backend:
            object.__setattr__(self, "backend", backend_for(self.device))

    def sized(self, size: int) -> WorldSpec:
        """Return the specification of the same world with another number of ranks, on no more hosts than ranks."""
        return dataclasses.replace(self, size=size, hosts=min(self.hosts, size))

    def __str__(self) -> str:
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.size} rank{'s' if self.size > 1 else ''} ({self.backend} on {self.device}{hosts})"


def _of_rank(env: tuple[tuple[str, str], ...], rank: int) -> dict[str, str]:
    return {name: value.replace("{rank}", str(rank)) for name, value in env}


def node_of(rank: int, size: int, hosts: int) -> int:
    """Return the number of a rank's host, if ``size`` ranks are on ``hosts`` hosts; the first may have one more."""
    return next(node for node, last in enumerate(itertools.accumulate(blocks(size, hosts))) if rank < last)


class World:
    """N ranks that share one default process group.

    Worlds are made by a :class:`~harness.worlds.pool.Pool`; tests get one from the ``world`` fixture.  After a run
    that failed, the ranks are gone.  The next :meth:`run` starts fresh ones, so that a property can go on with its
    next example.

    ``relieve``: gives memory of the devices back; called after a rank ran out of memory and after a failed start.
    """

    def __init__(
        self,
        spec: WorldSpec,
        launcher: Callable[[], Launcher],
        *,
        devices: Sequence[str] = (),
        terminal: Terminal | None = None,
        relieve: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self._relieve = relieve
        self._launcher_of = launcher
        self._devices = tuple(devices) or (spec.device,) * spec.size
        self._terminal = terminal
        self._ranks: Ranks | None = None
        self._joined = False
        self._job = 0
        self.runs = 0
        """The number of functions that the ranks were given to run since the world was acquired."""
        self.started = 0
        """The number of times that ranks were started."""

    def __repr__(self) -> str:
        return f"<World of {self.spec}>"

    def __reduce__(self) -> Any:
        raise TypeError("a world is its test's and can't be used on its ranks; call world.run from the test itself")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.spec.size

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on their host, in rank order; empty if there are no ranks."""
        return [p.pid for p in self._processes]

    @property
    def live(self) -> bool:
        """Whether the ranks are up and none has ended."""
        return bool(self._processes) and all(p.exit is None for p in self._processes)

    @property
    def _processes(self) -> list[RankHandle]:
        return self._ranks.processes if self._ranks is not None else []

    # running

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, watch: bool = True, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(rank, *args, **kwargs)`` on every rank; return the N results in rank order.

        ``fn`` may be a closure or a lambda.  Arguments and results are pickled.  Tensors travel without a file, and
        arrive on the CPU.  ``timeout``: seconds; the world's own by default.  ``watch=False`` waits for the timeout
        even if a deadlock is proven, for tests of what happens then.

        Errors: :class:`RanksFailed` if any rank raised, skipped, exited, died, or had to be stopped.
        """
        __tracebackhide__ = True
        return self._run(fn, args, kwargs, timeout, watch)

    def run_beside(
        self, beside: Callable[[], object], fn: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Like :meth:`run`, but call ``beside`` in this process while the ranks run, before waiting for them.

        Errors: those of :meth:`run`, and whatever ``beside`` raises; the ranks are gone then.
        """
        __tracebackhide__ = True
        return self._run(fn, args, {}, timeout, True, beside)

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        watch: bool,
        beside: Callable[[], object] | None = None,
    ) -> list[Any]:
        __tracebackhide__ = True
        name = getattr(fn, "__qualname__", repr(fn))
        frame = frame_of(self._job + 1, fn, args, kwargs, name)
        self.start()
        self.runs += 1
        return self._ask(frame, name, "returned", timeout or self.spec.timeout, proof=watch, beside=beside)

    def _ask(
        self,
        frame: list[bytes],
        function: str,
        answer: str,
        timeout: float,
        *,
        proof: bool = False,
        beside: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Send every rank the frame of the next job; returns their answers.  If a rank fails, all ranks are gone."""
        __tracebackhide__ = True
        self._job += 1
        return self._wait(self._job, frame, function, answer, timeout, proof, beside)

    def _wait(
        self,
        job: int,
        frame: list[bytes] | None,
        function: str,
        answer: str,
        timeout: float,
        proof: bool,
        beside: Callable[[], object] | None = None,
    ) -> list[Any]:
        __tracebackhide__ = True
        assert self._ranks is not None
        waiting = Waiting(
            self._ranks,
            job=job,
            function=function,
            world=self.spec,
            answer=answer,
            timeout=timeout,
            proof=proof,
            on_host=self.spec.device == "cpu" and self.spec.hosts == 1,
            on_device=self.spec.device != "cpu",
        )
        try:
            results = waiting.results(frame, beside)
        except BaseException as e:
            self.kill()
            # The lack of memory in a start has many faces: drivers and communicators have errors of their own for it.
            if isinstance(e, RanksFailed) and (job == 0 or e.out_of_memory):
                self._relieve()
            raise
        if answer == "returned" and not self.spec.warm:  # what a warm world issues depends on the tests before
            executed.add_issued(waiting.issued, waiting.on_groups)
        return results

    def start(self) -> None:
        """Make sure that the ranks are up and in their group: starts fresh ones if there are none.

        Errors: :class:`RanksFailed` if a rank does not come up.
        """
        __tracebackhide__ = True
        if self._ranks is None:
            self.begin()
        if not self._joined:
            self._joined = True
            timeout = max(self.spec.timeout, _JOIN_WAIT)  # a short timeout is meant for runs, not for joining
            self._wait(0, None, "joining the process group", "ready", timeout, True)

    def begin(self) -> None:
        """Start fresh ranks without waiting for them; :meth:`start` waits.  Kills the ranks that are there."""
        self.kill()
        spec = self.spec
        devices = [self._devices[i % len(self._devices)] for i in range(spec.size)]
        ranks_on = Counter(device for device in devices if device != "cpu")
        places = list(map(host_and_name, devices))
        setups = [
            RankSetup(
                index=i,
                size=spec.size,
                backend=spec.backend,
                device=places[i][1],
                host=places[i][0],
                store=("", 0),
                timeout=_GROUP_WAIT,
                node=node_of(i, spec.size, spec.hosts),
                env={**dict(spec.env), **(_of_rank(spec.shared_device_env, i) if ranks_on[devices[i]] > 1 else {})},
                sys_path=import_path(),
                cwd=working_directory(),
                imports=spec.imports,
                first=spec.first,
                record=spec.record,
                warm=spec.warm,
                leaves_nothing=spec.leaves_nothing,
                bind_device=spec.bind_device,
                traceback_style=spec.traceback_style,
                show_locals=spec.show_locals,
                verbosity=spec.verbosity,
                debug_rank=spec.debug_rank,
            )
            for i in range(spec.size)
        ]
        launcher = self._launcher_of()
        try:
            processes = launcher.spawn(setups)
        except ServerLost:  # it was lost between two tests, and no rank of ours with it
            launcher = self._launcher_of()
            processes = launcher.spawn(setups)
        self._ranks = Ranks(processes, launcher, self._terminal, setups[0])
        self._joined = False
        self.started += 1

    def check(self) -> list[str]:
        """Return what the last test left in the ranks that the next could notice, a sentence each; [] if nothing.

        Restores what can be restored.  Ranks that have ended count as residue.
        Errors: ValueError if the world is not warm, as its ranks have not recorded what there was before.
        """
        if not self.spec.warm:
            raise ValueError("only ranks of a warm world record what a test can leave in them")
        ended = [f"rank {p.index} has {p.exit}" for p in self._processes if p.exit is not None]
        if not self.live:
            return ended
        frame = wire.dumps(("check", self._job + 1, None))
        try:
            residue = self._ask(frame, "looking for what the test left", "checked", _CHECK_WAIT)
        except RanksFailed as e:
            return [e.headline]
        return [printable(f"rank {i} has {item}") for i, items in enumerate(residue) for item in items]

    def require_nothing_left(self) -> None:
        """Require that nothing of what the ranks have executed is still there: tensors, pending works, hooks, modes.

        A no-op if its ranks have gone, or were not told to record what there was before.
        Errors: :class:`RanksFailed` that says which rank still has what.
        """
        __tracebackhide__ = True
        if self.spec.leaves_nothing and self.live:
            frame = wire.dumps(("leave", self._job + 1, None))
            self._ask(frame, "looking for what the test left", "checked", _CHECK_WAIT)

    def close(self) -> None:
        """End the world: every rank leaves its group, runs its exit handlers and exits.

        Errors: :class:`RanksFailed` if a rank does not end with exit code 0, or not in time.  All ranks are gone then,
        too.
        """
        __tracebackhide__ = True
        if self._ranks is None:
            return
        try:
            self._ask(wire.dumps(("close", self._job + 1, None)), "leaving", EXIT, _CLOSE_WAIT)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the world at once, whatever its ranks are doing."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.discard()
