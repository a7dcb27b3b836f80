"""Looking at the ranks of a run: what each is doing, and when that proves that none can go on."""

from __future__ import annotations

import dataclasses
import platform
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from harness.worlds import watchdog
from harness.worlds.launch import RankProcess, kernel_state
from harness.worlds.watchdog import Explanation, View

_SNAPSHOT_WAIT = 0.6
_STARVED_WAIT = 5.0
"""The same for a rank that the machine does not let run: its monitor would answer if it could."""
_TICKS_WHEN_QUIET = 2  # per look; gloo's loop wakes up a hundred times a second
_HURRIED_INTERVAL = 0.07


def views_of(processes: Sequence[RankProcess], state: Mapping[int, tuple[bool, bool]]) -> list[View]:
    """Ask every live rank where it is; ``state``: whether it is quiet, and whether it has been stopped, by rank."""
    asked = [p for p in processes if p.exit is None]
    for process in asked:
        process.ask_snapshot()
    answers: dict[int, dict[str, Any]] = {}
    began = time.monotonic()
    deadline, last = began + _SNAPSHOT_WAIT, began + _STARVED_WAIT
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
            if time.monotonic() >= deadline and any(_wants_to_run(k.data) for k in selector.get_map().values()):
                deadline = min(deadline + 0.1, last)
    views = []
    for process in processes:
        quiet, stopped = state.get(process.index, (False, False))
        answer = answers.get(process.index)
        alarms = _alarms(process.pid, answer) if answer else {}
        views.append(watchdog.view_of(process.index, answer, quiet=quiet, stopped=stopped, alarm_of=alarms))
    return views


def standing(process: RankProcess, view: View) -> str:
    """What a live rank is doing, in words."""
    state, _, _ = kernel_state(process.pid)
    if state in ("T", "t"):
        return f"stopped by a signal (SIGSTOP), in phase {process.box.phase}"
    if process.monitor_lost:
        return f"in phase {process.box.phase}, and something wrote into its monitor channel what is no answer"
    if not view.answered:
        return f"in C code that holds the interpreter lock (kernel state {state or '?'})"
    return ("waiting " if watchdog.in_collective(view) else "running, ") + watchdog.standing(view)


class Watch:
    """Looks at the ranks of a run now and then, and says when a deadlock is proven.

    ``on_host``: whether the kernel's view of a rank tells all.  A rank that waits for an accelerator may spin, and what
    it waits for may be on its way there; so then only a mismatch that the records show is a proof.
    """

    def __init__(self, processes: Sequence[RankProcess], *, started: float, run_timeout: float, on_host: bool) -> None:
        self._processes = processes
        self._run_timeout = run_timeout
        self._on_host = on_host
        self.next_look = started + watchdog.FIRST_LOOK
        """When to look again, on the monotonic clock."""
        self._settle = watchdog.SETTLE
        self._ticks: dict[int, int] = {}
        self._stopped_since: dict[int, float] = {}
        self._candidate: tuple[float, object] | None = None

    def hurry(self, now: float) -> None:
        """A rank has failed: the others get a short time to show that they can go on."""
        self._settle = watchdog.SETTLE_AFTER_FAILURE
        self.next_look = min(self.next_look, now + 0.02)

    def look(self, now: float, ended: Mapping[int, str]) -> Explanation | None:
        """Look once; returns who waits for whom if it is proven that no rank can go on.

        ``ended``: how ranks have ended, as :class:`View` has it, by rank.
        """
        alive = [p for p in self._processes if p.index not in ended]
        state = {p.index: self._kernel(p, now) for p in alive}
        interval = watchdog.FIRST_LOOK if self._settle == watchdog.SETTLE else _HURRIED_INTERVAL
        self.next_look = now + interval
        if not alive or not all(quiet or stopped for quiet, stopped in state.values()):
            self._candidate = None
            return None
        views = [
            dataclasses.replace(view, state=ended.get(view.index, view.state))
            for view in views_of(self._processes, state)
        ]
        if not watchdog.deadlocked(views, self._run_timeout):
            self._candidate = None
            self.next_look = time.monotonic() + 2 * interval
            return None
        moment = watchdog.progress(views)
        if self._candidate is None or self._candidate[1] != moment:
            self._candidate = (now, moment)
            return None
        if now - self._candidate[0] < self._settle:
            return None
        explanation = watchdog.explain(views)
        return explanation if self._on_host or explanation.certain else None

    def _kernel(self, process: RankProcess, now: float) -> tuple[bool, bool]:
        """Whether a rank was quiet since the last look, and whether it has been stopped for a while."""
        main, ticks, states = kernel_state(process.pid)
        before = self._ticks.get(process.index)
        self._ticks[process.index] = ticks
        if main == "T":
            since = self._stopped_since.setdefault(process.index, now)
            return False, now - since >= watchdog.STOPPED_FOR
        self._stopped_since.pop(process.index, None)
        if not self._on_host:
            return main in ("S", "R"), False
        used = 0 if before is None else ticks - before
        calm = before is not None and used <= _TICKS_WHEN_QUIET and "R" not in states and "D" not in states
        return main == "S" and calm, False


def _wants_to_run(process: RankProcess) -> bool:
    """Whether a thread of a rank waits for a core, or has one."""
    _, _, states = kernel_state(process.pid)
    return "R" in states or "D" in states


def _at_end(process: RankProcess) -> bool:
    """Whether the monitor's connection is closed."""
    try:
        return process.monitor.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


_FUTEX = {"x86_64": (202, 3), "aarch64": (98, 3)}
_SLEEPS = {  # nanosleep, clock_nanosleep; wait4, waitid
    "x86_64": {35, 230, 61, 247},
    "aarch64": {101, 115, 260, 95},
}
_UNTIMED = {"x86_64": {0, 45, 47}, "aarch64": {63, 207, 212}}  # read, recvfrom, recvmsg


def _alarms(pid: int, snapshot: Mapping[str, Any]) -> dict[int, bool]:
    """For every thread: whether it may wake up by itself, from the system call that it is in.

    Waiting for a lock without a time limit, or reading, is not an alarm; anything else, or not knowing, is.  Of the
    main thread, whose frames tell more, only a sleep and a wait for a child are.
    """
    machine = platform.machine()
    number, timeout_at = _FUTEX.get(machine, (-1, 3))
    found = {}
    threads = snapshot.get("threads")
    for thread in threads[: watchdog.MOST_THREADS] if isinstance(threads, list) else ():
        native = thread.get("native") if isinstance(thread, dict) else None
        if not isinstance(native, int):
            continue
        try:
            # What Python 3.11 says of the main thread is its parent's, after a fork.
            with open(f"/proc/{pid}/task/{pid if thread.get('main') else native}/syscall") as f:
                call = f.read().split()
        except OSError:
            continue
        if len(call) > timeout_at + 1 and call[0].isdigit():
            untimed_futex = int(call[0]) == number and int(call[1 + timeout_at], 16) == 0
            if thread.get("main"):
                found[native] = int(call[0]) in _SLEEPS.get(machine, set())
                continue
            found[native] = not (untimed_futex or int(call[0]) in _UNTIMED.get(machine, set()))
    return found
