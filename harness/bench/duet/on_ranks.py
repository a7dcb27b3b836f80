"""What the ranks of a duet do: prepare a series, measure rounds of it when asked, check it at the end.

Between two calls, a rank waits for the controller in the kernel and uses no CPU, so the other side's ranks have the
cores or the device for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.bench.measuring import ready
from harness.bench.measuring.ready import Ready, Timeable
from harness.bench.measuring.timing import Agreement, Clock, Effort, clock_of, undisturbed, warm_up
from harness.worlds.rank import Rank


@dataclass
class _Here:
    prepared: Ready
    agreement: Agreement
    clock: Clock


_here: dict[int, _Here] = {}
"""What this rank has prepared, by the number of the series."""


@dataclass(frozen=True)
class Readiness:
    """What preparing a series told.  Times are in seconds."""

    first: float
    typical: float
    """Of one iteration, after the warm-up; the ranks have agreed on it."""
    copy: float
    clock: str


def prepare(rank: Rank, number: int, timed: Timeable, effort: Effort) -> Readiness | None:
    """Make a series ready: check its values, and warm up.  Returns None if the rank is not in the group."""
    prepared = ready.prepared(rank, timed)
    if not prepared.takes_part:
        return None
    here = _here[number] = _Here(prepared, Agreement(rank, prepared.members), clock_of(rank.device))
    with undisturbed():
        first = here.clock.iterate(prepared.call, 1)[0]
        typical = warm_up(prepared.call, here.clock, here.agreement, effort)
    return Readiness(first, typical, prepared.copy(), here.clock.name)


def iterate(rank: Rank, number: int, count: int, lead: int) -> list[float] | None:
    """Return the seconds of each of ``count`` iterations back to back, after ``lead`` that are not counted."""
    here = _here.get(number)
    if here is None:
        return None
    with undisturbed():
        here.agreement.most(0.0)
        here.clock.iterate(here.prepared.call, lead)
        found = here.clock.iterate(here.prepared.call, count)
    return [seconds / here.prepared.in_flight for seconds in found]


def finish(rank: Rank, number: int) -> str:
    """Check the values once more and forget the series.  Returns what is wrong with its values; empty: nothing."""
    here = _here.pop(number, None)
    if here is None:
        return ""
    here.prepared.check("a call after the last that was timed")
    here.prepared.close()
    return here.prepared.problem
