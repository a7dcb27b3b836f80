"""The processes of one world, and what listens to them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.worlds import postmortem, wire
from harness.worlds.launch import Launcher, Output, RankProcess

if TYPE_CHECKING:
    from harness.worlds.rank import RankSetup
    from harness.worlds.terminal import Terminal

_LONGEST_SILENCE = 1.0  # seconds after which the launcher is asked whether it is still there


class Ranks:
    """The processes of one world, and what listens to them.

    ``setup``: of any of them, for a process of the same kind that reads their results first.
    """

    def __init__(
        self, processes: Sequence[RankProcess], launcher: Launcher, terminal: Terminal | None, setup: RankSetup
    ) -> None:
        self.processes = list(processes)
        self._setup = setup
        self._trial: RankProcess | None = None
        self.launcher = launcher
        self.terminal = terminal
        # A poll object and a dict, and no selector: this is on the way of every run, and a selector costs 0.1 ms there.
        self._poll = select.poll()
        self._sources: dict[int, Any] = {}
        self._listen(launcher.fileno(), launcher)
        for process in self.processes:
            self._listen(process.control.fileno(), process)
            self._listen(process.output_fd, (process, "output"))

    def _listen(self, fd: int, source: Any) -> None:
        self._poll.register(fd, select.POLLIN)
        self._sources[fd] = source

    def ignore(self, fd: int) -> None:
        """Listen no more to a descriptor whose other end is closed."""
        if self._sources.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def ready(self, seconds: float) -> list[Any]:
        """What can be read, after at most so many seconds: the launcher, a process, or (process, ``output``).

        It may come back sooner, with nothing.
        """
        found = self._poll.poll(math.ceil(min(seconds, _LONGEST_SILENCE) * 1000))
        news = [self.launcher] if self.launcher.check() else []
        return news + [self._sources[fd] for fd, _ in found if fd in self._sources]

    def send(self, frame: list[bytes]) -> None:
        """Write a frame to every rank.  One that has gone, or does not read, is seen by the wait."""
        whole = b"".join(frame) if sum(map(len, frame)) < 65536 else b""
        for process in self.processes:
            if process.exit is not None:
                continue
            try:
                # Ranks start as they get it, and the last one is waited for: nothing but the write goes before it.
                sent = process.control.send(whole) if whole else 0
                if not whole or sent < len(whole):
                    process.send([whole[sent:]] if whole else frame)
            except BlockingIOError:
                with contextlib.suppress(wire.WireError):
                    process.send(frame)
            except (OSError, wire.WireError):
                pass

    def drain(self) -> None:
        """Take all that was printed."""
        for process in self.processes:
            self.drain_one(process)

    def drain_one(self, process: RankProcess) -> None:
        """Take what one rank has printed."""
        data = process.drain_output()
        if data and self.terminal is not None:
            self.terminal.live(process.index, data)

    def show_output(self) -> None:
        """Hand what the ranks printed to whoever shows it, and begin anew."""
        for process in self.processes:
            if process.output.total:
                if self.terminal is not None:
                    self.terminal.finished(process.index, process.output)
                process.output = Output()

    def try_out(self, pickled: list[bytes], until: float) -> str:
        """Have a pickle read in a process of its own; returns what became of that process, empty if it lives on.

        ``pickled``: the parts of a frame; ``until``: when to give up, on the monotonic clock.
        """
        process = self._trial
        if process is None or process.exit is not None:
            self._end_trial()
            setup = dataclasses.replace(self._setup, index=0, size=1, device="cpu", imports=(), first=(), reads=True)
            (process,) = self.launcher.spawn([setup])
            self._trial = process
        began = time.monotonic()
        poll = select.poll()
        for fd in (self.launcher.fileno(), process.control.fileno(), process.output_fd):
            poll.register(fd, select.POLLIN)
        with contextlib.suppress(wire.WireError):  # how it ended comes from the launcher
            process.send(pickled, timeout=max(0.1, until - began))
        while process.exit is None and (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(math.ceil(left * 1000)):
                if fd == process.output_fd:
                    process.drain_output()
                    if process.output_closed:
                        poll.unregister(fd)
                elif fd == process.control.fileno():
                    try:
                        if process.reader.read() is not None:
                            return ""
                    except wire.WireError:
                        poll.unregister(fd)
                else:
                    self.launcher.poll()
        ended = process.exit
        stack = self._stack_of(process)
        self._end_trial()
        if ended is None:
            return f"not done after {time.monotonic() - began:.3g} s{stack}"
        return f"reading it {'was ' if ended.signal is not None else ''}{ended}{stack}"

    def _stack_of(self, process: RankProcess) -> str:
        if process.exit is None:
            process.ask_stack()
            until = time.monotonic() + 1
            while time.monotonic() < until and not process.stack_is_there():
                time.sleep(0.005)
        crash = process.crash_text()
        return f"\n{postmortem.crash_stack(crash)}" if crash else ""

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            self._gone([trial], 5.0)
            trial.close()

    def discard(self, within: float = 5.0) -> None:
        """Kill what is left of the ranks, wait for their ends, give back their descriptors."""
        every = [*self.processes, *([self._trial] if self._trial is not None else [])]
        self._trial = None
        self._gone(every, within)
        for process in every:
            process.close()
        for process in self.processes:
            if self.terminal is not None:
                self.terminal.gone(process.index)

    def _gone(self, processes: Sequence[RankProcess], within: float) -> None:
        """Kill processes and wait for their ends."""
        for process in processes:
            self.launcher.kill(process)
        deadline = time.monotonic() + within
        poll = select.poll()
        while any(p.exit is None for p in processes) and time.monotonic() < deadline:
            poll.register(self.launcher.fileno(), select.POLLIN)  # not before: one that was lost has none
            poll.poll(100)
            self.launcher.check()
            self.launcher.poll()
