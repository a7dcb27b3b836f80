"""Timing on ranks: how one rank measures a call that all ranks make together.

A *round* is a run of iterations back to back, as in a bare loop: between two of them, the harness only reads the clock.
Between rounds, the ranks wait for each other through the store.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from harness.worlds.rank import Rank
from harness.worlds.world import World

Call = Callable[[], Any]


@dataclass(frozen=True)
class Effort:
    """The amount of measuring.  Times are in seconds."""

    rounds: int = 3
    """Rounds on each set of ranks."""
    visits: int = 4
    """Sets of fresh ranks on the host, where starting ranks is cheap: figures differ more between processes than
    between rounds of one process."""
    seconds: float = 0.02
    """Approximate duration of a round."""
    least: int = 5
    """Minimum number of iterations of a round, however long they take."""
    most: int = 200
    warm: float = 0.3
    """Time limit of the warm-up, which usually becomes stable and ends much earlier."""

    def __post_init__(self) -> None:
        if min(self.rounds, self.visits, self.least) < 1 or self.most < self.least or min(self.seconds, self.warm) < 0:
            raise ValueError(f"not an effort: {self}")


ONCE = Effort(rounds=1, visits=1, seconds=0, least=2, most=2, warm=0)
"""For runs that only check values."""

_STABLE = 0.05
"""The warm-up ends with a block that is not faster than the one before by this share."""
_BLOCK = 0.002
"""Approximate duration of a warm-up block, in seconds."""
_LEAD = 5
"""Maximum number of uncounted iterations at the start of a round: the first ones after a pause differ from the rest."""


def visits(world: World, effort: Effort, run: Callable[[], list[Any]]) -> Iterator[list[Any]]:
    """Yield the results of ``run`` on each set of ranks.

    On the host, each visit has fresh ranks.  On devices, where starting ranks is expensive, there is only one set.
    """
    count = effort.visits if world.spec.device == "cpu" else 1
    for number in range(count):
        if number:
            world.kill()
        yield run()


@dataclass
class Timing:
    """The measurements of one call on one rank.  Times are in seconds."""

    first: float
    rounds: list[list[float]]
    """``[round][iteration]``"""
    clock: str


class Agreement:
    """An exchange of numbers between ranks through the store, so that it works with any backend."""

    _made: ClassVar[dict[tuple[int, ...], int]] = {}
    """Number of agreements by their members, who all create the same ones in the same order."""

    def __init__(self, rank: Rank, members: list[int]) -> None:
        self._rank, self._members, self._turn = rank, members, 0
        number = self._made[tuple(members)] = self._made.get(tuple(members), 0) + 1
        self._name = f"concord/bench/{members}/{number}"

    def most(self, value: float) -> float:
        """Return the largest of the members' values.  Waits until every member has given its value."""
        self._turn += 1
        key = f"{self._name}/{self._turn}"
        self._rank.store.set(f"{key}/{self._rank.index}", repr(value))
        return max(float(self._rank.store.get(f"{key}/{member}")) for member in self._members)


class HostClock:
    """The monotonic clock, for calls that are complete when they return."""

    name = "monotonic"

    def iterate(self, call: Call, count: int) -> list[float]:
        """Return the seconds of each of ``count`` calls."""
        clock = time.perf_counter_ns
        marks = [0] * (count + 1)
        marks[0] = clock()
        for i in range(1, count + 1):
            call()
            marks[i] = clock()
        return [(after - before) / 1e9 for before, after in itertools.pairwise(marks)]


class DeviceClock:
    """Events of the device's current stream, for calls that only launch work."""

    name = "events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def iterate(self, call: Call, count: int) -> list[float]:
        """Return the seconds of each of ``count`` calls, measured by events before and after it."""
        marks = [self._module.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for i in range(1, count + 1):
            call()
            marks[i].record()
        torch.accelerator.synchronize(self._device)
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


class SynchronizedClock(HostClock):
    """The monotonic clock, for devices whose events have no time: each call ends with a synchronization."""

    name = "synchronized"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def iterate(self, call: Call, count: int) -> list[float]:
        """Return the seconds of each of ``count`` calls, including the synchronization."""

        def both() -> None:
            call()
            torch.accelerator.synchronize(self._device)

        return super().iterate(both, count)


Clock = HostClock | DeviceClock | SynchronizedClock


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    if device.type == "cpu":
        return HostClock()
    clock = DeviceClock(device)
    try:
        clock.iterate(lambda: None, 1)
    except Exception:
        return SynchronizedClock(device)
    return clock


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable garbage collection inside the context."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def measure(rank: Rank, calls: dict[str, Call], members: list[int], effort: Effort) -> dict[str, Timing]:
    """Time calls that all ``members`` make, in rounds that alternate between the calls: a, b, a, b.

    Every member must pass the same names in the same order.  Returns a :class:`Timing` for each name.
    """
    agreement, clock = Agreement(rank, members), clock_of(rank.device)
    timings: dict[str, Timing] = {}
    counts: dict[str, int] = {}
    leads: dict[str, int] = {}
    with undisturbed():
        for name, call in calls.items():
            first = clock.iterate(call, 1)[0]
            typical = warm_up(call, clock, agreement, effort)
            timings[name] = Timing(first, [], clock.name)
            within = int(effort.seconds / typical)
            counts[name] = min(effort.most, max(effort.least, within))
            leads[name] = min(_LEAD, max(1, within))
        for _ in range(effort.rounds):
            for name, call in calls.items():
                agreement.most(0.0)
                clock.iterate(call, leads[name])  # ranks leave the store at different times; these calls align them
                timings[name].rounds.append(clock.iterate(call, counts[name]))
    return timings


def warm_up(call: Call, clock: Clock, agreement: Agreement, effort: Effort) -> float:
    """Iterate until the call gets no faster.  Returns the seconds of one iteration in the last block."""
    typical = agreement.most(clock.iterate(call, 1)[0])
    spent, iterations = typical, 1
    while spent < effort.warm:
        count = max(2, min(50, int(_BLOCK / typical)))
        block = clock.iterate(call, count)
        now = agreement.most(statistics.median(block))
        iterations += count
        spent += now * count
        settled = now > typical * (1 - _STABLE)
        typical = now
        if settled and iterations > 5:
            break
    return max(typical, 1e-9)


def copying(like: torch.Tensor, bytes_: int, times: int = 5) -> float:
    """Return the shortest time in seconds of ``times`` copies of ``bytes_`` bytes on the device of ``like``.

    Nothing that delivers so many bytes can be faster.
    """
    if bytes_ <= 0:
        return 0.0
    source = torch.zeros(bytes_, dtype=torch.uint8, device=like.device)
    target = torch.empty_like(source)
    clock = clock_of(like.device)
    clock.iterate(lambda: target.copy_(source), 2)
    return min(clock.iterate(lambda: target.copy_(source), times))
