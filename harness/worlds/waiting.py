"""The wait for one function on all ranks: it goes on until every rank has answered or can't answer any more."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from harness.worlds import answers, observing, postmortem, unpickling, watchdog, wire
from harness.worlds.bounded_calls import TooLongError, within
from harness.worlds.evidence import describe_exception
from harness.worlds.handle import Heard, RankHandle
from harness.worlds.places import is_source
from harness.worlds.postmortem import End, RanksFailed
from harness.worlds.rank_set import Ranks
from harness.worlds.recorder import CALLS
from harness.worlds.views import View
from harness.worlds.watchdog import FIRST_LOOK, Explanation

_BUSY_GRACE = 5.0  # seconds that ranks that still compute may go on after another has failed
_DUMP_WAIT = 5.0  # seconds at most for stacks that a signal handler writes, enough for a busy machine
_LONGEST_STACK = 50_000  # characters
_LEAST_READING = 2.0  # seconds that reading a result may always take
EXIT = "exit"
"""The answer of a rank that was told to close: it exits with code 0."""


class Waiting:
    """Waits for one answer from every rank.

    ``job``: the number that answers carry; ``answer``: their kind; ``timeout``: seconds; ``proof``: whether a proven
    deadlock ends the wait; ``on_host``, ``on_device``: as for :class:`~harness.worlds.observing.Watch`.
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
        on_device: bool,
    ) -> None:
        self._ranks = ranks
        self._job = job
        self._function = function
        self._world = world  # formatted only when a message names it
        self._answer = answer
        self._timeout = timeout
        self._proof = proof
        self._on_host = on_host
        self._on_device = on_device
        self._clock = ranks.clock
        self._started = self._clock.monotonic()
        self._deadline = self._started + timeout
        self._results: dict[int, Any] = {}
        self.issued: Counter[str] = Counter()
        """How often all ranks that have returned issued each collective from Python."""
        self.on_groups = 0
        """How many collectives these ranks issued on groups."""
        self._ends: dict[int, End] = {}
        self._failed = False

    def results(self, frame: list[bytes] | None = None, beside: Callable[[], object] | None = None) -> list[Any]:
        """Send every rank ``frame``, if there is one, and wait; returns the answers in rank order.

        ``beside`` is called here before the wait, while the ranks run.

        Errors: :class:`RanksFailed`.  Any other exception that ends the wait (Ctrl-C, a test's timeout) gets the
        evidence as a note.  The caller must discard the ranks then.
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
        self._exits()  # ends that are known by now; later ones are noticed in the wait
        while len(self._ends) < len(ranks.processes):
            now = self._clock.monotonic()
            if self._failed and grace_ends == math.inf:
                grace_ends = now + _BUSY_GRACE
                self._watch.hurry(now)
            if now >= self._deadline:
                self._fail(None, self._too_late())
            if now >= grace_ends:
                self._fail(None, "")
            for what, process in ranks.wait(max(0.0, min(self._deadline, self._next_look, grace_ends) - now)):
                self._event(what, process)
            self._exits()
            if (now := self._clock.monotonic()) >= self._next_look:
                explanation = self._watch.look(now, self._ended_how())
                if explanation is not None:
                    self._fail(explanation, "")
        for what, process in ranks.wait(0):  # output that was printed just before the answers
            self._event(what, process)
        if self._failed:
            self._fail(None, "")
        ranks.show_output()

    @functools.cached_property
    def _watch(self) -> observing.Watch:  # made when it is first needed: most runs end before that
        return observing.Watch(
            self._ranks.launcher,
            self._ranks.processes,
            started=self._started,
            run_timeout=self._timeout,
            on_host=self._on_host,
            on_device=self._on_device,
        )

    @property
    def _next_look(self) -> float:
        """When the next look at the ranks is due, on the launcher's clock."""
        if not self._proof:
            return math.inf
        return self._watch.next_look if "_watch" in self.__dict__ else self._started + FIRST_LOOK

    def _end(self, end: End) -> None:
        self._ends[end.index] = end
        self._failed = self._failed or end.failed

    def _event(self, what: Heard, process: RankHandle) -> None:
        """Take what the news is about."""
        if what is Heard.MESSAGE:
            self._message(process)
            return
        self._ranks.drain_one(process)
        if process.output_closed:
            self._ranks.ignore(process, Heard.OUTPUT)  # nobody is left who could print

    def _exits(self) -> None:
        for process in self._ranks.processes:
            if process.exit is not None and process.index not in self._ends:
                self._last_words(process)
                if process.index not in self._ends:
                    self._end(self._ended(process))

    def _ended(self, process: RankHandle) -> End:
        ended = process.exit
        assert ended is not None
        if self._answer == EXIT and ended.clean:
            return End(process.index, "returned", ended.time_ns, place=process.place)
        kind = "lost" if ended.server else "died" if ended.signal is not None else "exited"
        place = process.place._replace(error_ns=ended.error_ns)
        return End(process.index, kind, ended.time_ns, exit=ended, place=place)

    def _last_words(self, process: RankHandle) -> None:
        """Read what a rank sent before it ended."""
        try:
            while process.index not in self._ends and (frame := process.receive()) is not None:
                self._note(process, *answers.read(frame))
        except (wire.WireError, answers.NotAnAnswer):
            return  # the end of the rank says more

    def _message(self, process: RankHandle) -> None:
        try:
            while (frame := process.receive()) is not None:
                answer, buffers = answers.read(frame)
                if isinstance(answer, answers.Debug):
                    self._lend_terminal(process)
                else:
                    self._note(process, answer, buffers)
                if not process.more:
                    return
        except (wire.NotAFrame, answers.NotAnAnswer) as e:
            self._garbled(process, str(e))
        except wire.WireError:
            self._ranks.ignore(process, Heard.MESSAGE)  # its exit comes from the launcher

    def _garbled(self, process: RankHandle, why: str) -> None:
        """Record that a rank sent something that is not an answer.

        In most cases, its code wrote to a descriptor that is not its own.
        """
        self._ranks.ignore(process, Heard.MESSAGE)
        self._exits()  # if it has ended by now, that says more
        if process.index in self._ends and self._ends[process.index].failed:
            return
        number = self._ranks.descriptors.get(process.index)
        descriptor = f" (descriptor {number})" if number else ""
        standing = f"wrote what is no answer to its control channel{descriptor}: {why}"
        self._end(End(process.index, "garbled", self._clock.monotonic_ns(), standing=standing))

    def _note(self, process: RankHandle, answer: answers.Answer, buffers: Sequence[bytearray] = ()) -> None:
        """Record an answer of a rank.  Errors: :class:`~answers.NotAnAnswer` for one that nobody waits for."""
        if isinstance(answer, answers.Raised) and answer.job in (self._job, -1):
            report = msgspec.structs.asdict(answer.report)
            report["time_ns"] = process.time_here(report["time_ns"])
            self._raised(process, report, "skipped" if answer.report.skip else "raised")
            return
        if process.index in self._ends or answers.kind(answer) != self._answer or answer.job != self._job:
            raise answers.NotAnAnswer(f"{answers.kind(answer)!r} for job {answer.job}, which nobody waits for")
        if isinstance(answer, answers.Returned):
            results = self._read(process, answer, list(buffers))
            if not results:
                return
            self._results[process.index] = results[0]
            self.issued.update({name: n for name, n in answer.issued.items() if name in CALLS})
            self.on_groups += answer.on_groups
        elif isinstance(answer, answers.Checked):
            self._results[process.index] = answer.left
        elif isinstance(answer, answers.Ready):
            self._ranks.descriptors[process.index] = answer.descriptor
        self._ends[process.index] = _returned(process.index)

    def _raised(self, process: RankHandle, report: dict[str, Any], kind: str = "raised") -> None:
        now = self._clock.monotonic_ns()
        self._end(End(process.index, kind, min(report["time_ns"], now), report=report, place=process.place))

    def _read(self, process: RankHandle, answer: answers.Returned, buffers: list[bytearray]) -> list[Any]:
        """Return a rank's result in a list; [] if it can't be read, in which case the rank has failed."""
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
        until = max(self._deadline, self._clock.monotonic() + _LEAST_READING)
        problem = self._ranks.try_out(wire.parts_of(bytes(pickled), [bytes(b) for b in buffers]), until)
        if not problem:
            try:
                left = max(_LEAST_READING, until - self._clock.monotonic())
                value, report = within(left, functools.partial(_read_here, pickled, buffers))
            except TooLongError as e:
                problem = f"{e}\n{postmortem.stack_text(e.frames)}"
            else:
                if report is None:
                    return [value]
                self._raised(process, report)
                return []
        told = describe_exception(Exception(), context=_UNREAD)
        message, _, stack = problem.partition("\n")
        self._raised(process, {**told, "type": "", "message": message, "text": stack or message})
        return []

    def _lend_terminal(self, process: RankHandle) -> None:
        """Lend our terminal to a rank's debugger until the rank returns it.  The time does not count."""
        began = self._clock.monotonic()
        terminal = self._ranks.terminal
        if terminal is None:
            self._fail(None, f"rank {process.index} asks for a debugger, but there is no terminal to lend")
            return
        with terminal.lent() as (stdin, stdout):
            process.lend(stdin, stdout)
            try:
                while not isinstance((answer := self._next_answer(process))[0], answers.Debugged):
                    self._note(process, *answer)
            except (wire.NotAFrame, answers.NotAnAnswer) as e:
                self._garbled(process, str(e))
            except wire.WireError:
                pass  # it died in the debugger: its exit comes from the launcher
        lent = self._clock.monotonic() - began
        self._deadline += lent
        self._started += lent
        if "_watch" in self.__dict__:
            self._watch.next_look += lent

    def _next_answer(self, process: RankHandle) -> tuple[answers.Answer, list[bytearray]]:
        """Wait without a time limit for an answer of one rank.  Errors: :class:`~wire.WireError` if it has ended."""
        while (frame := process.receive()) is None:
            if process.exit is not None:
                raise wire.WireError("the rank has ended")
            self._ranks.wait_for_message(process)
        return answers.read(frame)

    # failing

    def _too_late(self) -> str:
        if self._answer != EXIT:
            return f"not finished after {self._timeout:g} s"
        late = [p for p in self._ranks.processes if p.exit is None]
        self._ranks.launcher.refresh(late)
        where = "its exit handlers" if late and late[0].box.phase == "atexit" else "leaving the process group"
        names = ", ".join(str(p.index) for p in late)
        return f"rank {names} did not end within {self._timeout:g} s: stuck in {where}"

    def _fail(self, explanation: Explanation | None, reason: str) -> None:
        """Collect the evidence of every rank, and raise :class:`RanksFailed`."""
        __tracebackhide__ = True
        views = self._views()
        ends = self._collect(views)
        failed = any(e.failed for e in ends)
        boxes = {p.index: p.box for p in self._ranks.processes}
        # Dead ranks have lost their Flight Recorders, so the watchdog may have seen only that the ranks are gone.
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
        """Return where each rank is now, or how it has ended."""
        views = observing.views_of(self._ranks.launcher, self._ranks.processes, {})
        self._ranks.launcher.poll()
        ended = self._ended_how()
        return [dataclasses.replace(view, state=ended.get(view.index, view.state)) for view in views]

    def _ended_how(self) -> dict[int, str]:
        """Return, by rank, how it has ended, in the words of :attr:`View.state`."""
        as_in_views = {"exited": "died", "lost": "died", "garbled": "raised"}
        return {i: as_in_views.get(e.kind, e.kind) for i, e in self._ends.items()}

    def _collect(self, views: list[View]) -> list[End]:
        """Return how each rank has ended, or where it is, with all evidence about it."""
        processes = self._ranks.processes
        silent = [p for p in processes if p.exit is None and not views[p.index].answered]
        for process in silent:
            process.ask_stack()
        self._ranks.wait_for_stacks(silent, _DUMP_WAIT)
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
                doing = observing.standing(process, view)
                if process.begun:
                    doing += f"; it has sent {process.begun}"
                end = End(process.index, "stopped", self._clock.monotonic_ns())
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
                    collectives=postmortem.describe_collectives(view.known, process.box.recent(64)),
                    reached=process.box.reached,
                    output=self._ranks.outputs[process.index].text(),
                    place=end.place if end.place.name else process.place,  # as exact as when its time was converted
                )
            )
        return ends

    def _interrupted(self, error: BaseException) -> None:
        """Add what the ranks were doing, as a note, to an exception that interrupted the wait."""
        try:
            why = f"interrupted by {type(error).__name__}"
            ends = self._collect(self._views())
            error.add_note(RanksFailed(str(self._world), self._function, ends, None, why).render())
        except Exception:
            return  # the interruption itself matters more than its evidence


_UNREAD = "its result can't be read here"


def _read_here(pickled: bytes | bytearray, buffers: list[bytearray]) -> tuple[Any, dict[str, Any] | None]:
    """Return a result, or the report of what reading it raised.  Both run users' code, which may take any time."""
    try:
        return wire.loads((pickled, buffers)), None
    except BaseException as e:
        return None, describe_exception(e, context=_UNREAD)


@functools.cache
def _returned(index: int) -> End:
    """Return the end of a rank that did what it was asked.  It is cached because every run needs it."""
    return End(index, "returned")


def cause_of(error: RanksFailed) -> BaseException:
    """Return an exception for the first rank to fail that seems to be raised at the place of the failure.

    Tools that group failures by place (Hypothesis, when it shrinks) can then tell one defect from another.
    """
    message = error.first.what if error.first is not None else error.headline.split(":")[0]
    file, line = error.place or ("", 0)
    if not file or not 0 < line < 1_000_000 or not is_source(file):
        return RankError(message)
    try:  # a file name may contain anything
        exec(compile("\n" * (line - 1) + "raise error", file, "exec"), {"error": RankError(message)})
    except RankError as e:
        return e
    except ValueError:
        pass
    return RankError(message)


class RankError(Exception):
    """The cause of a :class:`RanksFailed`: the failure of the first rank to fail, as seen from the controller."""
