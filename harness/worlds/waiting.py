"""One function in flight on all ranks: what is heard of it until every rank has answered, or can't any more."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from harness.worlds import answers, looking, postmortem, unpickling, watchdog, wire
from harness.worlds.bounded import TooLongError, within
from harness.worlds.evidence import describe_exception
from harness.worlds.launch import RankProcess
from harness.worlds.places import is_source
from harness.worlds.postmortem import End, RanksFailed
from harness.worlds.ranks import Ranks
from harness.worlds.watchdog import FIRST_LOOK, Explanation, View

_BUSY_GRACE = 5.0  # how long ranks that still compute may go on after another has failed
_DUMP_WAIT = 5.0  # at most, for stacks that a signal handler writes; a machine with much to do takes its time
_LONGEST_STACK = 50_000  # characters
_LEAST_READING = 2.0  # seconds that the reading of a result has in any case
EXIT = "exit"
"""The answer of a rank that was told to close: it ends with code 0."""


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
        self._exits_unseen = False
        """Whether the launcher was listened to while it was another process's end that was waited for."""

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
            if self._exits_unseen:
                self._exits_unseen = False
                self._exits()
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
            while process.index not in self._ends and (frame := process.reader.read()) is not None:
                self._note(process, *answers.read(frame))
        except (wire.WireError, answers.NotAnAnswer):
            return  # that it ended says more

    def _message(self, process: RankProcess) -> None:
        try:
            while (frame := process.reader.read()) is not None:
                answer, buffers = answers.read(frame)
                if isinstance(answer, answers.Debug):
                    self._lend_terminal(process)
                else:
                    self._note(process, answer, buffers)
                if not process.reader.ahead:
                    return
        except (wire.NotAFrame, answers.NotAnAnswer) as e:
            self._garbled(process, str(e))
        except wire.WireError:
            self._ranks.ignore(process.control.fileno())  # its exit comes from the launcher

    def _garbled(self, process: RankProcess, why: str) -> None:
        """A rank has said what is no answer: its code wrote into a descriptor that is not its own, mostly."""
        self._ranks.ignore(process.control.fileno())
        if process.index in self._ends and self._ends[process.index].failed:
            return
        descriptor = f" (descriptor {process.control_there})" if process.control_there else ""
        what = f"wrote what is no answer to its control channel{descriptor}: {why}"
        self._end(End(process.index, "garbled", time.monotonic_ns(), standing=what))

    def _note(self, process: RankProcess, answer: answers.Answer, buffers: Sequence[bytearray] = ()) -> None:
        """Take an answer of a rank.  Errors: :class:`~answers.NotAnAnswer` for one that nobody waits for."""
        if isinstance(answer, answers.Raised) and answer.job in (self._job, -1):
            report = msgspec.structs.asdict(answer.report)
            self._raised(process, report, "skipped" if answer.report.skip else "raised")
            return
        if process.index in self._ends or answers.kind(answer) != self._answer or answer.job != self._job:
            raise answers.NotAnAnswer(f"{answers.kind(answer)!r} for job {answer.job}, which nobody waits for")
        if isinstance(answer, answers.Returned):
            found = self._read(process, answer, list(buffers))
            if not found:
                return
            self._results[process.index] = found[0]
        elif isinstance(answer, answers.Checked):
            self._results[process.index] = answer.left
        elif isinstance(answer, answers.Ready):
            process.control_there = answer.descriptor
        self._ends[process.index] = _returned(process.index)

    def _raised(self, process: RankProcess, report: dict[str, Any], kind: str = "raised") -> None:
        now = time.monotonic_ns()
        self._end(End(process.index, kind, min(report["time_ns"], now), report=report))

    def _read(self, process: RankProcess, answer: answers.Returned, buffers: list[bytearray]) -> list[Any]:
        """The result of a rank, alone in a list; [] where it can't be read, and then the rank has failed."""
        if not answer.pickled and not buffers:
            return [None]
        pickled = answer.pickled or buffers.pop(0)
        try:
            return [unpickling.plain(pickled, buffers)]
        except unpickling.NotPlain:
            pass
        except Exception as e:
            self._raised(process, describe_exception(e, context=_UNREAD))
            return []
        until = max(self._deadline, time.monotonic() + _LEAST_READING)
        became = self._ranks.try_out(wire.parts_of(bytes(pickled), [bytes(b) for b in buffers]), until)
        self._exits_unseen = True
        if not became:
            try:
                left = max(_LEAST_READING, until - time.monotonic())
                found, report = within(left, functools.partial(_read_here, pickled, buffers))
            except TooLongError as e:
                became = f"{e}\n{postmortem.stack_text(e.frames)}"
            else:
                if report is None:
                    return [found]
                self._raised(process, report)
                return []
        told = describe_exception(Exception(), context=_UNREAD)
        message, _, stack = became.partition("\n")
        self._raised(process, {**told, "type": "", "message": message, "text": stack or message})
        return []

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
                while not isinstance((answer := self._receive(process))[0], answers.Debugged):
                    self._note(process, *answer)
            except (wire.NotAFrame, answers.NotAnAnswer) as e:
                self._garbled(process, str(e))
            except wire.WireError:
                pass  # it died in the debugger: its exit comes from the launcher
            finally:
                process.control.setblocking(False)
        self._deadline += time.monotonic() - began
        self._started += time.monotonic() - began
        if "_watch" in self.__dict__:
            self._watch.next_look += time.monotonic() - began

    def _receive(self, process: RankProcess) -> tuple[answers.Answer, list[bytearray]]:
        return answers.read(wire.receive_frame(process.control, process.reader))

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
        as_in_views = {"exited": "died", "lost": "died", "garbled": "raised"}
        return {i: as_in_views.get(e.kind, e.kind) for i, e in self._ends.items()}

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
                stack = postmortem.crash_stack(crash)[:_LONGEST_STACK]
            if view.frames and (end is None or end.kind == "garbled"):
                stack = postmortem.stack_text(view.frames, view.called)
            if end is None:
                doing = looking.standing(process, view)
                if process.reader.begun:
                    doing += f"; it has sent {process.reader.begun}"
                end = End(process.index, "stopped", time.monotonic_ns())
            ends.append(
                End(
                    end.index,
                    end.kind,
                    end.time_ns,
                    report=end.report,
                    exit=process.exit,
                    standing=doing or end.standing,
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


_UNREAD = "its result can't be read here"


def _read_here(pickled: bytes | bytearray, buffers: list[bytearray]) -> tuple[Any, dict[str, Any] | None]:
    """A result, or the report of what its reading raised: both are somebody's code, which may take any time."""
    try:
        return wire.loads((pickled, buffers)), None
    except BaseException as e:
        return None, describe_exception(e, context=_UNREAD)


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
    if not file or not 0 < line < 1_000_000 or not is_source(file):
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
