"""Observation of the ranks of a run: what each is doing, and when that proves that none can go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.worlds import watchdog
from harness.worlds.handle import Heard, Launcher, RankHandle
from harness.worlds.views import MOST_THREADS, STOPPED_FOR, View, view_of
from harness.worlds.watchdog import Explanation

_SNAPSHOT_WAIT = 0.6
_STARVED_WAIT = 5.0
"""The same for a rank that waits for a CPU, because its monitor would answer if it could run."""
_TICKS_WHEN_QUIET = 2  # per look; gloo's loop wakes up a hundred times a second
_HURRIED_INTERVAL = 0.07


def views_of(launcher: Launcher, ranks: Sequence[RankHandle], state: Mapping[int, tuple[bool, bool]]) -> list[View]:
    """Ask every live rank where it is, and return a view of every rank.

    ``state``: by rank, whether it is quiet, and whether it has been stopped.
    """
    clock = launcher.clock
    asked = [rank for rank in ranks if rank.exit is None]
    launcher.refresh(asked)
    for rank in asked:
        rank.ask_snapshot()
    awaited = [rank for rank in asked if not state.get(rank.index, (False, False))[1]]
    answers: dict[int, dict[str, Any]] = {}
    began = clock.monotonic()
    deadline, last = began + _SNAPSHOT_WAIT, began + _STARVED_WAIT
    listener = launcher.listen(awaited, (Heard.SNAPSHOT,))
    while awaited and (now := clock.monotonic()) < deadline:
        for news in listener.wait(deadline - now):
            answer = news.rank.take_snapshot()
            if answer is not None:
                answers[news.rank.index] = answer
                listener.ignore(news.rank, Heard.SNAPSHOT)
        awaited = [rank for rank in awaited if rank.index not in answers and rank.exit is None]
        if clock.monotonic() >= deadline and any(rank.kernel_state().wants_to_run for rank in awaited):
            deadline = min(deadline + 0.1, last)
    views = []
    for rank in ranks:
        quiet, stopped = state.get(rank.index, (False, False))
        answer = answers.get(rank.index)
        alarms = rank.alarms(threads_of(answer)) if answer else {}
        views.append(view_of(rank.index, answer, quiet=quiet, stopped=stopped, alarm_of=alarms))
    return views


def threads_of(snapshot: Mapping[str, Any]) -> Iterator[tuple[int, bool]]:
    """Yield, for every thread in a snapshot, the kernel's id and whether it is the main thread."""
    threads = snapshot.get("threads")
    for thread in threads[:MOST_THREADS] if isinstance(threads, list) else ():
        native = thread.get("native") if isinstance(thread, dict) else None
        if isinstance(native, int):
            yield native, bool(thread.get("main"))


def standing(rank: RankHandle, view: View) -> str:
    """Describe what a live rank is doing."""
    kernel = rank.kernel_state()
    state = kernel.main
    if state in ("T", "t"):
        return f"stopped by a signal (SIGSTOP), in phase {rank.box.phase}"
    if rank.monitor_lost:
        return f"in phase {rank.box.phase}, and something wrote into its monitor channel what is no answer"
    if not view.answered:
        return f"in C code that holds the interpreter lock (kernel state {state or '?'})"
    lost = "".join(f", while {peer} acknowledges nothing that it has sent there" for peer in kernel.unanswered)
    return ("waiting " if watchdog.in_collective(view) else "running, ") + watchdog.standing(view) + lost


class Watch:
    """Looks at the ranks of a run from time to time, and reports when a deadlock is proven.

    ``on_host``: whether the kernel's view of a rank is complete.  It is not for ranks on an accelerator: a rank that
    waits for one may spin, and what it waits for may still be on its way.  Nor is it for ranks on several hosts, where
    data may be on its way for seconds.  Then only what the records of collectives
    prove counts as a proof: a difference, or that no collective can complete (:func:`~watchdog.closed`).
    ``on_device``: the ranks are on an accelerator.
    """

    def __init__(
        self,
        launcher: Launcher,
        ranks: Sequence[RankHandle],
        *,
        started: float,
        run_timeout: float,
        on_host: bool,
        on_device: bool,
    ) -> None:
        self._launcher = launcher
        self._ranks = ranks
        self._run_timeout = run_timeout
        self._on_host = on_host
        self._on_device = on_device
        self.next_look = started + watchdog.FIRST_LOOK
        """When the next look is due, on the launcher's clock."""
        self._settle = watchdog.SETTLE
        self._ticks: dict[int, int] = {}
        self._stopped_since: dict[int, float] = {}
        self._candidate: tuple[float, object] | None = None

    def hurry(self, now: float) -> None:
        """Look more often after a rank has failed: the others get a short time to show that they can go on."""
        self._settle = watchdog.SETTLE_AFTER_FAILURE
        self.next_look = min(self.next_look, now + 0.02)

    def look(self, now: float, ended: Mapping[int, str]) -> Explanation | None:
        """Look once; returns which rank waits for which if it is proven that no rank can go on, else None.

        ``now``: on the launcher's clock; ``ended``: by rank, how it has ended, in the words of :attr:`View.state`.
        """
        alive = [rank for rank in self._ranks if rank.index not in ended]
        self._launcher.refresh(alive)
        state = {rank.index: self._kernel(rank, now) for rank in alive}
        interval = watchdog.FIRST_LOOK if self._settle == watchdog.SETTLE else _HURRIED_INTERVAL
        self.next_look = now + interval
        if not alive or not all(quiet or stopped for quiet, stopped in state.values()):
            self._candidate = None
            return None
        views = [
            dataclasses.replace(view, state=ended.get(view.index, view.state), on_device=self._on_device)
            for view in views_of(self._launcher, self._ranks, state)
        ]
        if not watchdog.deadlocked(views, self._run_timeout):
            self._candidate = None
            self.next_look = self._launcher.clock.monotonic() + 2 * interval
            return None
        moment = watchdog.progress(views)
        if self._candidate is None or self._candidate[1] != moment:
            self._candidate = (now, moment)
            return None
        settled = now - self._candidate[0]
        if settled < self._settle:
            return None
        explanation = watchdog.explain(views)
        if self._on_host or explanation.certain:
            return explanation
        proven = settled >= watchdog.settling(views) and watchdog.closed(views, self._run_timeout)
        return explanation if proven else None

    def _kernel(self, rank: RankHandle, now: float) -> tuple[bool, bool]:
        """Return whether a rank was quiet since the last look, and whether it has been stopped for a while."""
        main, ticks, states, _ = rank.kernel_state()
        before = self._ticks.get(rank.index)
        self._ticks[rank.index] = ticks
        if main == "T":
            since = self._stopped_since.setdefault(rank.index, now)
            return False, now - since >= STOPPED_FOR
        self._stopped_since.pop(rank.index, None)
        if not self._on_host:
            return main in ("S", "R"), False
        used = 0 if before is None else ticks - before
        calm = before is not None and used <= _TICKS_WHEN_QUIET and "R" not in states and "D" not in states
        return main == "S" and calm, False
