"""The proof of a deadlock: a pure decision from what is known about each rank.

A world is deadlocked when no rank can ever move again by itself: each rank has ended (returned, raised, died), or is
blocked inside a collective and nothing can wake it.  A rank counts as blocked if all of this is true:

- Its main thread is in the middle of issuing a collective or in an operator of torch.distributed (compiled code calls
  these from generated files), or its innermost Python frame is in torch.distributed, or (with a collective outstanding)
  in the autograd engine or in a call that waits, or, on an accelerator, in any operator that compiled code calls.
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

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.worlds.places import DISTRIBUTED, OPERATORS, TORCH, WORLDS, in_torch, in_worlds, is_generated, short_path
from harness.worlds.views import Record, View

FIRST_LOOK = 0.25
"""Seconds from the start of a run to the first look, and between looks."""
SETTLE = 0.75
"""Seconds for which nothing may change before a deadlock is believed."""
SETTLE_AFTER_FAILURE = 0.2
"""The same after a rank has raised or died: the run has failed anyway, and only the others' chance to finish is at
stake."""
SETTLE_ON_DEVICE = 3.0
"""Seconds for which nothing may change before a deadlock is believed that only :func:`closed` proves."""
SETTLE_IN_OPERATOR = 10.0
"""The same if a rank is :func:`in_operator`, which may be slow."""

_WAITING_PATHS = (DISTRIBUTED, os.path.join(TORCH, "nn", "parallel", "distributed.py"))
_ENGINE = os.path.join(TORCH, "autograd", "graph.py")
_RECORDER = os.path.join(WORLDS, "recorder.py")
_TRANSPARENT = (*OPERATORS, os.path.join(TORCH, "utils", "_contextlib.py"), _RECORDER)
_COMMUNICATING = ("c10d.", "c10d_functional.", "_c10d_functional.", "_c10d_functional_autograd.")
"""Namespaces of the operators that issue collectives or wait for them."""
# A plain wait counts only without arguments, because an argument may be a time limit.  The second line has the calls of
# torch that wait for an accelerator.
_WAITING_CALL = re.compile(
    r"\b(wait\s*\(\s*\)|(wait_tensor|wait_all|barrier)\s*(\.default\s*)?\("
    r"|(\w*synchronize\w*|item|tolist|cpu|numpy|equal|allclose)\s*(\.default\s*)?\()"
)
_SHAPE_MATTERS = {"all_reduce", "broadcast", "reduce", "all_gather", "allgather", "_allgather_base", "reduce_scatter"}

ENDED = ("returned", "raised", "skipped", "died")


def in_collective(view: View) -> bool:
    """Return whether the main thread is inside a call that issues or waits for a collective."""
    if view.issuing:  # whatever Python code of a backend it is in
        return True
    if view.operator.startswith(_COMMUNICATING):  # whatever compiled code has called it
        return True
    frames = list(view.frames)
    while frames and frames[-1][0].startswith(_TRANSPARENT):
        frames.pop()
    if not frames:
        return False
    file = frames[-1][0]
    if file.startswith(_WAITING_PATHS):
        return True
    pending = bool(view.outstanding)
    if file == _ENGINE:
        return pending
    return pending and bool(_WAITING_CALL.search(view.called))


def in_operator(view: View) -> bool:
    """Return whether a rank of an accelerator is in an operator that may wait for a collective of its device.

    The code of a kernel is loaded when the kernel is first launched, which can take until the device has finished what
    it runs: seen on an H100, where compiled code multiplied the result of an all-reduce that never ended.
    """
    return view.on_device and bool(view.operator) and bool(view.outstanding)


def blocked(view: View, run_timeout: float) -> bool:
    """Return whether this rank waits in a collective and nothing of its own can end the wait before the run times out.

    A stopped rank counts as blocked.  ``run_timeout``: seconds.
    """
    if view.stopped:
        return True
    if not (view.answered and view.quiet and (in_collective(view) or in_operator(view))) or view.alarm:
        return False
    own = [view.timeout] if view.timeout else []
    own += [r.timeout for r in view.outstanding if r.timeout]
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
    changed for :data:`SETTLE_ON_DEVICE`, or for :data:`SETTLE_IN_OPERATOR`.

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
        if not (view.complete and view.outstanding) or any(r.p2p for r in view.outstanding):
            return False
        for record in view.outstanding:
            if not any(_lacks(by_index.get(m), record) for m in members.get(record.group, ())):
                return False
    return True


def _lacks(view: View | None, record: Record) -> bool:
    """Return whether a member of the group is known not to have issued a collective."""
    if view is None or not view.records or not view.complete:
        return False
    if view.issuing and view.issuing.group == record.group:
        return False  # it may be this one
    return all(r.seq < record.seq for r in view.records if r.group == record.group and not r.p2p)


def settling(views: Sequence[View]) -> float:
    """Return for how many seconds nothing may have changed before what :func:`closed` proves is believed."""
    slow = any(in_operator(v) and not in_collective(v) for v in views if v.state not in ENDED)
    return SETTLE_IN_OPERATOR if slow else SETTLE_ON_DEVICE


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
    issued = {v.index: {r.seq: r for r in v.known if r.group == group and not r.p2p} for v in known}
    pending = sorted({r.seq for records in issued.values() for r in records.values() if not r.done})
    label = "the default group" if group == "0" else f"group {group!r} {list(members)}"
    for seq in pending:
        have = {i: records[seq] for i, records in issued.items() if seq in records}
        kinds: dict[object, list[int]] = {}
        for i, record in have.items():
            if record is not by_index[i].issuing:  # recorders have their own words
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
    if in_collective(view) and view.outstanding:
        names = ", ".join(str(r) for r in view.outstanding[:3])
        return f"in {names}{location(view)}"
    inner = view.operator or (view.frames[-1][2] if view.frames else "?")
    return f"in {inner}{location(view)}"


def location(view: View) -> str:
    """Return `` at file:line`` of the user's innermost frame; empty if there is none."""
    frame = user_frame(view.frames)
    return f" at {short_path(frame[0])}:{frame[1]}" if frame else ""


def user_frame(frames: Sequence[tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """Return the innermost frame outside torch, generated code and the harness's own rank loop, or None.

    Below the recorder's own frame is the code of a backend.
    """
    issued = [i for i, frame in enumerate(frames) if frame[0] == _RECORDER][:1]
    for frame in reversed(frames[: issued[0]] if issued else frames):
        if not (in_torch(frame[0]) or in_worlds(frame[0]) or is_generated(frame[0])):
            return frame
    return None
