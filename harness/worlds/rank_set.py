"""The ranks of one world, and the listener to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.worlds import postmortem, wire
from harness.worlds.handle import Heard, Launcher, News, RankHandle
from harness.worlds.launch import Output

if TYPE_CHECKING:
    from harness.worlds.rank import RankSetup
    from harness.worlds.terminal import Terminal

_STACK_WAIT = 1.0  # seconds for the stack of the process that reads results


class Ranks:
    """The ranks of one world, and the listener to them.

    ``setup``: that of any rank, for a process of the same kind that reads their results first.
    """

    def __init__(
        self, processes: Sequence[RankHandle], launcher: Launcher, terminal: Terminal | None, setup: RankSetup
    ) -> None:
        self.processes = list(processes)
        self._setup = setup
        self._trial: RankHandle | None = None
        self.launcher = launcher
        self.clock = launcher.clock
        self.terminal = terminal
        self.outputs = {process.index: Output() for process in self.processes}
        """By rank, what it has printed in this run."""
        self.descriptors: dict[int, int] = {}
        """By rank, the descriptor of its end of the control channel, to which its code may have written by mistake."""
        self._listener = launcher.listen(self.processes, (Heard.MESSAGE, Heard.OUTPUT))

    def ignore(self, process: RankHandle, what: Heard) -> None:
        """Stop listening to a channel of a rank that is closed."""
        self._listener.ignore(process, what)

    def wait(self, seconds: float) -> Sequence[News]:
        """Wait for messages, output or the end of a rank; see :meth:`~harness.worlds.handle.Listener.wait`."""
        return self._listener.wait(seconds)

    def wait_for_message(self, process: RankHandle) -> None:
        """Wait without a time limit until one rank has sent something or has ended."""
        listener = self.launcher.listen([process], (Heard.MESSAGE,))
        while not listener.wait(60.0) and process.exit is None:
            pass

    def wait_for_stacks(self, processes: Sequence[RankHandle], seconds: float) -> None:
        """Wait for at most ``seconds`` until ranks have written the stacks that they were asked for."""
        listener = self.launcher.listen(processes, (Heard.STACK,))
        until = self.clock.monotonic() + seconds
        while not all(p.stack_is_there() for p in processes) and (left := until - self.clock.monotonic()) > 0:
            listener.wait(left)

    def send(self, frame: list[bytes]) -> None:
        """Send a frame to every rank.  The wait notices a rank that has gone or does not read."""
        # Each rank starts when it gets the frame, and a run waits for the last rank: do nothing but send here.
        frame = [b"".join(frame)] if sum(map(len, frame)) < 65536 else frame
        for process in self.processes:
            if process.exit is not None:
                continue
            try:
                process.send(frame)
            except wire.WireError:
                pass

    def drain(self) -> None:
        """Take what all ranks have printed."""
        for process in self.processes:
            self.drain_one(process)

    def drain_one(self, process: RankHandle) -> None:
        """Take what one rank has printed."""
        data = process.take_output()
        self.outputs[process.index].add(data)
        if data and self.terminal is not None:
            self.terminal.live(process.index, data)

    def show_output(self) -> None:
        """Hand the ranks' output to the terminal, and start collecting anew."""
        for index, output in self.outputs.items():
            if output.total:
                if self.terminal is not None:
                    self.terminal.finished(index, output)
                self.outputs[index] = Output()

    def try_out(self, pickled: list[bytes], until: float) -> str:
        """Have a pickle read in a separate process; returns what became of that process, empty if it survived.

        ``pickled``: the parts of a frame; ``until``: when to give up, on the launcher's clock.
        """
        process = self._trial
        if process is None or process.exit is not None:
            self._end_trial()
            setup = dataclasses.replace(self._setup, index=0, size=1, device="cpu", imports=(), first=(), reads=True)
            (process,) = self.launcher.spawn([setup])
            self._trial = process
        began = self.clock.monotonic()
        listener = self.launcher.listen([process], (Heard.MESSAGE, Heard.OUTPUT))
        with contextlib.suppress(wire.WireError):  # the launcher reports how it ended
            process.send(pickled, timeout=max(0.1, until - began))
        while process.exit is None and (left := until - self.clock.monotonic()) > 0:
            for news in listener.wait(left):
                if news.what is Heard.OUTPUT:
                    process.take_output()
                    if process.output_closed:
                        listener.ignore(process, Heard.OUTPUT)
                    continue
                try:
                    if process.receive() is not None:
                        return ""
                except wire.WireError:
                    listener.ignore(process, Heard.MESSAGE)
        ended = process.exit
        stack = self._stack_of(process)
        self._end_trial()
        if ended is None:
            return f"not done after {self.clock.monotonic() - began:.3g} s{stack}"
        return f"reading it {'was ' if ended.signal is not None else ''}{ended}{stack}"

    def _stack_of(self, process: RankHandle) -> str:
        if process.exit is None:
            process.ask_stack()
            self.wait_for_stacks([process], _STACK_WAIT)
        crash = process.crash_text()
        return f"\n{postmortem.crash_stack(crash)}" if crash else ""

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            self._gone([trial], 5.0)
            trial.close()

    def discard(self, within: float = 5.0) -> None:
        """Kill the ranks that are left, wait at most ``within`` seconds for their ends, and close their handles."""
        every = [*self.processes, *([self._trial] if self._trial is not None else [])]
        self._trial = None
        self._gone(every, within)
        for process in every:
            process.close()
        for process in self.processes:
            if self.terminal is not None:
                self.terminal.gone(process.index)

    def _gone(self, processes: Sequence[RankHandle], within: float) -> None:
        """Kill ranks and wait at most ``within`` seconds for their ends."""
        for process in processes:
            self.launcher.kill(process)
        deadline = self.clock.monotonic() + within
        listener = self.launcher.listen([], ())  # ends are noticed without listening to anything
        while any(p.exit is None for p in processes) and (left := deadline - self.clock.monotonic()) > 0:
            listener.wait(min(left, 0.1))
