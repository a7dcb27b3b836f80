"""Counts on ranks: they are exact where they can be, and an extra copy, message, call or allocation shows."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness import Rank, World
from harness.bench.counting import kernel, on_ranks
from harness.bench.counting.calls import NotTraced, SystemCalls
from harness.bench.counting.deciding import SETS, Change, changes, steadiness
from harness.bench.counting.names import (
    ALLOCATED,
    ALLOCATIONS,
    CALLS,
    COLLECTIVES,
    COPIED,
    COPIES,
    FAULTS,
    INSTRUCTIONS,
    INTERFACE,
    OPERATORS,
    SEGMENTS,
    SENDS,
    SENT,
)
from harness.bench.counting.on_ranks import Counted
from harness.bench.duet.journal import Journal, read
from harness.bench.duet.messages import Begin
from harness.bench.duet.records import Begun
from harness.bench.duet.run import Duet
from harness.bench.duet.sides import Side
from harness.bench.duet.state import replayed
from harness.bench.duet.view import code, view
from harness.bench.measuring.collectives import Timed
from harness.bench.measuring.steps import Step
from reports.duet import page
from tests.perf.duets import ABOUT, OFFERS, Machine, duet
from tests.perf.test_duet_sides import number_of, setting

KIB = Timed("all_reduce", 1 << 10)
EXACT = (COLLECTIVES, OPERATORS, ALLOCATIONS, ALLOCATED, COPIES, COPIED)


# which counts differ


def test_steady() -> None:
    """A count is steady if no set differs; 0 on all sets is steady, 0 on most of them is not."""
    usual = {"a": 5, "b": 100.0, "c": 0, "d": 0}
    found = steadiness([usual, usual, {**usual, "b": 101.0, "d": 1}])
    assert {name: one.steady for name, one in found.items()} == {"a": True, "b": False, "c": True, "d": False}
    assert steadiness([]) == {}


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ([100, 100, 100], [101, 101, 101], [Change(OPERATORS, 100, 101)]),
        ([101, 101], [100, 100], [Change(OPERATORS, 101, 100)]),
        ([0, 0], [1, 1], [Change(OPERATORS, 0, 1)]),
        ([0, 0], [0, 0], []),
        ([0, 0], [0.4, 0.4], []),
        ([1000, 1000], [1001, 1001], []),
        ([100, 100, 101], [110, 110, 110], []),
        ([100, 100, 100], [110, 110, 111], []),
        ([100], [110], []),
        ([], [], []),
    ],
)
def test_changes(a: list[float], b: list[float], found: list[Change]) -> None:
    """A step of 1 % is told if both sides are steady, and only then."""
    assert changes([{OPERATORS: one} for one in a], [{OPERATORS: one} for one in b]) == found


def test_small_counts_that_vary_are_not_compared() -> None:
    """Page faults may agree on all sets of a side by chance."""
    assert changes([{FAULTS: 0.0}] * SETS, [{FAULTS: 2.0}] * SETS) == []


def test_noise_is_never_told() -> None:
    """Counts that vary by 1 % from set to set are not told in any of 1000 duets of equal sides."""
    draw = np.random.default_rng(0)
    told = 0
    for _ in range(1000):
        values = 100 * (1 + 0.01 * draw.standard_normal((2, SETS)))
        told += bool(changes(*([{OPERATORS: float(one)} for one in side] for side in values)))
    assert told == 0


def test_in_words() -> None:
    """A change says both figures, and the share unless there was none before."""
    assert str(Change("copies", 4, 5)) == "copies 4 -> 5 (+25.0 %)"
    assert str(Change("copies", 0, 2)) == "copies 0 -> 2 (none before)"


# the kernel's counters


def test_connections() -> None:
    """What was sent again does not count."""
    info = bytearray(216)
    struct.pack_into("I", info, 100, 2)
    struct.pack_into("I", info, 156, 12)
    struct.pack_into("Q", info, 200, 1696)
    struct.pack_into("Q", info, 208, 96)
    assert kernel.connections([bytes(info)] * 2) == {SENT: 3200.0, SEGMENTS: 20.0}


@pytest.mark.parametrize(
    ("more", "expected"), [("", 700.0), ("  eth0: 1 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n", None)], ids=["alone", "shared"]
)
def test_interface(tmp_path: Path, more: str, expected: float | None) -> None:
    """Bytes count where ranks have a network of their own, which has nothing but the loopback."""
    file = tmp_path / "dev"
    file.write_text(f"Inter-|\n face |\n    lo: 700 9 0 0 0 0 0 0 700 9 0 0 0 0 0 0\n{more}")
    assert kernel.interfaces(file) == expected
    assert kernel.interfaces(tmp_path / "none") is None


def spin(count: int) -> None:
    for _ in range(count):
        os.getppid()


def test_system_calls_are_counted_exactly() -> None:
    """Each call between the marks counts once, and none outside; the process goes on afterwards."""
    try:
        traced = SystemCalls()
    except NotTraced as e:
        pytest.skip(f"this kernel does not let processes trace each other: {e}")
    spin(7)
    # Python itself makes a call now and then, for memory, so the fewest of a few tries counts.
    found = [min(traced.count(lambda n=n: spin(n))[CALLS] for _ in range(5)) for n in (0, 1, 100)]
    with open(os.devnull, "wb", buffering=0) as nothing:
        sends = traced.count(lambda: [nothing.write(b"x") for _ in range(9)])
    traced.close()
    assert [one - found[0] for one in found] == [0, 1, 100]
    assert sends[SENDS] == 9
    assert "TracerPid:\t0" in Path("/proc/self/status").read_text()


def test_instructions_or_the_reason() -> None:
    """Either the counter grows with the work, or it is said why there is none."""
    instructions = kernel.Instructions()
    before = kernel.counters(instructions)
    spin(1000)
    after = kernel.counters(instructions)
    instructions.close()
    assert (INSTRUCTIONS in after) != bool(instructions.why)
    assert after.get(INSTRUCTIONS, 1e9) - before.get(INSTRUCTIONS, 0) > 1000
    assert after[FAULTS] >= before[FAULTS]


# on ranks


def total(counted: list[Counted], name: str) -> float:
    return sum(one.counts[name] for one in counted)


def test_an_all_reduce(two: World) -> None:
    """One collective and one operator; its payload is sent at least once by each rank, and equally each time."""
    first, second = (two.run(on_ranks.on_rank, KIB) for _ in range(2))
    assert total(first, COLLECTIVES) == total(first, OPERATORS) == 2
    assert total(first, SENT) == total(second, SENT) >= 2 * 1024
    assert total(first, COPIES) == total(first, ALLOCATIONS) == 0
    assert all(one.problem == "" for one in first)
    assert all(one.missing.keys() <= {INSTRUCTIONS, INTERFACE, CALLS, SENDS} for one in first)


def test_a_training_step(two: World) -> None:
    """What the profiler counts of a step is the same each time, and there is something of each."""
    step = Step("replicate", pairs=1, width=16, rows=2)
    first, second = (two.run(on_ranks.on_rank, step, 5) for _ in range(2))
    for name in EXACT:
        assert total(first, name) == total(second, name) > 0, name


def copies_once_more(rank: Rank) -> None:
    """From now on all_reduce copies its input before."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        tensor.copy_(tensor.clone())
        return right(tensor, *args, **options)

    dist.all_reduce = wrong


def sends_once_more(rank: Rank) -> None:
    """From now on all_reduce is followed by an 8-byte broadcast."""
    right, flag = dist.all_reduce, torch.zeros(1, dtype=torch.int64)

    def wrong(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = right(tensor, *args, **options)
        dist.broadcast(flag, 0)
        return found

    dist.all_reduce = wrong


def calls_once_more(rank: Rank) -> None:
    """From now on rank 1's all_reduce makes 40 system calls more."""
    right = dist.all_reduce

    def wrong(*args: Any, **options: Any) -> Any:
        spin(40 * rank.index)
        return right(*args, **options)

    dist.all_reduce = wrong


@pytest.mark.parametrize(
    ("breaks", "rises"),
    [(copies_once_more, {COPIES: 4, ALLOCATIONS: 2, ALLOCATED: 2 * 1024}), (sends_once_more, {COLLECTIVES: 2})],
)
def test_more_work_shows(two: World, breaks: Callable[[Rank], None], rises: dict[str, float]) -> None:
    """An extra copy is two copies (one of its clone) and an allocation; an extra message is one more collective."""
    before = two.run(on_ranks.on_rank, KIB, 5)
    two.run(breaks)
    after = two.run(on_ranks.on_rank, KIB, 5)
    assert {name: total(after, name) - total(before, name) for name in rises} == rises
    if breaks is sends_once_more:
        assert total(after, SENT) > total(before, SENT) * 1.01


def test_more_system_calls_show(two: World) -> None:
    """Forty more of one rank are counted, on that rank."""
    before = two.run(on_ranks.on_rank, KIB)
    if CALLS in before[1].missing:
        pytest.skip(f"this kernel does not let processes trace each other: {before[1].missing[CALLS]}")
    two.run(calls_once_more)
    after = two.run(on_ranks.on_rank, KIB)
    assert after[1].counts[CALLS] >= 40


def test_a_rank_that_dies_while_it_is_traced(two: World) -> None:
    """It is reported as any other, and nothing hangs."""

    def body(rank: Rank) -> None:
        traced = SystemCalls()
        traced.count(lambda: os._exit(7) if rank.index else dist.all_reduce(torch.ones(1)))

    began = time.monotonic()
    with pytest.raises(Exception, match="rank 1"):
        two.run(body)
    assert time.monotonic() - began < 30


def test_values_are_checked(two: World) -> None:
    """A collective with wrong values says so."""

    def wrong(rank: Rank) -> None:
        right = dist.all_reduce
        dist.all_reduce = lambda tensor, *args, **options: (right(tensor, *args, **options), tensor.add_(1))

    two.run(wrong)
    assert all("output" in one.problem for one in two.run(on_ranks.on_rank, KIB, 2))


# in duets


def test_a_duet_tells_counts_at_once(tmp_path: Path) -> None:
    """What differs is in the headline, the table and the exit code, before any time is measured; it is kept."""
    found = duet(tmp_path, Machine(), series=OFFERS[:2])
    found.sides["B"].needs = {OFFERS[1].bytes: {"copies": 2.0}}  # type: ignore[attr-defined]
    found.sides["A"].needs = {OFFERS[1].bytes: {"copies": 1.0}}  # type: ignore[attr-defined]
    told: list[int] = []
    found.count(told.append)
    assert told == [0, 1]
    assert found.state.changes(0) == []
    assert found.state.changes(1) == [Change("copies", 1.0, 2.0)]
    assert code(found.state) == 1
    seen = view(found.state)
    assert [(row["series"], row["more"]) for row in seen["needs"]] == [(OFFERS[1].name, True)]
    assert "B needs more in 1 series: copies 1 -> 2 (+100.0 %)" in seen["headline"]
    assert "copies 1 -&gt; 2" in page(seen)
    again = replayed(read(tmp_path / "duet.jsonl"))
    assert again.changes(1) == found.state.changes(1)
    asked = len(found.sides["A"].asked)  # type: ignore[attr-defined]
    found.count()
    assert len(found.sides["A"].asked) == asked  # type: ignore[attr-defined]


def test_less_is_no_failure(tmp_path: Path) -> None:
    """What B needs less of is told, and the exit code stays 0."""
    found = duet(tmp_path, Machine(), series=OFFERS[:1])
    found.sides["A"].needs = {OFFERS[0].bytes: {"copies": 1.0}}  # type: ignore[attr-defined]
    found.sides["B"].needs = {OFFERS[0].bytes: {"copies": 0.0}}  # type: ignore[attr-defined]
    found.count()
    assert [change.more for change in found.state.changes(0)] == [False]
    assert code(found.state) == 0


EXTRA = """
import os
import torch, torch.distributed as dist
from harness.faults import everywhere

def put(right, flag):
    def more(tensor, *args, **options):
        if os.environ["EXTRA"] == "copy":
            tensor.copy_(tensor.clone())
        found = right(tensor, *args, **options)
        if os.environ["EXTRA"] == "message":
            dist.broadcast(flag, 0)
        return found

    everywhere(right, more)

put(dist.all_reduce, torch.zeros(1 << 14))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "rises"), [("", []), ("copy", [COPIES, ALLOCATIONS]), ("message", [COLLECTIVES, SENT])]
)
def test_real_sides(tmp_path: Path, extra: str, rises: list[str]) -> None:
    """An extra copy or message in B is told in seconds; of two equal sides, nothing is."""
    (tmp_path / "extra_work.py").write_text(EXTRA)
    profile = tmp_path / "extra.toml"
    profile.write_text('name = "extra"\nbackend = "gloo"\ndevice = "cpu"\nimports = ["extra_work"]\n')
    sides = {}
    try:
        for name, value in (("A", ""), ("B", extra)):
            given = setting(name)
            path = f"{tmp_path}:{dict(given.variables)['PYTHONPATH']}"
            own = tuple(sorted({**dict(given.variables), "PYTHONPATH": path, "EXTRA": value}.items()))
            sides[name] = Side(type(given)(name, given.python, given.root, own), tmp_path / f"{name}.txt")
            sides[name].send(Begin(profile=str(profile)))
        described = {name: side.described() for name, side in sides.items()}
        offers = {name: one.offers for name, one in described.items()}
        series = (offers["A"][number_of(described["A"], 1 << 20)],)
        begun = Begun(time=time.time(), a=ABOUT, b=ABOUT, series=series, rate=0.01, margin=0.05)
        journal = Journal(tmp_path / "duet.jsonl")
        journal.begin(begun)
        measured = Duet(sides, journal, replayed([begun]), offers)
        began = time.monotonic()
        measured.count()
        seconds = time.monotonic() - began
    finally:
        for side in sides.values():
            side.close()
    assert measured.state.counts[0].why == ""
    assert len(measured.state.counts[0].a) == SETS
    found = {change.count for change in measured.state.changes(0) if change.more}
    assert set(rises) <= found, measured.state.counts[0]
    if not extra:
        assert measured.state.changes(0) == []
    assert seconds < 60
