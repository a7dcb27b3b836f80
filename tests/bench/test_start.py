"""What a world costs, beside the floor under it and the harnesses beside it.

Run with ``pytest tests/bench --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness import Pool, WorldSpec
from harness.worlds.local import LocalLauncher
from tests.bench.worlds import Bare, Fresh, all_reduce

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.fixture
def bare(asked_for: None) -> Iterator[Bare]:
    found = Bare()
    yield found
    found.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool()
    found.launcher().wait_ready()  # type: ignore[attr-defined]
    yield found
    found.close()


@pytest.mark.parametrize("size", [2, 4])
def test_fresh_world(size: int, compare: Callable[..., Any], bare: Bare, pool: Pool) -> None:
    """Start to ready of a fresh gloo world, beside a bare fork and gloo rendezvous."""
    fresh = Fresh(pool, WorldSpec(size))
    compare(
        f"fresh world of {size}, start to ready",
        fresh.start,
        lambda: bare(f"start {size}"),
        against="a bare fork and rendezvous",
        wanted="2 at most",
        rounds=40,
        after=fresh.end,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_network_of_its_own(size: int, compare: Callable[..., Any], asked_for: None, pool: Pool) -> None:
    """Start to ready of a fresh world on a network of its own, beside one on the host's."""
    fresh, on_the_host = (Fresh(pool, WorldSpec(size, network=network)) for network in ("private", "host"))
    on_the_host.seconds()  # its server is another one: wait for that
    compare(
        f"fresh world of {size} on a network of its own",
        fresh.start,
        on_the_host.seconds,
        against="one on the host's",
        wanted="1.1 at most",
        rounds=60,
        after=fresh.end,
    )


def server_start(private: bool) -> float:
    """Seconds until a server that imports nothing is ready."""
    began = time.perf_counter()
    launcher = LocalLauncher(["json"], private=private)
    launcher.wait_ready()
    seconds = time.perf_counter() - began
    launcher.close()
    return seconds


def test_server_start(compare: Callable[..., Any], asked_for: None) -> None:
    """What a network adds to the start of a server, whose imports take seconds."""
    figures: list[float] = []
    compare(
        "server with a network, without imports",
        lambda: figures.append(server_start(True)),
        lambda: server_start(False),
        against="one without",
        wanted="50 ms more at most",
        rounds=20,
        ours=lambda: median(figures),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_run_in_a_live_world(size: int, compare: Callable[..., Any], bare: Bare, pool: Pool) -> None:
    """One run with one all_reduce, beside a bare pipe round trip and the same all_reduce."""
    world = pool.acquire(WorldSpec(size))
    bare(f"live {size}")
    compare(
        f"run with an all_reduce on {size} ranks",
        lambda: world.run(all_reduce),
        lambda: bare("round"),
        against="a bare pipe round trip with it",
        wanted="1.5 at most",
        rounds=300,
    )
    pool.release(world)


def seconds_per_test(name: str, size: int, tmp_path: Path) -> list[float]:
    """Run a file of trivial tests in a pytest session of its own; returns what each test took, set-up included."""
    report = tmp_path / f"{name}-{time.monotonic_ns()}.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        + ["-o", "python_files=*.py", "-o", "concord_results=", str(HERE / "trivial" / f"{name}.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "BENCH_RANKS": str(size)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(case.get("time", "0")) for case in ET.parse(report).iter("testcase")]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("other", ["multiprocess", "spawn", "continuous"])
@pytest.mark.usefixtures("asked_for")
def test_trivial_test(other: str, size: int, compare: Callable[..., Any], benchmark: Any, tmp_path: Path) -> None:
    """The same trivial test, fresh ranks for each of ours, beside PyTorch's harnesses; the median of a session's tests
    without its first, except for the one that keeps its ranks, where all count, start-up included."""
    figures: list[float] = []

    def theirs() -> float:
        each = seconds_per_test(other, size, tmp_path)
        return sum(each) / len(each) if other == "continuous" else median(each[1:])

    names = {
        "multiprocess": ("MultiProcessTestCase", "0.02 at most"),
        "spawn": ("torch.multiprocessing.spawn", "less than 1"),
        "continuous": ("MultiProcContinuousTest, 6 tests and their start-up", "less than 1"),
    }
    compare(
        f"a trivial test on {size} ranks",
        lambda: figures.extend(seconds_per_test("concord", size, tmp_path)[1:]),
        theirs,
        against=names[other][0],
        wanted=names[other][1],
        rounds=1,
        ours=lambda: median(figures),
    )
