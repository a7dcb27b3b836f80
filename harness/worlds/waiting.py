"""One function in flight on all ranks: what is heard of it until every rank has answered, or can't any more."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.worlds import looking, postmortem, watchdog, wire
from harness.worlds.launch import Launcher, Output, RankProcess
from harness.worlds.postmortem import End, RanksFailed
from harness.worlds.watchdog import FIRST_LOOK, Explanation, View

if TYPE_CHECKING:
    from harness.worlds.terminal import Terminal

_BUSY_GRACE = 5.0  # how long ranks that still compute may go on after another has failed
_DUMP_WAIT = 5.0  # at most, for stacks that a signal handler writes; a machine with much to do takes its time
_LONGEST_SILENCE = 1.0  # seconds after which the launcher is asked whether it is still there
EXIT = "exit"
"""The answer of a rank that was told to close: it ends with code 0."""


class Ranks:
    """The processes of one world, and what listens to them."""

    def __init__(self, processes: Sequence[RankProcess], launcher: Launcher, terminal: Terminal | None) -> None:
        self.processes = list(processes)
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

    def discard(self, within: float = 5.0) -> None:
        """Kill what is left of the ranks, wait for their ends, give back their descriptors."""
        for process in self.processes:
            self.launcher.kill(process)
        deadline = time.monotonic() + within
        poll = select.poll()
        while any(p.exit is None for p in self.processes) and time.monotonic() < deadline:
            poll.register(self.launcher.fileno(), select.POLLIN)  # not before: one that was lost has none
            poll.poll(100)
            self.launcher.check()
            self.launcher.poll()
        for process in self.processes:
            process.close()
            if self.terminal is not None:
                self.terminal.gone(process.index)


class Waiting:
    """Waits for one answer of every rank.

    ``job``: the number that answers carry; ``answer``: their kind; ``proof``: whether a proven deadlock ends the wait.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        job: int,
        function: str,
        world: object,
        answer: str,
        timeout: float,
        proof: bool,
        on_host: bool,
    ) -> None:
        self._ranks = ranks
        self._job = job
        self._function = function
        self._world = world  # put into words when something is to be said of it
        self._answer = answer
        self._timeout = timeout
        self._proof = proof
        self._on_host = on_host
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._results: dict[int, Any] = {}
        self._ends: dict[int, End] = {}
        self._failed = False

    def results(self, frame: list[bytes] | None = None, beside: Callable[[], object] | None = None) -> list[Any]:
        """Send every rank ``frame``, if there is one, and wait; returns the answers in rank order.

        ``beside`` is called here before the wait, while ranks are at it.

        Errors: :class:`RanksFailed`; anything else that ends the wait (Ctrl-C, a test's timeout) has the evidence as
        a note.  The ranks are to be discarded then.
        """
        __tracebackhide__ = True
        try:
            if frame is not None:
                self._ranks.send(frame)
            if beside is not None:
                beside()
            self._pump()
        except RanksFailed:
            raise
        except BaseException as e:
            self._interrupted(e)
            raise
        return [self._results.get(p.index) for p in self._ranks.processes]

    # listening

    def _pump(self) -> None:
        __tracebackhide__ = True
        ranks = self._ranks
        grace_ends = math.inf
        self._exits()  # what is known by now; news comes while we wait
        while len(self._ends) < len(ranks.processes):
            now = time.monotonic()
            if self._failed and grace_ends == math.inf:
                grace_ends = now + _BUSY_GRACE
                self._watch.hurry(now)
            if now >= self._deadline:
                self._fail(None, self._too_late())
            if now >= grace_ends:
                self._fail(None, "")
            for source in ranks.ready(max(0.0, min(self._deadline, self._next_look, grace_ends) - now)):
                self._event(source)
            if time.monotonic() >= self._next_look:
                self._exits()  # another thread, with a world of its own, may have had the news
                explanation = self._watch.look(time.monotonic(), self._ended_how())
                if explanation is not None:
                    self._fail(explanation, "")
        for source in ranks.ready(0):  # what was printed just before the answers
            self._event(source)
        if self._failed:
            self._fail(None, "")
        ranks.show_output()

    @functools.cached_property
    def _watch(self) -> looking.Watch:  # made when it is first needed: most runs end before
        return looking.Watch(
            self._ranks.processes, started=self._started, run_timeout=self._timeout, on_host=self._on_host
        )

    @property
    def _next_look(self) -> float:
        """When to look at the ranks, on the monotonic clock."""
        if not self._proof:
            return math.inf
        return self._watch.next_look if "_watch" in self.__dict__ else self._started + FIRST_LOOK

    def _end(self, end: End) -> None:
        self._ends[end.index] = end
        self._failed = self._failed or end.failed

    def _event(self, source: Any) -> None:
        """Handle one readable thing."""
        if isinstance(source, tuple):
            process = source[0]
            self._ranks.drain_one(process)
            if process.output_closed:
                self._ranks.ignore(process.output_fd)  # every holder of the pipe has gone
        elif isinstance(source, RankProcess):
            self._message(source)
        else:
            self._ranks.launcher.poll()
            self._exits()

    def _exits(self) -> None:
        for process in self._ranks.processes:
            if process.exit is not None and process.index not in self._ends:
                self._last_words(process)
                if process.index not in self._ends:
                    self._end(self._ended(process))

    def _ended(self, process: RankProcess) -> End:
        ended = process.exit
        assert ended is not None
        if self._answer == EXIT and ended.clean:
            return End(process.index, "returned", ended.time_ns)
        kind = "lost" if ended.server else "died" if ended.signal is not None else "exited"
        return End(process.index, kind, ended.time_ns, exit=ended)

    def _last_words(self, process: RankProcess) -> None:
        """Read what a rank had sent before it ended."""
        try:
            while (frame := process.reader.read()) is not None:
                self._note(process, wire.loads(frame))
        except Exception:
            return

    def _message(self, process: RankProcess) -> None:
        try:
            while (frame := process.reader.read()) is not None:
                self._heard(process, frame)
                if not process.reader.ahead:
                    return
        except wire.WireError:
            self._ranks.ignore(process.control.fileno())  # its exit comes from the launcher

    def _heard(self, process: RankProcess, frame: tuple[bytes | bytearray, list[bytearray]]) -> None:
        try:
            message = wire.loads(frame)
        except Exception as e:
            report = {"type": type(e).__name__, "message": str(e), "text": str(e)}
            report["context"] = "its result can't be read here"
            self._end(End(process.index, "raised", time.monotonic_ns(), report=report))
            return
        if message[0] == "debug":
            self._lend_terminal(process)
        else:
            self._note(process, message)

    def _note(self, process: RankProcess, message: tuple[str, int, Any]) -> None:
        kind, job, payload = message
        if kind == "raised" and job in (self._job, -1):
            ending = "skipped" if payload["skip"] else "raised"
            self._end(End(process.index, ending, payload["time_ns"], report=payload))
        elif kind == self._answer and job == self._job:
            self._results[process.index] = payload
            self._ends[process.index] = _returned(process.index)

    def _lend_terminal(self, process: RankProcess) -> None:
        """Give our terminal to a rank's debugger until it says that it has done with it; the clock stands still."""
        began = time.monotonic()
        terminal = self._ranks.terminal
        if terminal is None:
            self._fail(None, f"rank {process.index} asks for a debugger, but there is no terminal to lend")
            return
        with terminal.lent() as (stdin, stdout):
            process.send(wire.dumps((_ways_to(stdin), _ways_to(stdout))))
            process.control.setblocking(True)
            try:
                while (message := wire.receive(process.control, process.reader))[0] != "debugged":
                    self._note(process, message)
            except wire.WireError:
                pass  # it died in the debugger: its exit comes from the launcher
            finally:
                process.control.setblocking(False)
        self._deadline += time.monotonic() - began
        self._started += time.monotonic() - began
        if "_watch" in self.__dict__:
            self._watch.next_look += time.monotonic() - began

    # failing

    def _too_late(self) -> str:
        if self._answer != EXIT:
            return f"not finished after {self._timeout:g} s"
        late = [p for p in self._ranks.processes if p.exit is None]
        where = "its exit handlers" if late and late[0].box.phase == "atexit" else "leaving the process group"
        names = ", ".join(str(p.index) for p in late)
        return f"rank {names} did not end within {self._timeout:g} s: stuck in {where}"

    def _fail(self, explanation: Explanation | None, reason: str) -> None:
        """Collect what every rank can still say, and raise."""
        __tracebackhide__ = True
        views = self._views()
        ends = self._collect(views)
        failed = any(e.failed for e in ends)
        boxes = {p.index: p.box for p in self._ranks.processes}
        # Ranks that are dead lost their Flight Recorder, so the watchdog may have seen no more than that they are gone.
        if failed and not (explanation and explanation.mismatch) and all(box.whole for box in boxes.values()):
            difference = postmortem.compare_issued({i: box.recent(box.count) for i, box in boxes.items()})
            explanation = Explanation(difference, mismatch=True) if difference else explanation
        if explanation is None and not failed:
            explanation = watchdog.suspect(views) if self._answer != EXIT else None
            doing = "; ".join(f"rank {e.index} was {e.standing}" for e in ends if e.kind == "stopped")
            reason = f"{reason or 'no rank can go on'}: {explanation.headline if explanation else doing}"
        error = RanksFailed(str(self._world), self._function, ends, explanation, reason)
        error.__context__ = cause = cause_of(error)
        raise error from cause

    def _views(self) -> list[View]:
        """Where each rank is now, or how it has ended."""
        views = looking.views_of(self._ranks.processes, {})
        self._ranks.launcher.poll()
        ended = self._ended_how()
        return [dataclasses.replace(view, state=ended.get(view.index, view.state)) for view in views]

    def _ended_how(self) -> dict[int, str]:
        """How ranks have ended, as :class:`View` has it, by rank."""
        return {i: "died" if e.kind in ("exited", "lost") else e.kind for i, e in self._ends.items()}

    def _collect(self, views: list[View]) -> list[End]:
        """How each rank has ended, or where it stands, with all that is known of it."""
        processes = self._ranks.processes
        silent = [p for p in processes if p.exit is None and not views[p.index].answered]
        for process in silent:
            process.ask_stack()
        until = time.monotonic() + _DUMP_WAIT
        while time.monotonic() < until and not all(p.stack_is_there() for p in silent):
            time.sleep(0.005)
        self._ranks.drain()
        ends = []
        for process in processes:
            view = views[process.index]
            end = self._ends.get(process.index)
            if end is None and process.exit is not None:
                end = self._ended(process)
            crash = process.crash_text()
            stack = doing = ""
            if crash and (process.exit is not None or process in silent):
                stack = postmortem.crash_stack(crash)
            if end is None:
                if view.frames:
                    stack = postmortem.stack_text(view.frames, view.called)
                doing = looking.standing(process, view)
                end = End(process.index, "stopped", time.monotonic_ns())
            ends.append(
                End(
                    end.index,
                    end.kind,
                    end.time_ns,
                    report=end.report,
                    exit=process.exit,
                    standing=doing,
                    stack=stack,
                    frames=view.frames,
                    collectives=postmortem.describe_collectives(view.records, process.box.recent(64)),
                    output=process.output.text(),
                )
            )
        return ends

    def _interrupted(self, error: BaseException) -> None:
        """Something else ended the wait: put on it what the ranks were doing."""
        try:
            why = f"interrupted by {type(error).__name__}"
            ends = self._collect(self._views())
            error.add_note(RanksFailed(str(self._world), self._function, ends, None, why).render())
        except Exception:
            return  # the interruption itself matters more than its evidence


def _ways_to(fd: int) -> list[str]:
    """Paths by which a rank may open what a descriptor of ours is open on.

    A terminal has a name; everything else can be reached through us, but not by ranks in a user namespace of their own.
    """
    return [*([os.ttyname(fd)] if os.isatty(fd) else []), f"/proc/{os.getpid()}/fd/{fd}"]


@functools.cache
def _returned(index: int) -> End:
    """The end of a rank that did what it was asked; one for each, since every run needs it and it says no more."""
    return End(index, "returned")


def cause_of(error: RanksFailed) -> BaseException:
    """The first rank's exception with the place where it was raised, so that tools which group failures by place
    (Hypothesis, when it shrinks) tell one defect from another."""
    what = error.first.what if error.first is not None else error.headline.split(":")[0]
    file, line = error.place or ("", 0)
    if not file or not 0 < line < 1_000_000:
        return RankError(what)
    try:  # a file name may be anything
        exec(compile("\n" * (line - 1) + "raise error", file, "exec"), {"error": RankError(what)})
    except RankError as e:
        return e
    except ValueError:
        pass
    return RankError(what)


class RankError(Exception):
    """What the first rank to fail raised, as seen from the controller: the cause of a :class:`RanksFailed`."""
