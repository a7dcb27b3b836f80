"""What many hosts cost pytest's process: simulated agents, up to 1,024 ranks on 128 hosts.

Run with ``pytest tests/bench/test_simulated.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import RanksFailed, WorldSpec
from harness.cluster import credentials
from harness.cluster.launcher import Cluster
from tests.bench.test_sizes import holds
from tests.bench.worlds import seconds_of
from tests.cluster.conftest import pool_of

pytestmark = pytest.mark.slow
PROCESSES = 2
RUNS = 20


@contextlib.contextmanager
def simulated(hosts: int) -> Iterator[tuple[Cluster, Callable[[], None]]]:
    """So many agents, and a function after which a rank dies in the next run."""
    key = credentials.made()
    processes = []
    try:
        ports: list[int] = []
        for number in range(PROCESSES):
            count = hosts // PROCESSES + (number < hosts % PROCESSES)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.simulated", str(count)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(str(key)) + "\n")
            process.stdin.flush()
            ports += json.loads(process.stdout.readline())

        def doom() -> None:
            assert processes[0].stdin is not None
            processes[0].stdin.write("die\n")
            processes[0].stdin.flush()
            time.sleep(0.2)

        yield Cluster(tuple(("127.0.0.1", port) for port in ports), key, 60.0), doom
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def nothing(rank: object) -> None:
    """Simulated ranks do not execute it."""


@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (16, 2), (64, 8), (256, 32), (1024, 128)])
@pytest.mark.usefixtures("asked_for")
def test_many_hosts(ranks: int, hosts: int, said: Callable[..., None]) -> None:
    """Start, runs, and the first rank that fails."""
    before = holds()
    with simulated(hosts) as (cluster, doom), pool_of(cluster) as pool:
        spec = WorldSpec(ranks, "gloo", hosts=hosts, timeout=120)
        worlds = []
        connecting = seconds_of(lambda: pool.launcher(private=False))
        starting = seconds_of(lambda: worlds.append(pool.acquire(spec)))
        (world,) = worlds
        assert world.run(nothing) == [None] * ranks
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(RUNS):
            world.run(nothing)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - began
        descriptors, kib = (now - then for now, then in zip(holds(), before, strict=True))
        doom()
        began = time.perf_counter()
        with pytest.raises(RanksFailed) as caught:
            world.run(nothing)
        naming = time.perf_counter() - began
        assert caught.value.verdict == "crashed", caught.value
        assert len(caught.value.culprits) == 1
    said(
        f"{ranks} ranks on {hosts} hosts",
        [
            f"connected in {connecting:.2f} s, started in {starting:.2f} s",
            f"a run takes {wall / RUNS * 1000:.1f} ms, {cpu / RUNS * 1000:.1f} ms of pytest's CPU",
            f"culprit named in {naming:.2f} s",
            f"{descriptors} descriptors, {kib >> 10} MiB",
        ],
    )
