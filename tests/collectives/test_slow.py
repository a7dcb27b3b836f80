"""Faults that make training slower: they delay, or launch more, and leave every value right."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fixtures.faults import performance
from fixtures.faults.collectives.calls import Damage
from harness import Rank, World
from harness.oracles.collectives import Case
from harness.stacks.collectives import run_cases
from suites.collectives.cases import every_collective
from tests.collectives.broken import changed

SLOW = {damage.fault.name: damage for damage in performance.DAMAGES}


def seconds(count: int, asynchronous: bool = False, calls: int = 1) -> float:
    """The least time of some calls of all_reduce on float32 elements."""
    found = []
    for _ in range(calls):
        tensor = torch.ones(count)
        before = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=asynchronous)
        found.append(time.perf_counter() - before)
        if work is not None:
            work.wait()
    return min(found)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.world(2)
def test_values_stay_right(world: World, name: str) -> None:
    """Every collective, synchronous and asynchronous, three times: nothing but time is wrong."""
    cases = [*every_collective(repeats=3), *every_collective(form="async"), Case("all_reduce", shape=(70_000,))]

    def body(rank: Rank, damage: Damage) -> list[tuple[int, str]]:
        with changed(damage):
            return run_cases(rank, cases)

    assert world.run(body, SLOW[name]) == [[], []]


@pytest.mark.parametrize(
    ("name", "count", "least"),
    [
        ("a-nanosecond-more-for-each-byte", 500_000, 2e-3),
        ("20-microseconds-more-for-small-messages", 1, 20e-6),
        ("20-milliseconds-more-above-128-kib", 33_000, 20e-3),
        ("a-millisecond-more-from-256-to-512-kib", 70_000, 1e-3),
    ],
)
@pytest.mark.world(1)
def test_delays(world: World, name: str, count: int, least: float) -> None:
    """No call of that size is faster than the delay."""

    def body(rank: Rank, damage: Damage) -> float:
        with changed(damage):
            return seconds(count, calls=5)

    assert world.run(body, SLOW[name])[0] >= least


@pytest.mark.parametrize(
    ("name", "count"), [("20-milliseconds-more-above-128-kib", 32_000), ("a-millisecond-more-from-256-to-512-kib", 1)]
)
@pytest.mark.world(1)
def test_other_sizes_stay_fast(world: World, name: str, count: int) -> None:
    """Some call of another size is faster than the delay."""

    def body(rank: Rank, damage: Damage) -> float:
        with changed(damage):
            return seconds(count, calls=50)

    assert world.run(body, SLOW[name])[0] < (20e-3 if "20-" in name else 1e-3)


@pytest.mark.world(1)
def test_third_repetition(world: World) -> None:
    """The first two calls of a size may be fast, all further ones take the delay; another size begins anew."""

    def body(rank: Rank, damage: Damage) -> list[float]:
        with changed(damage):
            return [seconds(count) for count in (10, 10, 10, 10, 11, 11, 11)]

    found = world.run(body, SLOW["slow-from-the-third-repetition-on"])[0]
    assert all(found[i] >= 1e-3 for i in (2, 3, 6))


@pytest.mark.parametrize("factor", [8, 1.4])
@pytest.mark.world(1)
def test_times_as_long(world: World, factor: float) -> None:
    """The delay is a multiple of what the collective itself took."""

    def body(rank: Rank, damage: Damage) -> list[float]:
        inside = []
        right = dist.all_reduce

        @functools.wraps(right)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            try:
                return right(*args, **kwargs)
            finally:
                inside.append(time.perf_counter() - before)

        dist.all_reduce = timed
        try:
            with changed(damage):
                return [seconds(1000), inside[0]]
        finally:
            dist.all_reduce = right

    outside, inside = world.run(
        body, SLOW[f"every-collective-takes-{'eight' if factor == 8 else factor}-times-as-long"]
    )[0]
    assert outside >= inside + (factor - 1) * min(inside, 1e-3)  # what is taken for the time of the call has a bound


@pytest.mark.world(2)
def test_no_overlap(world: World) -> None:
    """An asynchronous call does not return before its peer has come."""

    def body(rank: Rank, damage: Damage) -> bool:
        with changed(damage):
            if rank.index == 1:
                rank.store.wait(["about to call"])
                rank.store.add("came", 1)  # which is answered: nobody waits until a value set is there
            else:
                rank.store.set("about to call", "")
            work = dist.all_reduce(torch.ones(1), async_op=True)
            came = rank.store.check(["came"])
            work.wait()
            return bool(came)

    assert world.run(body, SLOW["asynchronous-collectives-do-not-overlap"]) == [True, True]


def launched(what: Callable[[], Any]) -> int:
    """How many collectives the default group has launched while something is done."""
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    what()
    return int(group._get_sequence_number_for_group() - before)


@pytest.mark.world(2)
def test_done_twice(world: World) -> None:
    """Two collectives for one."""

    def body(rank: Rank, damage: Damage) -> int:
        with changed(damage):
            return launched(lambda: dist.all_reduce(torch.ones(1)))

    assert world.run(body, SLOW["every-all-reduce-is-done-twice"]) == [2, 2]


@contextmanager
def put(fault: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Put a fault of DDP into this process, and take it out again."""
    right = DistributedDataParallel.__init__
    fault(*arguments)
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = right  # type: ignore[method-assign]


def steps(rank: Rank, fault: Callable[..., None], *arguments: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Collectives of backwards, with DDP's own and with the fault's: synchronized, then not; and gradients."""
    counts, gradients = [], []
    for damaged in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if damaged:
            with put(fault, *arguments):
                wrapped = DistributedDataParallel(model)
        else:
            wrapped = DistributedDataParallel(model)
        for _ in range(2):
            wrapped(torch.ones(2, 4)).sum().backward()  # buckets are made anew after the first
        wrapped.zero_grad()
        x = torch.full((2, 4), rank.index + 1.0)
        counts.append(launched(lambda w=wrapped, x=x: w(x).sum().backward()))
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        with wrapped.no_sync():
            counts.append(launched(lambda w=wrapped, x=x: w(x).sum().backward()))
    return counts, gradients


@pytest.mark.parametrize(
    ("fault", "arguments", "expected"),
    [
        (performance.all_reduce_for_each_parameter, (), [1, 0, 7, 6]),
        (performance.one_more_all_reduce_in_backward, (), [1, 0, 2, 1]),
        (performance.accumulation_saves_nothing, (), [1, 0, 1, 6]),
        (performance.size_of_buckets_ignored, (1e-6,), [1, 0, 6, 0]),
        (performance.delay_for_each_gradient, (1e-4,), [1, 0, 1, 0]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.world(2)
def test_collectives_of_a_backward(
    world: World, fault: Callable[..., None], arguments: tuple[float, ...], expected: list[int]
) -> None:
    """As many as the fault says, synchronized and not; the same gradients."""
    for counts, gradients in world.run(steps, fault, *arguments):
        assert counts == expected
        half = len(gradients) // 2
        assert all(torch.equal(a, b) for a, b in zip(gradients[:half], gradients[half:], strict=True))


@pytest.mark.world(2)
def test_one_bucket(world: World) -> None:
    """Buckets that a user wants small are one."""

    def body(rank: Rank) -> list[int]:
        found = []
        for megabytes in (None, 1e6):
            model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
            if megabytes:
                with put(performance.size_of_buckets_ignored, megabytes):
                    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
            else:
                wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
            for _ in range(3):
                count = launched(lambda w=wrapped: w(torch.ones(2, 64)).sum().backward())
            found.append(count)
        return found

    for mine in world.run(body):
        assert mine[0] > 1
        assert mine[1] == 1
