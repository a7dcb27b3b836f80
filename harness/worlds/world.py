"""The controller's side of a world: N ranks, and the one primitive that everything else is sugar on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.devices import backend_for
from harness.safe_io.shown import printable
from harness.worlds import wire
from harness.worlds.handle import Launcher, RankHandle
from harness.worlds.launch import ServerLost, environment_of, import_path, working_directory
from harness.worlds.network import AUTO, NETWORKS
from harness.worlds.postmortem import RanksFailed
from harness.worlds.rank import RankSetup
from harness.worlds.ranks import Ranks
from harness.worlds.shipping import frame_of
from harness.worlds.waiting import EXIT, Waiting

if TYPE_CHECKING:
    from harness.worlds.terminal import Terminal

_CHECK_WAIT = 10.0
_CLOSE_WAIT = 15.0  # what takes milliseconds may take seconds where the machine has much else to do
_JOIN_WAIT = 60.0
_GROUP_WAIT = 86400.0  # seconds that a group waits for a rank: it is the run's timeout that ends a wait, however long


@dataclass(frozen=True)
class WorldSpec:
    """What a world is made of; two worlds with equal specs are interchangeable."""

    size: int
    backend: str = ""
    """Empty: torch's own for the device."""
    device: str = "cpu"
    """Type of the device, as torch names it."""
    warm: bool = False
    """Whether the world may be used by another test afterwards, if it is found clean."""
    timeout: float = 60.0
    """Seconds for one run, unless the run says otherwise."""
    env: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()
    """Modules that a rank imports first, because they register the backend or the device."""
    subject: str = "torch"
    """Whose implementation of the stacks ``first`` puts into ranks: what reports call it."""
    first: tuple[tuple[str, str], ...] = ()
    """What a rank calls before anything else, once it is in its group: ``module:function``, and its only argument."""
    record: bool = True
    """Whether ranks keep our own record of collectives."""
    exclusive: bool = False
    """Whether nothing else may run on the machine's devices meanwhile."""
    network: str = AUTO
    """``private``: ranks are on a network of their own, which nobody else can reach; ``host``: on the machine's;
    ``auto``: on one of their own where the kernel allows it and nothing shows that they need the machine's."""
    debug_rank: int | None = None
    """The rank that opens a debugger when it fails."""
    traceback_style: str = "short"
    show_locals: bool = False
    verbosity: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(f"a world has at least 1 rank, not {self.size!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout of a world: a number of seconds above 0, not {self.timeout!r}")
        if self.network not in NETWORKS:
            raise ValueError(f"network of a world: {', '.join(NETWORKS[:-1])} or {NETWORKS[-1]}, not {self.network!r}")
        environment_of(dict(self.env))
        if not self.backend:
            object.__setattr__(self, "backend", backend_for(self.device))

    def __str__(self) -> str:
        return f"{self.size} rank{'s' if self.size > 1 else ''} ({self.backend} on {self.device})"


class World:
    """N ranks that share one process group.

    Made by a :class:`~harness.worlds.pool.Pool`; tests get one from the ``world`` fixture.  After a run that failed,
    the ranks are gone; the next :meth:`run` starts fresh ones, so that a property can go on with its next example.
    """

    def __init__(
        self,
        spec: WorldSpec,
        launcher: Callable[[], Launcher],
        *,
        devices: Sequence[str] = (),
        terminal: Terminal | None = None,
    ) -> None:
        self.spec = spec
        self._launcher_of = launcher
        self._devices = tuple(devices) or (spec.device,) * spec.size
        self._terminal = terminal
        self._ranks: Ranks | None = None
        self._joined = False
        self._job = 0
        self.runs = 0
        """How many functions the ranks were given to run."""
        self.started = 0
        """How many times ranks were started."""

    def __repr__(self) -> str:
        return f"<World of {self.spec}>"

    def __reduce__(self) -> Any:
        raise TypeError("a world is its test's and can't be used on its ranks; call world.run from the test itself")

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.spec.size

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks where they run, in rank order; empty if none are there."""
        return [p.pid for p in self._processes]

    @property
    def live(self) -> bool:
        """Whether the ranks are there and none has ended."""
        return bool(self._processes) and all(p.exit is None for p in self._processes)

    @property
    def _processes(self) -> list[RankHandle]:
        return self._ranks.processes if self._ranks is not None else []

    # running

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, watch: bool = True, **kwargs: Any
    ) -> list[Any]:
        """Call ``fn(rank, *args, **kwargs)`` on every rank; return the N results in rank order.

        ``fn`` may be a closure or a lambda.  Arguments and results are pickled; tensors travel without a file, and
        arrive on the CPU.  ``timeout``: seconds, the world's own by default.  ``watch=False`` waits for the timeout
        even when a deadlock is proven, for a test of what happens then.

        Errors: :class:`RanksFailed` if any rank raised, skipped, left, died, or had to be stopped.
        """
        __tracebackhide__ = True
        return self._run(fn, args, kwargs, timeout, watch)

    def run_beside(
        self, beside: Callable[[], object], fn: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """:meth:`run`, and call ``beside`` in this process while the ranks are at it, before they are waited for.

        Errors: as of :meth:`run`; what ``beside`` raises, and the ranks are gone then.
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
        """Send every rank a frame of the next job; returns their answers.  The ranks are gone if one fails."""
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
            on_host=self.spec.device == "cpu",
        )
        try:
            return waiting.results(frame, beside)
        except BaseException:
            self.kill()
            raise

    def start(self) -> None:
        """See to it that the ranks are there: starts fresh ones if they are not.

        Errors: :class:`RanksFailed` if a rank does not come up.
        """
        __tracebackhide__ = True
        if self._ranks is None:
            self.begin()
        if not self._joined:
            self._joined = True
            timeout = max(self.spec.timeout, _JOIN_WAIT)  # a short timeout is meant for what runs, not for this
            self._wait(0, None, "joining the process group", "ready", timeout, True)

    def begin(self) -> None:
        """Start the ranks without waiting for them: :meth:`start` does that."""
        self.kill()
        spec = self.spec
        setups = [
            RankSetup(
                index=i,
                size=spec.size,
                backend=spec.backend,
                device=self._devices[i % len(self._devices)],
                store=("", 0),
                timeout=_GROUP_WAIT,
                env=dict(spec.env),
                sys_path=import_path(),
                cwd=working_directory(),
                imports=spec.imports,
                first=spec.first,
                record=spec.record,
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
        except ServerLost:  # between two tests: no rank of ours was hit
            launcher = self._launcher_of()
            processes = launcher.spawn(setups)
        self._ranks = Ranks(processes, launcher, self._terminal, setups[0])
        self._joined = False
        self.started += 1

    def check(self) -> list[str]:
        """What the last test left in the ranks that the next could notice, a sentence each; [] if nothing.

        Puts back what can be put back.  Ranks that have ended count as left-overs.
        """
        ended = [f"rank {p.index} has {p.exit}" for p in self._processes if p.exit is not None]
        if not self.live:
            return ended
        frame = wire.dumps(("check", self._job + 1, None))
        try:
            found = self._ask(frame, "looking for what the test left", "checked", _CHECK_WAIT)
        except RanksFailed as e:
            return [e.headline]
        return [printable(f"rank {i} has {item}") for i, items in enumerate(found) for item in items]

    def close(self) -> None:
        """End the world: every rank leaves its group, runs its exit handlers and exits.

        Errors: :class:`RanksFailed` if a rank does not end with exit code 0, or not in time; all ranks are gone then
        as well.
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
