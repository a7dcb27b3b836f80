"""Messages about a wait: who waits for how many devices, and who holds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from harness.leases.holding import Wait
from harness.leases.records import Holder, Waiter

SOON = 2.0
"""Seconds of waiting after which the user is told who holds the devices."""
AGAIN = 30.0
"""Seconds between two messages about the same wait, at least."""

_MOST_SESSIONS = 3
_OTHERS_OF_OURS = "this session's other tests"
_UNKNOWN = "a process that does not say who it is"


class Teller:
    """Tells a user about a wait after :data:`SOON` seconds, and again every :data:`AGAIN` seconds.

    show: shows a line to the user.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._next = SOON

    def __call__(self, wait: Wait) -> None:
        if wait.seconds >= self._next:
            self._next = wait.seconds + AGAIN
            self._show(sentence([wait.waiter], wait.holders(), time.time()))


def sentence(waiters: Sequence[Waiter], holders: Sequence[Holder | None], now: float) -> str:
    """Describe on one line who waits for how many devices, and who holds them.

    waiters: those of one session, at least one.  holders: those of devices of that kind.  now: seconds since the epoch.
    """
    first = min(waiters, key=lambda waiter: waiter.holder.since)
    what = first.holder.what or first.holder.program
    more = f" and {len(waiters) - 1} more" if len(waiters) > 1 else ""
    waited = max(0.0, now - first.holder.since)
    return printable(
        f"concord: waiting for {_amount(first)}, {waited:.0f} s so far ({what}{more}); "
        f"held by {'; '.join(_by_session(holders, first.holder.session, now)) or 'nobody for long'}"
    )


def names(holders: Iterable[Holder | None], ours: str) -> list[str]:
    """Name the sessions that hold devices, each once, the user's own last.  ours: the user's own session."""
    holders = list(holders)
    others = [f"{h.program} in {h.folder}" for h in holders if h is not None and h.session != ours]
    unknown = [_UNKNOWN] if None in holders else []
    own = [_OTHERS_OF_OURS] if any(h is not None and h.session == ours for h in holders) else []
    return [printable(name) for name in dict.fromkeys([*others, *unknown, *own])]


def printable(text: str) -> str:
    """Make a text fit for a line of a terminal: names of tests and folders may contain anything."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _amount(waiter: Waiter) -> str:
    what = "slots" if waiter.kind == "cpu" else f"{waiter.kind} devices"
    return f"{waiter.count} of {len(waiter.keys)} {what}"


def _by_session(holders: Sequence[Holder | None], ours: str, now: float) -> list[str]:
    sessions: dict[str, list[Holder]] = {}
    for holder in holders:
        if holder is not None:
            sessions.setdefault(holder.session, []).append(holder)
    told = []
    for session, theirs in sorted(sessions.items(), key=lambda item: (item[0] == ours, -len(item[1]))):
        oldest = min(theirs, key=lambda holder: holder.since)
        what = f", {oldest.what}" if oldest.what else ""
        held = f"{len(theirs)} for {max(0.0, now - oldest.since):.0f} s"
        if session == ours:
            told.append(f"{_OTHERS_OF_OURS} ({held}{what})")
        else:
            told.append(f"{oldest.program} in {oldest.folder} (pid {oldest.process.pid}: {held}{what})")
    unknown = len(holders) - sum(map(len, sessions.values()))
    if unknown:
        told.append(f"{_UNKNOWN} ({unknown})")
    if len(told) > _MOST_SESSIONS:
        told[_MOST_SESSIONS:] = [f"{len(told) - _MOST_SESSIONS} more sessions"]
    return told
