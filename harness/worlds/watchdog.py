"""The proof of a deadlock: a pure decision from what is known about each rank.

A world is deadlocked when no rank can ever move again by itself: each rank has ended (returned, raised, died), or is
blocked inside a collective and nothing can wake it.  A rank counts as blocked if all of this is true:

- The innermost Python frame of its main thread is in torch.distributed, or (with a collective outstanding) in the
  autograd engine or in a call that waits.
- The kernel shows its main thread as sleeping, and the whole process used almost no CPU between two looks.
- It does not wait for a child or on a timer, and none of its other Python threads could act later (nor sleeps on a
  timer).
- What it waits in has no timeout that ends before the run's.

A rank that a signal has stopped counts as blocked, too.  A rank that computes, sleeps, or does anything else is
*slow*, and while one rank is slow, nothing is proven.  The controller looks twice before it believes in a deadlock
(:data:`SETTLE`), because data may still be on its way.

Which rank is to blame is a different question: :func:`explain` compares what each rank has issued on each group.
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
"""Seconds from the start of a run to the first look, and between looks."""
SETTLE = 0.75
"""Seconds for which nothing may change before a deadlock is believed."""
SETTLE_AFTER_FAILURE = 0.2
"""The same after a rank has raised or died: the run has failed anyway, and only the others' chance to finish is at
stake."""
SETTLE_ON_DEVICE = 3.0
"""Seconds for which nothing may change before a deadlock is believed that only :func:`closed` proves."""
STOPPED_FOR = 1.5
"""Seconds after which a stopped rank (SIGSTOP) is assumed not to come back."""

MOST_THREADS, MOST_RECORDS, MOST_RECORDERS, MOST_GROUPS = 1000, 400, 4, 2000
"""The most that a rank's monitor reports (records: from each recorder).  An answer with more than that is not from a
monitor, and comparing it would take forever."""

_WAITING_PATHS = (DISTRIBUTED, os.path.join(TORCH, "nn", "parallel", "distributed.py"))
_ENGINE = os.path.join(TORCH, "autograd", "graph.py")
_TRANSPARENT = {
    os.path.join(TORCH, "_ops.py"),
    os.path.join(TORCH, "utils", "_contextlib.py"),
    os.path.join(WORLDS, "recorder.py"),
}
# A plain wait counts only without arguments, because an argument may be a time limit.  The second line has the calls of
# torch that wait for an accelerator.
_WAITING_CALL = re.compile(
    r"\b(wait\s*\(\s*\)|(wait_tensor|wait_all|barrier)\s*(\.default\s*)?\("
    r"|(\w*synchronize\w*|item|tolist|cpu|numpy|equal|allclose)\s*(\.default\s*)?\()"
)
_SHAPE_MATTERS = {"all_reduce", "broadcast", "reduce", "all_gather", "allgather", "_allgather_base", "reduce_scatter"}

ENDED = ("returned", "raised", "skipped", "died")


@dataclass(frozen=True)
class Record:
    """One collective, as the Flight Recorder recorded it."""

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    done: bool = False
    p2p: bool = False
    timeout: float = 0.0
    """In seconds; 0 if unknown."""
    time_ns: int = 0
    """When it was issued, on the monotonic clock."""

    @property
    def tensors(self) -> str:
        """``float32[4]`` for the first tensor, with the number of tensors if there are more; empty without tensors."""
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
    """The facts that are known about one rank at one moment."""

    index: int
    state: str
    """``running``, or how it ended: ``returned``, ``raised``, ``skipped``, ``died``."""
    answered: bool = True
    """Whether the monitor thread answered; if not, frames and records are unknown."""
    quiet: bool = False
    """Whether its main thread slept and it used almost no CPU since the last look."""
    stopped: bool = False
    """Whether a signal has stopped it, for at least :data:`STOPPED_FOR` seconds."""
    frames: tuple[tuple[str, int, str], ...] = ()
    """(file, line, function) of the main thread, outermost first."""
    called: str = ""
    """Source text of the call that the innermost frame is executing."""
    timeout: float | None = None
    """The timeout in seconds that a frame of torch.distributed was given, if there is one."""
    alarm: str = ""
    """The name of a thread that may act later by itself; empty if there is none."""
    records: tuple[Record, ...] | None = None
    """Entries of the Flight Recorder, oldest first; None if there is no recorder."""
    complete: bool = False
    """Whether ``records`` has everything that it has issued since the run began, as far as the recorder can tell."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and global ranks of the process groups that it is a member of."""


def in_collective(view: View) -> bool:
    """Return whether the main thread is inside a call that issues or waits for a collective."""
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
    """Return whether this rank waits in a collective and nothing of its own can end the wait before the run times out.

    A stopped rank counts as blocked.  ``run_timeout``: seconds.
    """
    if view.stopped:
        return True
    if not (view.answered and view.quiet and in_collective(view)) or view.alarm:
        return False
    own = [view.timeout] if view.timeout else []
    own += [r.timeout for r in view.records or () if not r.done and r.timeout]
    return not any(t < run_timeout for t in own)


def deadlocked(views: Sequence[View], run_timeout: float) -> bool:
    """Return whether no rank can move: each has ended or is blocked, and at least one has not ended."""
    alive = [v for v in views if v.state not in ENDED]
    return bool(alive) and all(blocked(v, run_timeout) for v in alive)


def closed(views: Sequence[View], run_timeout: float) -> bool:
    """Return whether the records show that no collective of any live rank can complete.

    This is a proof of a deadlock on accelerators, where the kernel's view of a rank is not enough.  All of this must
    hold:

    - The ranks are :func:`deadlocked`, and each live one has a collective outstanding.
    - Each outstanding collective lacks a member of its group: a live or ended rank whose newest record for the group is
      older.

    A member issues what it lacks only after one of its own outstanding collectives has completed, and each of those
    lacks a member, too.  So none can be the first to complete, whatever the devices still do.  (A collective that can
    complete on its source without the others has done so by now.)

    Two things can't be excluded.  A rank may wait for other work of its device (a long kernel) and issue the missing
    collective afterwards, or a thread of a library that Python does not know may issue it.  Therefore nothing may have
    changed for :data:`SETTLE_ON_DEVICE`.

    Nothing is proven if records are unknown or were dropped, if the members of a group are unknown, or if a
    point-to-point operation is outstanding, because the records of the two sides of one can't be matched.
    ``run_timeout``: seconds.
    """
    if not deadlocked(views, run_timeout):
        return False
    by_index = {v.index: v for v in views}
    for view in views:
        if view.state in ENDED:
            continue
        members = dict(view.groups)
        outstanding = [r for r in view.records or () if not r.done]
        if not (view.complete and outstanding) or any(r.p2p for r in outstanding):
            return False
        for record in outstanding:
            if not any(_lacks(by_index.get(m), record) for m in members.get(record.group, ())):
                return False
    return True


def _lacks(view: View | None, record: Record) -> bool:
    """Return whether a member of the group is known not to have issued a collective."""
    if view is None or not view.records or not view.complete:
        return False
    return all(r.seq < record.seq for r in view.records if r.group == record.group and not r.p2p)


def progress(views: Sequence[View]) -> object:
    """Return a value that differs between two looks if any rank made progress."""
    return [(v.state, v.frames, v.stopped, _count(v.records or ())) for v in views]


def _count(records: Sequence[Record]) -> object:
    # The recorder drops old records, so their number alone may stay the same.
    newest = {(r.group, r.p2p): r.seq for r in records}
    return len(records), sum(r.done for r in records), newest


@dataclass(frozen=True)
class Explanation:
    """An explanation of which rank waits for which."""

    headline: str
    culprits: tuple[int, ...] = ()
    """Ranks that did not do what the others did; empty if unknown."""
    certain: bool = False
    """Whether the records of collectives prove it, so that data on its way cannot change it."""
    mismatch: bool = False
    """Whether ranks issued different collectives, as opposed to a rank that issued none."""


def explain(views: Sequence[View]) -> Explanation:
    """Explain a deadlock from what each rank has issued on each group, or else from where each rank is."""
    explanation = _explain_groups(views)
    if explanation is not None:
        return explanation
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
    """Explain which ranks hold up the others when the time is over and nothing is proven; None if none does."""
    explanation = _explain_groups(views)
    if explanation is not None:
        return explanation
    waiting = [v for v in views if v.state not in ENDED and in_collective(v)]
    others = [v for v in views if v not in waiting]
    others = [v for v in others if v.state not in ENDED] or others
    if not waiting or not others:
        return None
    who = "; ".join(f"rank {v.index} waits {standing(v)}" for v in waiting)
    for_whom = ", ".join(f"rank {v.index} {_absence(v)}" for v in others)
    return Explanation(f"{who}; {for_whom}", tuple(v.index for v in others))


def _explain_groups(views: Sequence[View]) -> Explanation | None:
    """Explain the first collective of any group that can't complete; None if there is none."""
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
    """Explain the first collective of a group that can't complete; adds a sort key (mismatches before absences)."""
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
            issuers = ", ".join(f"{_ranks(side)} {_has(side)} {have[side[0]]}" for side in sides)
            odd = tuple(i for side in sides[1:] for i in side) if len(sides[0]) > len(sides[1]) else ()
            return (0, seq), Explanation(f"collective {seq} of {label} differs: {issuers}", odd, True, mismatch=True)
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
    """Return ``has returned`` and the like."""
    return f"has {view.state}" if view.state in ENDED else view.state


def standing(view: View) -> str:
    """Describe where a live rank is: ``in all_reduce(float32[4]) at file:12``."""
    pending = [r for r in view.records or () if not r.done]
    if in_collective(view) and pending:
        names = ", ".join(str(r) for r in pending[:3])
        return f"in {names}{location(view)}"
    inner = view.frames[-1][2] if view.frames else "?"
    return f"in {inner}{location(view)}"


def location(view: View) -> str:
    """Return `` at file:line`` of the user's innermost frame; empty if there is none."""
    frame = user_frame(view.frames)
    return f" at {short_path(frame[0])}:{frame[1]}" if frame else ""


def user_frame(frames: Sequence[tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """Return the innermost frame outside torch and outside the harness's own rank loop, or None."""
    for frame in reversed(frames):
        if not in_torch(frame[0]) and not in_worlds(frame[0]) and frame[0] != "<string>":
            return frame
    return None


def view_of(
    index: int, snapshot: Mapping[str, object] | None, *, quiet: bool, stopped: bool, alarm_of: Mapping[int, bool]
) -> View:
    """Build a live rank's view from its monitor's answer.

    ``alarm_of``: by the kernel's id of a thread, whether it may wake up by itself.  Missing threads may, except the
    main thread.
    """
    unknown = View(index, "running", answered=False, quiet=quiet, stopped=stopped)
    if not isinstance(snapshot, Mapping):
        return unknown
    try:
        known = _read_snapshot(snapshot, alarm_of)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return unknown  # this is not a monitor's answer
    return dataclasses.replace(known, index=index, quiet=quiet, stopped=stopped)


def _read_snapshot(snapshot: Mapping[str, Any], alarm_of: Mapping[int, bool]) -> View:
    frames: tuple[tuple[str, int, str], ...] = ()
    called, timeout, alarm = "", None, ""
    told = (snapshot["threads"], snapshot.get("records") or (), snapshot.get("groups") or ())
    limits = (MOST_THREADS, MOST_RECORDERS * MOST_RECORDS, MOST_GROUPS)
    if any(len(each) > most for each, most in zip(told, limits, strict=True)):
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
    complete = snapshot.get("complete") is True
    groups = tuple((str(k), tuple(map(int, v))) for k, v in (snapshot.get("groups") or {}).items())
    return View(0, "running", True, False, False, frames, called, timeout, alarm, records, complete, groups)


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
