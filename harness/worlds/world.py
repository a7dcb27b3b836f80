"""The controller's side of a world: N ranks, and the one primitive that everything else is sugar on."""

from __future__ import annotations

import os
import platform
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

from harness.worlds import postmortem, watchdog, wire
from harness.worlds.launch import Launcher, Output, RankProcess, environment_of, kernel_state
from harness.worlds.postmortem import End, RanksFailed
from harness.worlds.rank import RankSetup
from harness.worlds.watchdog import Explanation, View

if TYPE_CHECKING:
    from harness.worlds.terminal import Terminal

_SNAPSHOT_WAIT = 0.6
_DEATHS_WAIT = 0.5
_CLOSE_WAIT = 5.0
_TICKS_WHEN_QUIET = 2  # per look; gloo's loop wakes up a hundred times a second
_DEBUGGING = 86400.0  # seconds that a group waits for a rank in which somebody is looking around
_BUSY_GRACE = 5.0  # how long ranks that still compute may go on after another has failed


@dataclass(frozen=True)
class WorldSpec:
    """What a world is made of; two worlds with equal specs are interchangeable."""

    size: int
    backend: str = "gloo"
    device: str = "cpu"
    """Type of the device, as torch names it."""
    warm: bool = False
    """Whether the world may be used by another test afterwards, if it is found clean."""
    timeout: float = 60.0
    """Seconds for one run, unless the run says otherwise."""
    env: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()
    """Modules that a rank imports first, because they register the backend or the device."""
    record: bool = True
    """Whether ranks keep our own record of collectives."""
    exclusive: bool = False
    """Whether nothing else may run on the machine's devices meanwhile."""
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
        environment_of(dict(self.env))

    def __str__(self) -> str:
        return f"{self.size} rank{'s' if self.size > 1 else ''} ({self.backend} on {self.device})"


@dataclass
class _Run:
    """One function in flight on all ranks."""

    job: int
    function: str
    timeout: float
    proven: bool
    started: float
    results: dict[int, Any] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)


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
        self._launcher: Launcher | None = None
        self._devices = tuple(devices) or (spec.device,) * spec.size
        self._terminal = terminal
        self._processes: list[RankProcess] = []
        self._job = 0
        self._looks: dict[int, int] = {}
        self.runs = 0
        """How many functions the ranks were given to run."""
        self.started = 0
        """How many times ranks were started."""

    def __repr__(self) -> str:
        return f"<World of {self.spec}>"

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.spec.size

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order; empty if none are there."""
        return [p.pid for p in self._processes]

    @property
    def live(self) -> bool:
        """Whether the ranks are there and none has ended."""
        return bool(self._processes) and all(p.exit is None for p in self._processes)

    # running

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, watch: bool = True, **kwargs: Any) -> list[Any]:
        """Call ``fn(rank, *args, **kwargs)`` on every rank; return the N results in rank order.

        ``fn`` may be a closure or a lambda.  Arguments and results are pickled; tensors travel without a file, and
        arrive on the CPU.  ``timeout``: seconds, the world's own by default.  ``watch=False`` waits for the timeout
        even when a deadlock is proven, for a test of what happens then.

        Errors: :class:`RanksFailed` if any rank raised, skipped, left, died, or had to be stopped.
        """
        __tracebackhide__ = True
        name = getattr(fn, "__qualname__", repr(fn))
        frame = _frame_of(self._job + 1, fn, args, kwargs, name)
        self.start()
        self._job += 1
        run = _Run(self._job, name, timeout or self.spec.timeout, watch, time.monotonic())
        try:
            for process in self._processes:
                self._send(process, frame)
            self.runs += 1
            self._wait(run, "returned")
        except RanksFailed:
            raise
        except BaseException as e:
            self._interrupted(run, e)
            raise
        return [run.results[i] for i in range(self.size)]

    def start(self) -> None:
        """See to it that the ranks are there: starts fresh ones if they are not.

        Errors: :class:`RanksFailed` if a rank does not come up.
        """
        __tracebackhide__ = True
        if not self._processes:
            self.begin()
        self.await_ready()

    def begin(self) -> None:
        """Start the ranks without waiting for them."""
        self._discard()
        self._launcher = self._launcher_of()
        spec = self.spec
        setups = [
            RankSetup(
                index=i,
                size=spec.size,
                backend=spec.backend,
                device=self._devices[i % len(self._devices)],
                store=("", 0),
                timeout=spec.timeout + 30 if spec.debug_rank is None else _DEBUGGING,
                env=dict(spec.env),
                sys_path=list(sys.path),
                cwd=os.getcwd(),
                imports=spec.imports,
                record=spec.record,
                traceback_style=spec.traceback_style,
                show_locals=spec.show_locals,
                verbosity=spec.verbosity,
                debug_rank=spec.debug_rank,
            )
            for i in range(spec.size)
        ]
        self._processes = self._launcher.spawn(setups)
        self.started += 1
        self._awaited = False

    _awaited = True

    def await_ready(self) -> None:
        """Wait until every rank begun by :meth:`begin` has joined its process group."""
        __tracebackhide__ = True
        if self._awaited:
            return
        self._awaited = True
        run = _Run(0, "joining the process group", self.spec.timeout, True, time.monotonic())
        try:
            self._wait(run, "ready")
        except RanksFailed:
            raise
        except BaseException as e:
            self._interrupted(run, e)
            raise

    def check(self) -> list[str]:
        """What the last test left in the ranks that the next could notice, a sentence each; [] if nothing.

        Puts back what can be put back.  Ranks that have ended count as left-overs.
        """
        ended = [f"rank {p.index} has {p.exit}" for p in self._processes if p.exit is not None]
        if not self.live:
            return ended
        self._job += 1
        run = _Run(self._job, "looking for what the test left", 10.0, False, time.monotonic())
        try:
            frame = wire.dumps(("check", run.job, None))
            for process in self._processes:
                self._send(process, frame)
            self._wait(run, "checked")
        except RanksFailed as e:
            return [e.headline]
        return [f"rank {i} has {item}" for i in sorted(run.results) for item in run.results[i]]

    def close(self) -> None:
        """End the world: every rank leaves its group, runs its exit handlers and exits.

        Errors: :class:`RanksFailed` if a rank does not end with exit code 0, or not in time; all ranks are gone then
        as well.
        """
        __tracebackhide__ = True
        if not self._processes:
            return
        self._awaited = True
        run = _Run(self._job + 1, "leaving", _CLOSE_WAIT, False, time.monotonic())
        try:
            frame = wire.dumps(("close", run.job, None))
            for process in self._processes:
                if process.exit is None:
                    try:
                        process.send(frame)
                    except wire.WireError:
                        pass  # it has gone: its exit says how
            self._wait_exits(run)
        except RanksFailed:
            raise
        except BaseException as e:
            self._interrupted(run, e)
            raise
        finally:
            self._discard()

    def kill(self) -> None:
        """End the world at once, whatever its ranks are doing."""
        self._discard()

    # waiting

    def _send(self, process: RankProcess, frame: list[bytes]) -> None:
        try:
            process.send(frame)
        except wire.WireError:
            pass  # its exit, or its silence, is seen by the wait

    def _wait(self, run: _Run, answer: str) -> None:
        """Pump messages, output and exits until every rank has answered; judge when one can't."""
        __tracebackhide__ = True
        watch = _Watch(self, run)
        deadline = run.started + run.timeout
        failed_since: float | None = None
        with selectors.DefaultSelector() as selector:
            self._register(selector)
            self._event(self._launcher, run, answer, selector)  # who has ended since the last run
            while len(run.ends) < self.size:
                now = time.monotonic()
                failing = any(e.failed for e in run.ends.values())
                if failing and failed_since is None:
                    failed_since = now
                    watch.hurry(now)
                if now >= deadline:
                    self._fail(run, None, f"not finished after {run.timeout:g} s")
                if failed_since is not None and now >= failed_since + _BUSY_GRACE:
                    self._fail(run, None, "")
                for key, _ in selector.select(max(0.0, min(deadline, watch.next_look) - now)):
                    paused = self._event(key.data, run, answer, selector)
                    deadline += paused
                    watch.next_look += paused
                if time.monotonic() >= watch.next_look:
                    explanation = watch.look(time.monotonic())
                    if explanation is not None:
                        self._fail(run, explanation, "")
            self._drain_all()
            if any(e.failed for e in run.ends.values()):
                self._fail(run, None, "")
        self._show_output()

    def _register(self, selector: selectors.BaseSelector) -> None:
        assert self._launcher is not None
        selector.register(self._launcher.fileno(), selectors.EVENT_READ, self._launcher)
        for process in self._processes:
            selector.register(process.control, selectors.EVENT_READ, process)
            selector.register(process.output_fd, selectors.EVENT_READ, (process, "output"))

    def _event(self, source: Any, run: _Run, answer: str, selector: selectors.BaseSelector) -> float:
        """Handle one readable thing; returns for how many seconds the clock must stand still (a debugger was open)."""
        if isinstance(source, tuple):
            process = source[0]
            self._drain(process)
            if process.output_closed:
                selector.unregister(process.output_fd)  # every holder of the pipe has gone
            return 0.0
        if isinstance(source, RankProcess):
            return self._message(source, run, answer, selector)
        source.poll()
        for process in self._processes:
            if process.exit is not None and process.index not in run.ends:
                self._last_words(process, run, answer)
                if process.index not in run.ends:
                    kind = "died" if process.exit.signal is not None else "exited"
                    run.ends[process.index] = End(process.index, kind, process.exit.time_ns, exit=process.exit)
        return 0.0

    def _last_words(self, process: RankProcess, run: _Run, answer: str) -> None:
        """Read what a rank had sent before it ended."""
        try:
            while (frame := process.reader.read()) is not None:
                self._note(process, wire.loads(frame), run, answer)
        except Exception:
            return

    def _message(self, process: RankProcess, run: _Run, answer: str, selector: selectors.BaseSelector) -> float:
        try:
            frame = process.reader.read()
        except wire.WireError:
            selector.unregister(process.control)  # its exit comes from the launcher
            return 0.0
        if frame is None:
            return 0.0
        try:
            message = wire.loads(frame)
        except Exception as e:
            report = {"type": type(e).__name__, "message": str(e), "text": str(e), "context": "its result can't be read here"}
            run.ends[process.index] = End(process.index, "raised", time.monotonic_ns(), report=report)
            return 0.0
        if message[0] == "debug":
            return self._lend_terminal(process, run)
        self._note(process, message, run, answer)
        return 0.0

    def _note(self, process: RankProcess, message: tuple[str, int, Any], run: _Run, answer: str) -> None:
        kind, job, payload = message
        if kind == "raised" and job in (run.job, -1):
            ending = "skipped" if payload["skip"] else "raised"
            run.ends[process.index] = End(process.index, ending, payload["time_ns"], report=payload)
        elif kind == answer and job == run.job:
            when, value = payload if kind == "returned" else (time.monotonic_ns(), payload)
            run.results[process.index] = value
            run.ends[process.index] = End(process.index, "returned", when)

    def _lend_terminal(self, process: RankProcess, run: _Run) -> float:
        """Give our terminal to a rank's debugger until it says that it has done with it."""
        began = time.monotonic()
        if self._terminal is None:
            self._fail(run, None, f"rank {process.index} asks for a debugger, but there is no terminal to lend")
            return 0.0
        with self._terminal.lent() as (stdin, stdout):
            process.send(wire.dumps((os.getpid(), stdin, stdout)))
            process.control.setblocking(True)
            try:
                while (message := wire.receive(process.control, process.reader))[0] != "debugged":
                    self._note(process, message, run, "returned")
            except wire.WireError:
                pass  # it died in the debugger: its exit comes from the launcher
            finally:
                process.control.setblocking(False)
        return time.monotonic() - began

    def _wait_exits(self, run: _Run) -> None:
        __tracebackhide__ = True
        assert self._launcher is not None
        deadline = run.started + run.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._launcher.fileno(), selectors.EVENT_READ)
            for process in self._processes:
                selector.register(process.output_fd, selectors.EVENT_READ, (process, "output"))
            while not all(p.exit is not None for p in self._processes) and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.data is not None:
                        self._event(key.data, run, "", selector)
                self._launcher.poll()
        self._drain_all()
        for process in self._processes:
            ended = process.exit
            if ended is not None and not ended.clean:
                kind = "died" if ended.signal is not None else "exited"
                run.ends[process.index] = End(process.index, kind, ended.time_ns, exit=ended)
            elif ended is not None:
                run.ends[process.index] = End(process.index, "returned", ended.time_ns)
        late = [p for p in self._processes if p.exit is None]
        if late or any(e.failed for e in run.ends.values()):
            where = "its exit handlers" if late and late[0].box.phase == "atexit" else "leaving the process group"
            names = ", ".join(str(p.index) for p in late)
            self._fail(run, None, f"rank {names} did not end within {run.timeout:g} s: stuck in {where}" if late else "")
        self._show_output()

    # failing

    def _fail(self, run: _Run, explanation: Explanation | None, reason: str) -> None:
        """Collect what every rank can still say, kill them all, and raise."""
        __tracebackhide__ = True
        ends = self._collect(run)
        failed = any(e.failed for e in ends)
        if explanation is None and failed and all(p.box.count <= 128 for p in self._processes):
            difference = postmortem.compare_issued({p.index: p.box.recent(128) for p in self._processes})
            explanation = Explanation(difference) if difference else None
        if explanation is None and not failed:
            doing = "; ".join(f"rank {e.index} was {e.standing}" for e in ends if e.kind == "stopped")
            reason = f"{reason or 'no rank can go on'}: {doing}"
        error = RanksFailed(str(self.spec), run.function, ends, explanation, reason)
        self._discard()
        error.__context__ = cause = _cause_of(error)
        raise error from cause

    def _collect(self, run: _Run) -> list[End]:
        views = self._views({})
        assert self._launcher is not None
        self._launcher.poll()
        silent = [p for p in self._processes if p.exit is None and not views[p.index].answered]
        if silent:
            for process in silent:
                process.ask_stack()
            time.sleep(0.05)
        self._drain_all()
        ends = []
        for process in self._processes:
            end = run.ends.get(process.index)
            view = views[process.index]
            if end is None and process.exit is not None:
                end = End(process.index, "died" if process.exit.signal is not None else "exited", process.exit.time_ns)
            stack = standing = ""
            crash = process.crash_text()
            if crash and (process.exit is not None or process in silent):
                stack = postmortem.crash_stack(crash)
            if end is None:
                if view.frames:
                    stack = postmortem.stack_text(view.frames, view.called)
                standing = self._standing(process, view)
                end = End(process.index, "stopped", time.monotonic_ns())
            ends.append(
                End(
                    end.index,
                    end.kind,
                    end.time_ns,
                    report=end.report,
                    exit=process.exit,
                    standing=standing,
                    stack=stack,
                    frames=view.frames,
                    collectives=postmortem.describe_collectives(view.records, process.box.recent(64)),
                    output=process.output.text(),
                )
            )
        return ends

    def _standing(self, process: RankProcess, view: View) -> str:
        state, _, _ = kernel_state(process.pid)
        if state in ("T", "t"):
            return f"stopped by a signal (SIGSTOP), in phase {process.box.phase}"
        if not view.answered:
            return f"in C code that holds the interpreter lock (kernel state {state or '?'})"
        return ("waiting " if watchdog.in_collective(view) else "running, ") + watchdog.standing(view)

    def _views(self, state: Mapping[int, tuple[bool, bool]]) -> list[View]:
        """Ask every live rank where it is; ``state``: quiet and stopped, by rank."""
        asked = [p for p in self._processes if p.exit is None]
        for process in asked:
            process.ask_snapshot()
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _SNAPSHOT_WAIT
        with selectors.DefaultSelector() as selector:
            for process in asked:
                if not state.get(process.index, (False, False))[1]:
                    selector.register(process.monitor, selectors.EVENT_READ, process)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    answer = key.data.take_snapshot()
                    if answer is not None:
                        answers[key.data.index] = answer
                        selector.unregister(key.fileobj)
                    elif _at_end(key.data):
                        selector.unregister(key.fileobj)
        views = []
        for process in self._processes:
            quiet, stopped = state.get(process.index, (False, False))
            answer = answers.get(process.index)
            alarms = _alarms(process.pid, answer) if answer else {}
            views.append(watchdog.view_of(process.index, answer, quiet=quiet, stopped=stopped, alarm_of=alarms))
        return views

    def _interrupted(self, run: _Run, error: BaseException) -> None:
        """Something else ended the wait (Ctrl-C, a test timeout): keep the evidence, leave no rank behind."""
        try:
            ends = self._collect(run)
            told = RanksFailed(str(self.spec), run.function, ends, None, f"interrupted by {type(error).__name__}")
            error.add_note(told.render())
        except Exception:
            pass
        finally:
            self._discard()

    # output and ends

    def _drain_all(self) -> None:
        for process in self._processes:
            self._drain(process)

    def _drain(self, process: RankProcess) -> None:
        data = process.drain_output()
        if data and self._terminal is not None:
            self._terminal.live(process.index, data)

    def _show_output(self) -> None:
        """Hand what the ranks printed to whoever shows it, and begin anew."""
        for process in self._processes:
            if process.output.total:
                if self._terminal is not None:
                    self._terminal.finished(process.index, process.output)
                process.output = Output()

    def _discard(self) -> None:
        """Kill what is left of the ranks, wait for their ends, give back their descriptors."""
        processes, self._processes = self._processes, []
        launcher = self._launcher
        if not processes or launcher is None:
            return
        for process in processes:
            launcher.kill(process)
        deadline = time.monotonic() + _DEATHS_WAIT * 10
        with selectors.DefaultSelector() as selector:
            selector.register(launcher.fileno(), selectors.EVENT_READ)
            while any(p.exit is None for p in processes) and time.monotonic() < deadline:
                selector.select(0.1)
                launcher.poll()
        for process in processes:
            process.close()


class _Watch:
    """Looks at the ranks of a run now and then, and says when a deadlock is proven."""

    def __init__(self, world: World, run: _Run) -> None:
        self.world = world
        self.run = run
        self.next_look = run.started + watchdog.FIRST_LOOK
        self.settle = watchdog.SETTLE
        self.ticks: dict[int, int] = {}
        self.stopped_since: dict[int, float] = {}
        self.candidate: tuple[float, object] | None = None

    def hurry(self, now: float) -> None:
        """A rank has failed: the others get a short time to show that they can go on."""
        self.settle = watchdog.SETTLE_AFTER_FAILURE
        self.next_look = min(self.next_look, now + 0.02)

    def look(self, now: float) -> Explanation | None:
        world, run = self.world, self.run
        alive = [p for p in world._processes if p.index not in run.ends]
        state = {p.index: self.kernel(p, now) for p in alive}
        interval = watchdog.FIRST_LOOK if self.settle == watchdog.SETTLE else 0.07
        self.next_look = now + interval
        if not run.proven or not alive or not all(quiet or stopped for quiet, stopped in state.values()):
            self.candidate = None
            return None
        views = [self.ended(v, run) for v in world._views(state)]
        if not watchdog.deadlocked(views, run.timeout):
            self.candidate = None
            self.next_look = time.monotonic() + 2 * interval
            return None
        moment = watchdog.progress(views)
        if self.candidate is None or self.candidate[1] != moment:
            self.candidate = (now, moment)
            return None
        return watchdog.explain(views) if now - self.candidate[0] >= self.settle else None

    def kernel(self, process: RankProcess, now: float) -> tuple[bool, bool]:
        """Whether a rank was quiet since the last look, and whether it has been stopped for a while."""
        main, ticks, states = kernel_state(process.pid)
        before = self.ticks.get(process.index)
        self.ticks[process.index] = ticks
        if main == "T":
            since = self.stopped_since.setdefault(process.index, now)
            return False, now - since >= watchdog.STOPPED_FOR
        self.stopped_since.pop(process.index, None)
        on_host = self.world.spec.device == "cpu"
        used = 0 if before is None else ticks - before
        calm = before is not None and used <= _TICKS_WHEN_QUIET and "R" not in states and "D" not in states
        return (main == "S" and calm) if on_host else main in ("S", "R"), False

    @staticmethod
    def ended(view: View, run: _Run) -> View:
        import dataclasses

        end = run.ends.get(view.index)
        if end is None:
            return view
        state = {"returned": "returned", "raised": "raised", "skipped": "raised"}.get(end.kind, "died")
        return dataclasses.replace(view, state=state)


def _frame_of(job: int, fn: Any, args: Any, kwargs: Any, name: str) -> list[bytes]:
    """The frame that tells a rank to run something.  Errors: TypeError that says what cannot travel, and why."""
    if not callable(fn):
        raise TypeError(f"world.run needs a function that takes a rank, not {fn!r}")
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is not None and is_test_code(module):
        cloudpickle.register_pickle_by_value(module)
    try:
        return wire.dumps(("run", job, (fn, args, kwargs)))
    except Exception as e:
        raise TypeError(f"{name}, or an argument of it, can't be sent to the ranks: {type(e).__name__}: {e}") from e


def _at_end(process: RankProcess) -> bool:
    """Whether the monitor's connection is closed."""
    import socket

    try:
        return process.monitor.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


_FUTEX = {"x86_64": (202, 3), "aarch64": (98, 3)}
_UNTIMED = {"x86_64": {0, 45, 47}, "aarch64": {63, 207, 212}}  # read, recvfrom, recvmsg


def _alarms(pid: int, snapshot: Mapping[str, Any]) -> dict[int, bool]:
    """For every thread but the main one: whether it may wake up by itself, from the system call that it is in.

    Waiting for a lock without a time limit, or reading, is not an alarm; anything else, or not knowing, is.
    """
    machine = platform.machine()
    number, timeout_at = _FUTEX.get(machine, (-1, 3))
    found = {}
    for thread in snapshot.get("threads", ()):
        native = thread["native"]
        try:
            with open(f"/proc/{pid}/task/{native}/syscall") as f:
                call = f.read().split()
        except OSError:
            continue
        if len(call) > timeout_at + 1 and call[0].isdigit():
            untimed_futex = int(call[0]) == number and int(call[1 + timeout_at], 16) == 0
            found[native] = not (untimed_futex or int(call[0]) in _UNTIMED.get(machine, set()))
    return found


def is_test_code(module: Any) -> bool:
    """Whether a module is one that a rank may not be able to import: not installed, and not part of the harness."""
    file = getattr(module, "__file__", None)
    if not file:
        return False
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.abspath(file).startswith((os.path.join(ours, "harness") + os.sep, os.path.join(ours, "reports") + os.sep)):
        return False
    return "site-packages" not in file and not file.startswith(os.path.dirname(os.__file__) + os.sep)


def _cause_of(error: RanksFailed) -> BaseException | None:
    """The first rank's exception with the place where it was raised, so that tools which group failures by place
    (Hypothesis, when it shrinks) tell one defect from another."""
    what = error.first.what if error.first is not None else error.headline.split(":")[0]
    file, line = error.place or ("", 0)
    if not file or not 0 < line < 1_000_000:
        return RankError(what)
    try:
        exec(compile("\n" * (line - 1) + "raise error", file, "exec"), {"error": RankError(what)})
    except RankError as e:
        return e
    return None


class RankError(Exception):
    """What the first rank to fail raised, as seen from the controller: the cause of a :class:`RanksFailed`."""
