"""Count on ranks what a call needs: each count for one call, from a number of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.bench.counting import kernel
from harness.bench.counting.calls import NotTraced, SystemCalls
from harness.bench.counting.kernel import Instructions, counters
from harness.bench.counting.names import CALLS, INSTRUCTIONS, INTERFACE, SENDS
from harness.bench.counting.profiled import profiled
from harness.bench.measuring import ready
from harness.bench.measuring.ready import Timeable
from harness.bench.measuring.timing import Agreement, undisturbed
from harness.worlds.rank import Rank

TIMES = 20
"""Calls over which counts are taken, by default."""
_WARM = 5


@dataclass
class Counted:
    """What a rank counted for one call, and what it could not count."""

    counts: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)
    """Counts that can't be had here, with the reason."""
    problem: str = ""
    """What is wrong with the values; empty: nothing."""


def on_rank(rank: Rank, timed: Timeable, times: int = TIMES) -> Counted | None:
    """Count what a collective or a training step needs.  Returns None if the rank is not in its group."""
    prepared = ready.prepared(rank, timed)
    if not prepared.takes_part:
        return None
    found = counted(rank, prepared.call, prepared.members, times)
    found.counts = {name: value / prepared.in_flight for name, value in found.counts.items()}
    prepared.check("a call after the last that was counted")
    prepared.close()
    found.problem = prepared.problem
    return found


def counted(rank: Rank, call: Callable[[], Any], members: list[int], times: int) -> Counted:
    """Count what a call needs that all ``members`` make together."""
    agreement = Agreement(rank, members)

    def every() -> None:
        for _ in range(times):
            call()

    def nothing() -> None:
        pass

    for _ in range(_WARM):
        call()
    found = Counted({})
    with undisturbed():
        instructions = Instructions()
        if instructions.why:
            found.missing[INSTRUCTIONS] = instructions.why
        store = int(getattr(rank.store, "port", 0))
        empty, whole = (_of_kernel(agreement, instructions, store, what) for what in (nothing, every))
        instructions.close()
        found.counts |= {name: whole[name] - (empty[name] if name == INTERFACE else 0.0) for name in whole}
        if INTERFACE not in whole:
            found.missing[INTERFACE] = "ranks share their network with others"
        _add_calls(agreement, every, found)
        agreement.most(0.0)
        found.counts |= profiled(every, rank.device)
    found.counts = {name: value / times for name, value in found.counts.items()}
    agreement.most(0.0)
    return found


def _of_kernel(
    agreement: Agreement, instructions: Instructions, store: int, call: Callable[[], Any]
) -> dict[str, float]:
    """Return the kernel's counts of a call.  ``store``: port of the store, whose connections do not count.

    Bytes of the interface are those of all ranks, which have ended when it is read, and of the store that says so.
    """
    agreement.most(0.0)
    before = counters(instructions, store)
    call()
    after = counters(instructions, store)
    agreement.most(0.0)
    found = {name: after[name] - value for name, value in before.items() if name in after}
    total = kernel.interfaces()
    if total is not None and INTERFACE in before:
        found[INTERFACE] = total - before[INTERFACE]
    agreement.most(0.0)
    return found


def _add_calls(agreement: Agreement, every: Callable[[], Any], found: Counted) -> None:
    try:
        traced = SystemCalls()
    except NotTraced as e:
        traced = None
        found.missing |= dict.fromkeys((CALLS, SENDS), str(e))
    agreement.most(0.0)  # no rank calls before all are traced
    try:
        if traced is not None:
            found.counts |= traced.count(every)
        else:
            every()
    except NotTraced as e:
        found.missing |= dict.fromkeys((CALLS, SENDS), str(e))
    agreement.most(0.0)
    if traced is not None:
        traced.close()
