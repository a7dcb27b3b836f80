"""Hosts whose monotonic clocks differ by a day: a time namespace is one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Pool, Rank, RanksFailed, WorldSpec
from harness.cluster import credentials
from harness.cluster.launcher import Cluster
from tests.cluster.conftest import pool_of, running

AHEAD = 86_400.0
LATER = ("unshare", "--time", "--monotonic", f"{AHEAD:.0f}", "--fork")


def missing() -> str:
    """Return why this machine can't have such hosts; empty if it can."""
    try:
        done = subprocess.run([*LATER, "true"], capture_output=True, text=True, check=False)
    except OSError as e:
        return f"time namespaces need the command unshare ({e.strerror})"
    return f"no time namespaces: {done.stderr.strip()}" if done.returncode else ""


@pytest.fixture(scope="module")
def pool(key_file: Path) -> Iterator[Pool]:
    """Worlds on an agent of this host and on one that is a day ahead."""
    if why := missing():
        pytest.skip(why)
    with running(key_file) as one, running(key_file, before=LATER) as other:
        cluster = Cluster((one.address, other.address), credentials.read(key_file))
        try:
            with pool_of(cluster) as found:
                yield found
        finally:
            children = Path(f"/proc/{other.process.pid}/task/{other.process.pid}/children").read_text()
            os.kill(int(children), signal.SIGTERM)  # unshare does not pass it on


def failed(pool: Pool, seconds: tuple[float, float]) -> RanksFailed:
    """The failure of ranks that fail after so many seconds, on clocks that do differ."""

    def body(rank: Rank) -> None:
        rank.store.add("here", 1)
        while rank.store.add("here", 0) < rank.size:
            time.sleep(0.001)
        time.sleep(seconds[rank.index])
        raise ValueError(f"at {time.monotonic():.0f}")

    world = pool.acquire(WorldSpec(2, hosts=2, timeout=30))
    clocks = world.run(lambda rank: time.monotonic())
    assert abs(abs(clocks[0] - clocks[1]) - AHEAD) < 60
    with pytest.raises(RanksFailed) as caught:
        world.run(body)
    world.kill()
    return caught.value


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_is_the_first(pool: Pool, first: int) -> None:
    """The rank that failed first is named, whichever host it is on.  Worlds begin on another host each time."""
    for _ in range(2):
        error = failed(pool, (0.0, 0.15) if first == 0 else (0.15, 0.0))
        assert error.headline.startswith(f"rank {first} of 2 failed first: ValueError"), error.headline
        assert error.culprits == (first,)


def test_at_the_same_time(pool: Pool) -> None:
    """What clocks can't tell is not said."""
    headlines = []
    for _ in range(20):
        headlines.append(failed(pool, (0.1, 0.1)).headline)
        if "the clocks of their hosts do not tell which failed first" in headlines[-1]:
            assert headlines[-1].startswith("ranks 0, 1 of 2 failed, and ")
            return
    pytest.fail(f"always one that was the first: {headlines}")
