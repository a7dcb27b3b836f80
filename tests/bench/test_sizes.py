"""Worlds of many ranks on this machine, beside a bare fork and gloo at the same size, and what each costs pytest.

Run with ``pytest tests/bench/test_sizes.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Pool, WorldSpec
from tests.bench.test_start import Bare, bare, pool
from tests.bench.worlds import Fresh, all_reduce

__all__ = ["bare", "pool"]
pytestmark = pytest.mark.slow
SIZES = [(8, 20), (16, 10), (32, 6), (64, 4)]


@pytest.mark.parametrize(("size", "rounds"), SIZES)
def test_fresh_world(size: int, rounds: int, compare: Callable[..., Any], bare: Bare, pool: Pool) -> None:
    """Start to ready."""
    fresh = Fresh(pool, WorldSpec(size, timeout=120))
    compare(
        f"fresh world of {size}, start to ready",
        fresh.start,
        lambda: bare(f"start {size}"),
        against="a bare fork and rendezvous",
        wanted="2 at most",
        rounds=rounds,
        after=fresh.end,
    )


@pytest.mark.parametrize(("size", "rounds"), SIZES)
def test_run(size: int, rounds: int, compare: Callable[..., Any], bare: Bare, pool: Pool) -> None:
    """One run with one all_reduce in a live world."""
    world = pool.acquire(WorldSpec(size, timeout=120))
    bare(f"live {size}")
    compare(
        f"run with an all_reduce on {size} ranks",
        lambda: world.run(all_reduce),
        lambda: bare("round"),
        against="a bare pipe round trip with it",
        wanted="2 at most",
        rounds=3 * rounds,
    )
    pool.release(world)


def holds() -> tuple[int, int]:
    """The descriptors and the KiB of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE") >> 10


def test_what_the_controller_holds(asked_for: None, pool: Pool, said: Callable[..., None]) -> None:
    """Descriptors and memory of pytest's process for each rank of a world of 64."""
    pool.release(pool.acquire(WorldSpec(2)))
    before = holds()
    world = pool.acquire(WorldSpec(64, timeout=120))
    world.run(all_reduce)
    descriptors, kib = (now - then for now, then in zip(holds(), before, strict=True))
    pool.release(world)
    said("for each of 64 ranks", [f"{descriptors / 64:.1f} descriptors", f"{kib / 64:.0f} KiB"])
