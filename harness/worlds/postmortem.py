"""The post-mortem of a world: which rank failed first, which failed because of it, and what each was doing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.safe_io.shown import printable
from harness.worlds.blackbox import Issued
from harness.worlds.exceptions import both_ends
from harness.worlds.handle import HERE, Place
from harness.worlds.launch import Exit
from harness.worlds.places import short_path, source_line
from harness.worlds.views import Record
from harness.worlds.watchdog import Explanation, user_frame

_TRANSPORT = re.compile(
    r"connection (was )?(closed|reset|refused)|connect(ion)? timeout|broken pipe|timed? ?out|remote process exited"
    r"|peer|socket|network error|abort|store.*(fail|clos)",
    re.IGNORECASE,
)
_GROUP_ERROR = re.compile(r"^torch\.distributed\.|\bgloo/transport/|\bProcessGroup[A-Z]+\b|\bNCCL error\b")
"""Matches the type or message of errors of process groups, wherever they are raised."""
_OURS = ("/harness/worlds/rank.py", "/harness/worlds/debugging.py", "/harness/worlds/server.py")
_OUTPUT_SHOWN = 4000
_MOST_FRAMES = 200  # of a stack that is shown
_LONGEST_DUMP = 1 << 20  # characters


@dataclass(frozen=True)
class End:
    """The end of one rank's part of a run."""

    index: int
    kind: str
    """``returned`` · ``raised`` · ``skipped`` · ``exited`` (by itself, without a result) · ``died`` (by a signal) ·
    ``garbled`` (sent something that is not an answer) · ``lost`` (with the server that it was forked from) ·
    ``stopped`` (by the harness, because it could not or did not finish)."""
    time_ns: int = 0
    report: Mapping[str, Any] | None = None
    """The exception of a rank that raised or skipped; see :func:`harness.worlds.evidence.describe_exception`."""
    exit: Exit | None = None
    standing: str = ""
    """What a stopped rank was doing, or what is wrong with a garbled answer."""
    stack: str = ""
    """Its Python stacks at that moment, or when it crashed."""
    frames: tuple[tuple[str, int, str], ...] = ()
    collectives: tuple[str, ...] = ()
    """Its last collectives, oldest first."""
    reached: tuple[int, int] = (0, 0)
    """How far its function had come, if it says so; see :meth:`harness.worlds.rank.Rank.progress`."""
    output: str = ""
    place: Place = HERE
    """Its host."""

    @property
    def what(self) -> str:
        """What became of it, on one line."""
        if self.kind == "raised" and self.report is not None:
            context = f"{self.report['context']}: " if self.report.get("context") else ""
            if self.report.get("exit_code") is not None or self.report["type"] == "SystemExit":
                return f"{context}called sys.exit({self.report.get('exit_code')!r})"
            message = str(self.report["message"]).strip().split("\n")[0]
            return context + ": ".join(part for part in (self.report["type"], message) if part)
        if self.kind == "skipped" and self.report is not None:
            return f"skipped by itself ({self.report['message']}); decide about a skip before any rank starts"
        if self.kind in ("died", "exited"):
            return f"{self.exit}" + ("" if self.kind == "died" else " before it had a result")
        if self.kind == "garbled":
            return self.standing
        if self.kind == "lost":
            return "ended with the server that it was forked from"
        if self.kind == "stopped":
            return f"stopped by the harness while {self.standing}"
        return self.kind

    @property
    def failed(self) -> bool:
        return self.kind in ("raised", "skipped", "exited", "died", "garbled", "lost")

    @property
    def by_transport(self) -> bool:
        """Whether it failed inside a collective in a way that the end of a peer would explain."""
        if self.kind != "raised" or self.report is None:
            return False
        message = str(self.report["message"])
        # A wait for asynchronous work has no frame in torch.distributed, so the error's text counts as well.
        inside = self.report.get("in_collective") or _GROUP_ERROR.search(f"{self.report.get('type')}: {message}")
        return bool(inside and _TRANSPORT.search(message))


def _shown(end: End) -> End:
    """Return the same end with its texts escaped, so that they can't control a terminal.  File names are kept."""
    report = end.report
    if report is not None:
        texts = ("type", "message", "text", "context")
        report = {key: printable(v) if key in texts and isinstance(v, str) else v for key, v in report.items()}
    return dataclasses.replace(
        end,
        report=report,
        standing=printable(end.standing),
        stack=printable(end.stack),
        collectives=tuple(map(printable, end.collectives)),
        output=printable(end.output),
    )


def first_to_fail(ends: Sequence[End]) -> End | None:
    """Return the rank whose failure caused the others', or None if none failed by itself.

    A rank whose collective broke because a peer was gone comes after every rank that failed for a reason of its own,
    whatever the clock says: a dying process closes its connections before anyone can record its death.  If the server
    was lost, no rank is to blame for broken collectives.
    """
    failed = [e for e in ends if e.failed and e.kind != "lost"]
    own = [e for e in failed if not e.by_transport]
    return min(own or ([] if server_lost(ends) else failed), key=lambda e: (e.time_ns, e.index), default=None)


def not_later(ends: Sequence[End], first: End | None) -> list[End]:
    """Return the ranks that may have been the first to fail, in rank order: several if hosts' clocks can't tell.

    ``first``: what :func:`first_to_fail` returns for these ends.
    """
    if first is None:
        return []
    failed = [e for e in ends if e.failed and e.kind != "lost" and e.by_transport == first.by_transport]
    return [e for e in failed if e is first or _undecided(first, e)]


def _undecided(one: End, other: End) -> bool:
    """Return whether clocks can't tell which of two ranks ended first."""
    error = one.place.error_ns + other.place.error_ns if one.place.name != other.place.name else 0
    return abs(one.time_ns - other.time_ns) < error


def server_lost(ends: Sequence[End]) -> str:
    """Return what became of the server, if ranks ended with it; else empty."""
    return next((e.exit.server for e in ends if e.kind == "lost" and e.exit is not None), "")


def verdict_of(ends: Sequence[End]) -> str:
    """Return ``failed``, ``crashed`` or ``hung``, according to the first rank to fail."""
    first = first_to_fail(ends)
    if first is None:
        return "crashed" if server_lost(ends) else "hung"
    return "crashed" if first.kind in ("died", "exited") else "failed"


def grouped(ends: Sequence[End]) -> list[list[End]]:
    """Group ranks with equal tracebacks, each group in rank order."""
    groups: dict[object, list[End]] = {}
    for end in ends:
        report = end.report or {}
        key = (end.kind, report.get("type"), tuple(map(tuple, report.get("frames", ()))))
        groups.setdefault(key if report else end.index, []).append(end)
    return list(groups.values())


class RanksFailed(Exception):
    """A rank of a world did not do what it was asked.  The text says which, what it did, and what the others did.

    Attributes: ``ends``: an :class:`End` for every rank, in rank order; ``first``: the rank that failed first, or
    None if none failed by itself; ``earliest``: the ranks that may have been the first, as far as clocks of hosts tell;
    ``verdict``: ``failed``, ``crashed`` or ``hung``; ``headline``: one line.
    """

    def __init__(
        self, world: str, function: str, ends: Sequence[End], explanation: Explanation | None = None, reason: str = ""
    ) -> None:
        self.world = printable(world)
        self.function = printable(function)
        self.ends = ends = tuple(map(_shown, ends))
        if explanation is not None:
            explanation = dataclasses.replace(explanation, headline=printable(explanation.headline))
        self.explanation = explanation
        self.reason = printable(reason)
        self.first = first_to_fail(ends)
        self.earliest = tuple(not_later(ends, self.first))
        self.verdict = verdict_of(ends)
        super().__init__(self.headline)

    @property
    def headline(self) -> str:
        if self.first is not None:
            others = [e.index for e in self.ends if e.failed and e is not self.first]
            more = f" (also failed: {', '.join(map(str, others))})" if others else ""
            if self.undecided:
                names = ", ".join(str(end.index) for end in self.earliest)
                why = "the clocks of their hosts do not tell which failed first"
                what = f"rank {self.first.index}: {self.first.what}"
                return f"ranks {names} of {len(self.ends)} failed, and {why}; {what}{more}{self._because}"
            return f"rank {self.first.index} of {len(self.ends)} failed first: {self.first.what}{more}{self._because}"
        if server := server_lost(self.ends):
            return f"no rank is to blame: {server}"
        if self.reason:
            return self.reason
        return f"deadlock: {self.explanation.headline}" if self.explanation else "no rank can go on"

    @property
    def _because(self) -> str:
        """The mismatch that explains why the first rank broke or died inside a collective; empty if there is none."""
        broke = self.first is not None and (self.first.by_transport or self.first.kind == "died")
        return f", and {self.explanation.headline}" if broke and self.explanation and self.explanation.mismatch else ""

    @property
    def undecided(self) -> bool:
        """Whether the clocks of hosts can't tell which rank failed first."""
        return len(self.earliest) > 1

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to look at first."""
        if self.first is not None:
            return tuple(end.index for end in self.earliest)
        return self.explanation.culprits if self.explanation and not server_lost(self.ends) else ()

    @property
    def out_of_memory(self) -> bool:
        """Whether a rank raised because its device has no memory left."""
        return any(end.report is not None and end.report.get("out_of_memory", False) for end in self.ends)

    @property
    def place(self) -> tuple[str, int] | None:
        """File and line where the first rank failed, or where one of the ranks that could not go on was."""
        for end in [self.first] if self.first is not None else self.ends:
            frames = (end.report or {}).get("frames") or end.frames
            frame = user_frame([tuple(f) for f in frames]) or (frames[-1] if frames else None)
            if frame is not None:
                return str(frame[0]), int(frame[1])
        return None

    def __str__(self) -> str:
        return self.render()

    def render(self) -> str:
        """Return the whole report as plain text."""
        lines = [self.summary()]
        for title, text in self.sections():
            lines += ["", _rule(title), *("  " + line for line in text.split("\n"))]
        for end in self.ends:
            if end.output.strip():
                shown = end.output if len(end.output) <= _OUTPUT_SHOWN else "[...]\n" + end.output[-_OUTPUT_SHOWN:]
                lines += ["", _rule(f"output of rank {end.index}"), *("  " + x for x in shown.rstrip().split("\n"))]
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the headline and a line for each rank."""
        lines = [self.headline, f"  in {self.function} on {self.world}"]
        if self.first is not None and self.explanation is not None and not self._because:
            lines.append(f"  {self.explanation.headline}")
        ends = sorted(self.ends, key=lambda e: (e is not self.first, not e.failed, e.index))
        apart = len({end.place.name for end in self.ends}) > 1
        hosts = {end.index: f" on {end.place.name}" if apart else "" for end in ends}
        lines += [f"  rank {end.index}{hosts[end.index]}: {self._role(end)}{end.what}" for end in ends]
        return "\n".join(lines)

    def sections(self) -> list[tuple[str, str]]:
        """Return the evidence as (title, text): tracebacks (equal ones together), stacks, last collectives."""
        sections: list[tuple[str, str]] = []
        for group in grouped([e for e in self.ends if e.report]):
            lines = [str((group[0].report or {}).get("text", "")).rstrip()]
            if len({str((e.report or {}).get("message", "")) for e in group}) > 1:
                lines += ["the same traceback, with other values:", *(f"rank {e.index}: {e.what}" for e in group[1:])]
            sections.append((f"traceback of {_names(group)}", "\n".join(lines)))
        stacks: dict[tuple[str, str], list[End]] = {}
        for end in self.ends:
            if end.stack:
                stacks.setdefault(("crashed" if end.kind == "died" else "stood", end.stack.rstrip()), []).append(end)
        sections += [(f"where {_names(group)} {label}", stack) for (label, stack), group in stacks.items()]
        if any(e.collectives for e in self.ends):
            lines = [f"rank {e.index}: " + "\n        ".join(e.collectives or ("none",)) for e in self.ends]
            sections.append(("last collectives", "\n".join(lines)))
        return sections

    def _role(self, end: End) -> str:
        if end in self.earliest:
            return "PERHAPS THE FIRST TO FAIL: " if self.undecided else "FIRST TO FAIL: "
        if self.first is None and end.index in self.culprits:
            return "ODD ONE OUT: "
        if end.by_transport and self.first is not None:
            return "because of it: "
        return ""


def _rule(title: str) -> str:
    return f"-- {title} " + "-" * max(4, 76 - len(title))


def _names(group: Sequence[End]) -> str:
    indices = ", ".join(str(e.index) for e in group)
    return f"rank {indices}" if len(group) == 1 else f"ranks {indices} (equal)"


def stack_text(frames: Sequence[tuple[str, int, str]], called: str = "") -> str:
    """Format a stack from the user's function inwards, outermost frame first.

    ``called``: the source text of the call that the innermost frame is executing.
    """
    ours = [i for i, f in enumerate(frames) if f[0].endswith(_OURS)]
    shown = list(frames[min(ours[-1] + 1, len(frames) - 1) :] if ours else frames)
    shown = [f for f in shown if not f[0].endswith("/harness/worlds/recorder.py")] or shown
    lines = []
    for file, line, function in both_ends(shown, _MOST_FRAMES):
        lines.append(f"{file}:{line}: in {function}")
        source = source_line(file, line)
        if source:
            lines.append(f"    {source}")
    if called and shown and called not in lines[-1]:
        lines.append(f"    -> {called}")
    return "\n".join(lines)


_DUMPED_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d{1,9}) in (.*)$')


def crash_stack(dump: str) -> str:
    """Format what faulthandler wrote when a process crashed or was asked, like :func:`stack_text`.

    Text that is not understood is returned as it is.
    """
    reason: list[str] = []
    threads: list[tuple[str, list[tuple[str, int, str]]]] = []
    dump = dump[:_LONGEST_DUMP]
    for line in dump.splitlines():
        if line.startswith("Extension modules:"):
            continue
        if _DUMPED_THREAD.match(line):
            threads.append((line.split(" (")[0].strip(), []))
        elif (frame := _DUMPED_FRAME.match(line)) and threads:
            threads[-1][1].append((frame[1], int(frame[2]), frame[3]))
        elif line.strip() and not threads:
            reason.append(line.strip())
    threads = [(name, frames[::-1]) for name, frames in threads]  # faulthandler puts the innermost first
    threads = [(name, frames) for name, frames in threads if frames and not frames[-1][0].endswith("/monitor.py")]
    if not threads:
        return dump
    blocks = [stack_text(frames) if len(threads) == 1 else f"{name}:\n{stack_text(frames)}" for name, frames in threads]
    return "\n".join([*reason, *blocks])


def compare_issued(issued: Mapping[int, Sequence[Issued]]) -> str:
    """Describe the first collective in which ranks differ, by our own record; empty if they agree as far as they got.

    This is for a world in which ranks have died, and their Flight Recorders with them.  ``issued``: by rank, all
    collectives that it issued.
    """
    by_group: dict[str, dict[int, list[Issued]]] = {}
    for rank, calls in issued.items():
        for call in calls:
            if call.op in _POINT_TO_POINT:
                continue
            by_group.setdefault(call.group, {}).setdefault(rank, []).append(call)
    for group, ranks in by_group.items():
        for number, calls in enumerate(zip(*ranks.values(), strict=False), 1):
            kinds: dict[str, list[int]] = {}
            for rank, call in zip(ranks, calls, strict=True):
                kinds.setdefault(f"{call.op}({call.tensors})", []).append(rank)
            if len(kinds) > 1 and not {c.op for c in calls} <= _MAY_DIFFER:
                sides = ", ".join(
                    f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} issued {call} "
                    f"at {short_path(ranks[who[0]][number - 1].where)}"
                    for call, who in kinds.items()
                )
                label = "the default group" if group == "0" else f"group {group!r}"
                return f"collective {number} of {label} differs: {sides}"
    return ""


_POINT_TO_POINT = {"send", "recv", "recv(any source)"}
_MAY_DIFFER = {"scatter", "gather", "all_to_all", "all_to_all_single", "all_gather"}


def describe_collectives(records: Sequence[Record] | None, issued: Sequence[Issued], most: int = 6) -> tuple[str, ...]:
    """Describe the last collectives, from the Flight Recorder if there is one, with the source line if we recorded it.

    ``records``: of the Flight Recorder; ``issued``: of our own record.
    """
    if not records:
        return tuple(f"{i.op}({i.tensors}) on group {i.group} at {short_path(i.where)}" for i in issued[-most:])
    lines = []
    where = _places(records, issued)
    for i, record in enumerate(records[-most:], len(records) - len(records[-most:])):
        state = "ended" if record.done else "NOT DONE"
        number = f"{'p2p ' if record.p2p else ''}#{record.seq}"
        place = f" at {short_path(where[i])}" if i in where else ""
        lines.append(f"{record} {number} on group {record.group}: {state}{place}")
    return tuple(lines)


def _places(records: Sequence[Record], issued: Sequence[Issued]) -> dict[int, str]:
    """Return, by the index of a record, the source line that issued it.

    It belongs to the call that has this record as the first one of its operation and group after the call.
    """
    places: dict[int, str] = {}
    for call in issued:
        for i, record in enumerate(records):
            if record.time_ns >= call.time_ns and record.group == call.group and _same_op(call.op, record.op):
                places.setdefault(i, call.where)
                break
    return places


def _same_op(ours: str, theirs: str) -> bool:
    a, b = (re.sub(r"[^a-z]", "", name.lower()) for name in (ours, theirs))
    return a.startswith(b) or b.startswith(a) or a.replace("intotensor", "base") == b
