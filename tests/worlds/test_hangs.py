"""A rank that hangs costs one run, and its report says where it hung."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from harness import Rank, RanksFailed, World

pytestmark = [pytest.mark.world(2)]


def hang(world: World, body: Callable[..., object]) -> RanksFailed:
    with pytest.raises(RanksFailed, match="not finished after 3 s") as caught:
        world.run(body, timeout=3)
    assert caught.value.verdict == "hung"
    return caught.value


@pytest.mark.usefixtures("works")
def test_endless_loop(world: World) -> None:
    """An endless loop in Python: the line is shown, and the other rank is said to wait."""

    def body(rank: Rank) -> None:
        while rank.index == 1:
            pass
        dist.barrier()

    error = hang(world, body)
    assert "while rank.index == 1" in error.ends[1].stack or "pass" in error.ends[1].stack
    assert error.ends[0].standing.startswith("waiting in barrier()")
    assert "rank 0 waits in barrier(), collective 1 of the default group at " in error.headline
    assert "for rank 1, which is in body at " in error.headline
    assert error.culprits == (1,)


@pytest.mark.usefixtures("works")
def test_sleep_in_c(world: World) -> None:
    """A call into C that lets other threads run: the monitor tells the line."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            ctypes.CDLL(None).sleep(100)
        dist.barrier()

    assert "sleep(100)" in hang(world, body).ends[1].stack


@pytest.mark.usefixtures("works")
def test_sleep_in_c_with_the_interpreter_lock(world: World) -> None:
    """A call into C that keeps the interpreter lock: a signal tells the line."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            ctypes.PyDLL(None).sleep(100)
        dist.barrier()

    error = hang(world, body)
    assert "sleep(100)" in error.ends[1].stack
    assert "holds the interpreter lock" in error.ends[1].standing
    assert "for rank 1, which does not answer" in error.headline


@pytest.mark.usefixtures("works")
def test_stopped_rank(world: World) -> None:
    """A rank that someone has stopped is named as stopped, before the run's time is over."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(RanksFailed) as caught:
        world.run(body)
    assert caught.value.verdict == "hung"
    assert caught.value.culprits == (1,)
    assert "stopped by a signal" in str(caught.value)


@pytest.mark.usefixtures("works")
def test_every_rank_sleeps(world: World) -> None:
    """Nobody waits for anybody: only the timeout ends it, and every rank's line is shown."""
    error = hang(world, lambda rank: time.sleep(100))
    assert all("time.sleep(100)" in end.stack for end in error.ends)


def test_exit_handler_that_hangs(world: World, request: pytest.FixtureRequest) -> None:
    """A rank that does not end when it should is named when the world is closed; the next test works."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            atexit.register(time.sleep, 100)

    world.run(body)
    with pytest.raises(RanksFailed, match="rank 1 did not end within 15 s: stuck in its exit handlers") as caught:
        world.close()
    assert caught.value.verdict == "hung"


def test_abort_on_the_way_out(world: World) -> None:
    """A rank that crashes in an exit handler is named when the world is closed."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            atexit.register(os.abort)

    world.run(body)
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed first: killed by SIGABRT"):
        world.close()
