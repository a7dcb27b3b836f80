"""Proving a deadlock: a pure decision over what is known of each rank.

A world is deadlocked when no rank can ever move again by itself: each one has ended (returned, raised, died), or is
blocked inside a collective with nothing left that could wake it.  What is needed for a rank to count as blocked:

- its main thread's innermost Python frame is in torch.distributed, in the autograd engine, or in a call that waits;
- its main thread sleeps, in the kernel's eyes, and the whole process has used no CPU between two looks;
- it does not wait for a child or on a timer, and none of its other Python threads could act later (nor sleeps on one);
- what it waits in has no timeout of its own that ends before the run's.

A rank that computes, sleeps, or does anything else is *slow*, and while one rank is slow nothing is proven.  The
controller looks twice before it believes (:data:`SETTLE`), because data may still be on its way.

Who is to blame is a different question: :func:`explain` compares what each rank has issued on each group.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.worlds.places import DISTRIBUTED, TORCH, WORLDS, in_torch, in_worlds, short_path

FIRST_LOOK = 0.25
"""Seconds after the start of a run, and between looks."""
SETTLE = 0.75
"""Seconds for which everything must stand still before a deadlock is believed."""
SETTLE_AFTER_FAILURE = 0.2
"""The same once a rank has raised or died: the run has failed anyway, only the others' chance to finish is at stake."""
STOPPED_FOR = 1.5
"""Seconds after which a rank that someone has stopped (SIGSTOP) counts as one that will not come back."""

MOST_THREADS, MOST_RECORDS, MOST_GROUPS = 1000, 400, 2000
"""How much a rank's monitor tells at most (records: of each of two recorders).  Whoever tells more is none, and to
compare it would take for ever."""

_WAITING_PATHS = (DISTRIBUTED, os.path.join(TORCH, "nn", "parallel", "distributed.py"))
_ENGINE = os.path.join(TORCH, "autograd", "graph.py")
_TRANSPARENT = {
    os.path.join(TORCH, "_ops.py"),
    os.path.join(TORCH, "utils", "_contextlib.py"),
    os.path.join(WORLDS, "recorder.py"),
}
# An argument of a plain wait() may be a time limit.
_WAITING_CALL = re.compile(r"\b(wait\s*\(\s*\)|(wait_tensor|wait_all|synchronize|barrier)\s*(\.default\s*)?\()")
_SHAPE_MATTERS = {"all_reduce", "broadcast", "reduce", "all_gather", "allgather", "_allgather_base", "reduce_scatter"}

ENDED = ("returned", "raised", "skipped", "died")


@dataclass(frozen=True)
class Record:
    """One collective as the Flight Recorder has it."""

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    done: bool = False
    p2p: bool = False
    timeout: float = 0.0
    """Seconds; 0 where unknown."""
    time_ns: int = 0
    """Monotonic clock, when it was issued."""

    @property
    def tensors(self) -> str:
        """``Float[4]``, or nothing for a collective without tensors."""
        if not self.sizes:
            return ""
        dtype = _DTYPES.get(self.dtypes[0], self.dtypes[0].lower()) if self.dtypes else ""
        more = f" x{len(self.sizes)}" if len(self.sizes) > 1 else ""
        return f"{dtype}{list(self.sizes[0])}{more}"

    def __str__(self) -> str:
        return f"{self.op}({self.tensors})"


_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


@dataclass(frozen=True)
class View:
    """What is known of one rank at one moment."""

    index: int
    state: str
    """``running``, or how it ended: ``returned``, ``raised``, ``skipped``, ``died``."""
    answered: bool = True
    """Whether the monitor thread answered; if not, frames and records are unknown."""
    quiet: bool = False
    """Whether its main thread slept and it used no CPU since the last look."""
    stopped: bool = False
    """Whether the kernel has it as stopped by a signal."""
    frames: tuple[tuple[str, int, str], ...] = ()
    """(file, line, function) of the main thread, outermost first."""
    called: str = ""
    """Source text of the call that the innermost frame is in."""
    timeout: float | None = None
    """Seconds that torch.distributed was told to wait at most, if a frame says so."""
    alarm: str = ""
    """A thread that may act later by itself; empty if none may."""
    records: tuple[Record, ...] | None = None
    """Of the Flight Recorder, oldest first; None where there is none."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and global ranks of the groups that it is a member of."""


def in_collective(view: View) -> bool:
    """Whether the main thread is inside a call that issues or waits for a collective."""
    frames = list(view.frames)
    while frames and frames[-1][0] in _TRANSPARENT:
        frames.pop()
    if not frames:
        return False
    file = frames[-1][0]
    if file.startswith(_WAITING_PATHS):
        return True
    pending = any(not r.done for r in view.records or ())
    if file == _ENGINE:
        return pending
    return pending and bool(_WAITING_CALL.search(view.called))


def blocked(view: View, run_timeout: float) -> bool:
    """Whether this rank waits in a collective and nothing of its own can end the wait before the run's time is over."""
    if view.stopped:
        return True
    if not (view.answered and view.quiet and in_collective(view)) or view.alarm:
        return False
    own = [view.timeout] if view.timeout else []
    own += [r.timeout for r in view.records or () if not r.done and r.timeout]
    return not any(t < run_timeout for t in own)


def deadlocked(views: Sequence[View], run_timeout: float) -> bool:
    """Whether no rank can move: each has ended or is blocked, and at least one has not ended."""
    alive = [v for v in views if v.state not in ENDED]
    return bool(alive) and all(blocked(v, run_timeout) for v in alive)


def progress(views: Sequence[View]) -> object:
    """Something that differs between two looks whenever a rank got anywhere."""
    return [(v.state, v.frames, v.stopped, _count(v.records or ())) for v in views]


def _count(records: Sequence[Record]) -> object:
    # The recorder forgets old records: their number alone would stand still.
    newest = {(r.group, r.p2p): r.seq for r in records}
    return len(records), sum(r.done for r in records), newest


@dataclass(frozen=True)
class Explanation:
    """Who waits for whom."""

    headline: str
    culprits: tuple[int, ...] = ()
    """Ranks that did not do what the others did; empty when it can't be told."""
    certain: bool = False
    """Whether the records of collectives show it: no data that is on its way can change it."""
    mismatch: bool = False
    """Whether ranks issued different collectives, and not just one rank none."""


def explain(views: Sequence[View]) -> Explanation:
    """Name the mismatch behind a deadlock, from what each rank has issued on each group."""
    found = _explain_groups(views)
    if found is not None:
        return found
    stopped = [v.index for v in views if v.stopped]
    if stopped:
        return Explanation(f"{_ranks(stopped)} stopped by a signal, the others wait", tuple(stopped))
    ended = [v for v in views if v.state in ENDED]
    waiting = [v for v in views if v.state not in ENDED]
    who = "; ".join(f"rank {v.index} waits {standing(v)}" for v in waiting)
    if ended:
        how = "; ".join(f"rank {v.index} {has_ended(v)}" for v in ended)
        return Explanation(f"{who}; {how}", tuple(v.index for v in ended))
    return Explanation(who)


def suspect(views: Sequence[View]) -> Explanation | None:
    """Who holds up the others where nothing is proven, because the time is over before; None if nobody does."""
    found = _explain_groups(views)
    if found is not None:
        return found
    waiting = [v for v in views if v.state not in ENDED and in_collective(v)]
    others = [v for v in views if v not in waiting]
    others = [v for v in others if v.state not in ENDED] or others
    if not waiting or not others:
        return None
    who = "; ".join(f"rank {v.index} waits {standing(v)}" for v in waiting)
    for_whom = ", ".join(f"rank {v.index} {_absence(v)}" for v in others)
    return Explanation(f"{who}; {for_whom}", tuple(v.index for v in others))


def _explain_groups(views: Sequence[View]) -> Explanation | None:
    """The first collective of any group that can't complete."""
    findings = [f for f in (_explain_group(views, *group) for group in _groups(views)) if f is not None]
    return min(findings, key=lambda f: f[0])[1] if findings else None


def _groups(views: Sequence[View]) -> Iterable[tuple[str, tuple[int, ...]]]:
    everyone = tuple(v.index for v in views)
    named: dict[str, tuple[int, ...]] = {}
    for view in views:
        for name, ranks in view.groups:
            if len(ranks) > len(named.get(name, ())):
                named[name] = ranks
        for record in view.records or ():
            named.setdefault(record.group, everyone)
    return named.items()


def _explain_group(
    views: Sequence[View], group: str, members: tuple[int, ...]
) -> tuple[tuple[int, int], Explanation] | None:
    """The first collective of a group that can't complete, with a sort key (mismatches before absences)."""
    by_index = {v.index: v for v in views}
    known = [by_index[m] for m in members if m in by_index and by_index[m].records is not None]
    issued = {v.index: {r.seq: r for r in v.records or () if r.group == group and not r.p2p} for v in known}
    pending = sorted({r.seq for records in issued.values() for r in records.values() if not r.done})
    label = "the default group" if group == "0" else f"group {group!r} {list(members)}"
    for seq in pending:
        have = {i: records[seq] for i, records in issued.items() if seq in records}
        kinds: dict[object, list[int]] = {}
        for i, record in have.items():
            kinds.setdefault(_signature(record), []).append(i)
        if len(kinds) > 1:
            sides = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
            what = ", ".join(f"{_ranks(side)} {_has(side)} {have[side[0]]}" for side in sides)
            odd = tuple(i for side in sides[1:] for i in side) if len(sides[0]) > len(sides[1]) else ()
            return (0, seq), Explanation(f"collective {seq} of {label} differs: {what}", odd, True, mismatch=True)
        missing = [i for i in members if i not in have and i in by_index]
        if missing and have:
            waiting = [i for i, r in have.items() if not r.done]
            record = have[waiting[0]]
            where = location(by_index[waiting[0]])
            absent = ", ".join(f"rank {i}, which {_absence(by_index[i])}" for i in missing)
            text = f"{_ranks(waiting)} {_waits(waiting)} in {record}, collective {seq} of {label}{where}, for {absent}"
            return (1, seq), Explanation(text, tuple(missing), all(by_index[i].state in ENDED for i in missing))
    return None


def _signature(record: Record) -> object:
    if record.op in _SHAPE_MATTERS or record.op.removeprefix("_") in _SHAPE_MATTERS:
        return record.op, record.sizes, record.dtypes
    return record.op


def _ranks(indices: Sequence[int]) -> str:
    return f"rank {indices[0]}" if len(indices) == 1 else f"ranks {', '.join(map(str, indices))}"


def _waits(indices: Sequence[int]) -> str:
    return "waits" if len(indices) == 1 else "wait"


def _has(indices: Sequence[int]) -> str:
    return "has" if len(indices) == 1 else "have"


def _absence(view: View) -> str:
    if view.state in ENDED:
        return has_ended(view)
    if view.stopped:
        return "has been stopped by a signal"
    if in_collective(view):
        return f"waits {standing(view)}"
    return f"is {standing(view)}" if view.frames else "does not answer"


def has_ended(view: View) -> str:
    """``has returned``, and the like."""
    return f"has {view.state}" if view.state in ENDED else view.state


def standing(view: View) -> str:
    """Where a live rank stands: ``in all_reduce(float32[4]) at file:12``."""
    pending = [r for r in view.records or () if not r.done]
    if in_collective(view) and pending:
        names = ", ".join(str(r) for r in pending[:3])
        return f"in {names}{location(view)}"
    inner = view.frames[-1][2] if view.frames else "?"
    return f"in {inner}{location(view)}"


def location(view: View) -> str:
    """`` at file:line`` of the innermost frame that is the user's, or nothing."""
    frame = user_frame(view.frames)
    return f" at {short_path(frame[0])}:{frame[1]}" if frame else ""


def user_frame(frames: Sequence[tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """The innermost frame outside torch and outside the harness's own rank loop."""
    for frame in reversed(frames):
        if not in_torch(frame[0]) and not in_worlds(frame[0]) and frame[0] != "<string>":
            return frame
    return None


def view_of(
    index: int, snapshot: Mapping[str, object] | None, *, quiet: bool, stopped: bool, alarm_of: Mapping[int, bool]
) -> View:
    """A live rank's view, from its monitor's answer.

    ``alarm_of`` says of a thread (by kernel id) whether it may wake up by itself; one that it lacks may, but for the
    main one.
    """
    unknown = View(index, "running", answered=False, quiet=quiet, stopped=stopped)
    if not isinstance(snapshot, Mapping):
        return unknown
    try:
        known = _read_snapshot(snapshot, alarm_of)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return unknown  # it is not what a monitor says
    return dataclasses.replace(known, index=index, quiet=quiet, stopped=stopped)


def _read_snapshot(snapshot: Mapping[str, Any], alarm_of: Mapping[int, bool]) -> View:
    frames: tuple[tuple[str, int, str], ...] = ()
    called, timeout, alarm = "", None, ""
    told = (snapshot["threads"], snapshot.get("records") or (), snapshot.get("groups") or ())
    if any(len(each) > most for each, most in zip(told, (MOST_THREADS, 2 * MOST_RECORDS, MOST_GROUPS), strict=True)):
        raise ValueError("more than a monitor tells")
    for thread in snapshot["threads"]:
        own = tuple((str(file), int(line), str(function)) for file, line, function in thread["frames"])
        if thread["main"]:
            frames, called = own, str(thread["called"])
            timeout = None if thread["timeout"] is None else float(thread["timeout"])
            if alarm_of.get(thread["native"], False):
                alarm = "the main thread"
        elif alarm_of.get(thread["native"], True):
            alarm = str(thread["name"]) or "a thread without a name"
    raw = snapshot.get("records")
    records = None if raw is None else tuple(_read_record(r) for r in raw)
    groups = tuple((str(k), tuple(map(int, v))) for k, v in (snapshot.get("groups") or {}).items())
    return View(0, "running", True, False, False, frames, called, timeout, alarm, records, groups)


def _read_record(raw: Mapping[str, Any]) -> Record:
    return Record(
        str(raw["group"]),
        int(raw["seq"] or 0),
        str(raw["op"]),
        tuple(tuple(map(int, size)) for size in raw["sizes"]),
        tuple(map(str, raw["dtypes"])),
        bool(raw["done"]),
        bool(raw["p2p"]),
        float(raw["timeout_s"]),
        int(raw["time_ns"]),
    )
