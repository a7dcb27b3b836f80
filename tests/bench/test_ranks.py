"""What makes ranks cheap, each beside the same without it: huge pages, room for frames, and what the server imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch

from harness import Pool, Rank, WorldSpec
from harness.worlds.frames import roomy
from harness.worlds.local import LocalLauncher
from harness.worlds.preloading import PRELOAD
from tests.bench.worlds import Bare, seconds_of
from tests.unit.test_frames import call_at_every_depth

pytestmark = pytest.mark.slow


@pytest.fixture
def forking(asked_for: None) -> Iterator[tuple[Bare, Bare]]:
    """One with huge pages, and one without."""
    both = Bare("huge"), Bare()
    yield both
    for process in both:
        process.close()


def test_fork(compare: Callable[..., Any], forking: tuple[Bare, Bare]) -> None:
    """Processor time in the kernel for a fork of what ranks are forked from, and for its end."""
    with_huge, without = forking
    figures: list[float] = []
    compare(
        "a fork and its end, with huge pages",
        lambda: figures.append(with_huge("fork 20")),
        lambda: without("fork 20"),
        against="without them",
        wanted="0.5 at most",
        rounds=20,
        ours=lambda: median(figures),
    )


@pytest.mark.usefixtures("asked_for")
def test_calls_at_every_depth(compare: Callable[..., Any]) -> None:
    """Calls at 300 depths in a row, a few of which are at the end of a chunk of frames."""
    compare(
        "calls at 300 depths with room for frames",
        roomy(call_at_every_depth),
        lambda: seconds_of(call_at_every_depth),
        against="without it",
        wanted="0.5 at most",
        rounds=20,
    )


def compiled(rank: Rank) -> float:
    """Compile a collective."""

    def program(x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x)
        return x + 1

    return float(torch.compile(program, backend="aot_eager", fullgraph=True)(torch.ones(3)).sum())


@pytest.fixture
def pools(asked_for: None) -> Iterator[tuple[Pool, Pool]]:
    """One whose server imports what compiling needs, and one whose server imports Dynamo alone."""
    both = (
        Pool(),
        Pool(launcher=lambda **how: LocalLauncher(["torch", "torch._dynamo", "torch._inductor.compile_fx"], **how)),
    )
    yield both
    for pool in both:
        pool.close()


def test_first_compilation(compare: Callable[..., Any], pools: tuple[Pool, Pool]) -> None:
    """Compile a collective in two fresh ranks."""

    def fresh(pool: Pool) -> float:
        world = pool.acquire(WorldSpec(2))
        seconds = seconds_of(lambda: world.run(compiled))
        pool.release(world)
        return seconds

    for pool in pools:
        fresh(pool)
    figures: list[float] = []
    compare(
        "first compilation of a collective in two fresh ranks",
        lambda: figures.append(fresh(pools[0])),
        lambda: fresh(pools[1]),
        against="one whose server imported Dynamo alone",
        wanted="0.7 at most",
        rounds=30,
        ours=lambda: median(figures),
    )


def with_inductor(rank: Rank) -> float:
    """Compile a sum by Inductor."""
    return float(torch.compile(lambda x: x.cos() + x, fullgraph=True)(torch.zeros(3)).sum())


@pytest.fixture
def prepared(asked_for: None) -> Iterator[tuple[Pool, Pool]]:
    """One whose server makes torch's tables, and one whose server does not."""
    both = Pool(), Pool(launcher=lambda **how: LocalLauncher([*PRELOAD, "tests.bench.without_tables"], **how))
    yield both
    for pool in both:
        pool.close()


@pytest.mark.parametrize(("function", "wanted"), [(compiled, "0.9 at most"), (with_inductor, "0.5 at most")])
def test_tables(
    compare: Callable[..., Any], prepared: tuple[Pool, Pool], function: Callable[[Rank], float], wanted: str
) -> None:
    """Compile in two fresh ranks, after others have."""

    def fresh(pool: Pool) -> float:
        world = pool.acquire(WorldSpec(2))
        seconds = seconds_of(lambda: world.run(function))
        pool.release(world)
        return seconds

    for pool in (*prepared, *prepared):
        fresh(pool)
    figures: list[float] = []
    compare(
        f"{function.__name__} in two fresh ranks",
        lambda: figures.append(fresh(prepared[0])),
        lambda: fresh(prepared[1]),
        against="ranks that make torch's tables themselves",
        wanted=wanted,
        rounds=12,
        ours=lambda: median(figures),
    )
