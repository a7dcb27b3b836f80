"""However a rank ends, it is named, the others are told apart from it, and the next run works."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from harness import Rank, RanksFailed, World

pytestmark = [pytest.mark.world(2, 3), pytest.mark.usefixtures("works")]

LAST = -1


def is_last(rank: Rank) -> bool:
    return rank.index == rank.size - 1


def failure(world: World, body: object, **options: object) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        world.run(body, **options)  # type: ignore[arg-type]
    return caught.value


def test_exception(world: World) -> None:
    """A rank that raises is first; those that wait for it are stopped and said to wait."""

    def body(rank: Rank) -> None:
        if is_last(rank):
            raise ValueError("the reason")
        dist.all_reduce(torch.ones(1))

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert error.verdict == "failed"
    assert "ValueError: the reason" in error.headline
    assert {end.kind for end in error.ends[:LAST]} == {"stopped"}
    assert "all_reduce" in error.ends[0].standing


def test_assertion_shows_its_values(world: World) -> None:
    """An assert in a rank is explained as pytest explains one."""

    def body(rank: Rank) -> None:
        found = [1, 2, is_last(rank)]
        assert found == [1, 2, False]

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert "At index 2 diff: True != False" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_signal(world: World, number: signal.Signals) -> None:
    """A rank that a signal ends is first, with the signal's name, even if others fail on the clock before it."""

    def body(rank: Rank) -> None:
        dist.barrier()
        if is_last(rank):
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(1))

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert error.verdict == "crashed"
    assert number.name in error.headline


def test_crash_shows_where(world: World) -> None:
    """A rank that crashes in C leaves its Python stack."""

    def body(rank: Rank) -> None:
        if is_last(rank):
            ctypes.string_at(0)
        dist.barrier()

    error = failure(world, body)
    assert "ctypes.string_at(0)" in error.ends[LAST].stack


def test_killed_after_its_last_collective(world: World) -> None:
    """A rank that dies when the collectives are done has failed, though nobody waits for it."""

    def body(rank: Rank) -> None:
        dist.all_reduce(torch.ones(1))
        if is_last(rank):
            os.kill(os.getpid(), signal.SIGKILL)

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert error.verdict == "crashed"


def test_killed_between_runs(world: World) -> None:
    """A rank that dies while it is idle is noticed by the next run."""
    world.run(lambda rank: None)
    os.kill(world.pids[LAST], signal.SIGKILL)
    error = failure(world, lambda rank: dist.barrier())
    assert error.first is error.ends[LAST]


@pytest.mark.parametrize("code", [0, 3])
def test_exit_without_a_result(world: World, code: int) -> None:
    """os._exit, also with code 0, is an end without a result."""

    def body(rank: Rank) -> None:
        if is_last(rank):
            os._exit(code)
        dist.barrier()

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert error.verdict == "crashed"
    assert f"exited with code {code} before it had a result" in error.headline


def test_sys_exit(world: World) -> None:
    """sys.exit at the end of a rank's function is a failure with its code, not a way to pass."""

    def body(rank: Rank) -> None:
        dist.barrier()
        if is_last(rank):
            sys.exit(3)

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert "sys.exit(3)" in error.headline


def test_own_skip(world: World) -> None:
    """A rank must not skip by itself."""

    def body(rank: Rank) -> None:
        if is_last(rank):
            pytest.skip("not here")
        dist.barrier()

    error = failure(world, body)
    assert error.ends[LAST].kind == "skipped"
    assert "decide about a skip before any rank starts" in error.headline
    assert f"for rank {world.size - 1}, which has skipped" in str(error)


def test_out_of_memory(world: World) -> None:
    """A rank that runs into a memory limit says so; the session does not."""

    def body(rank: Rank) -> None:
        if is_last(rank):
            used = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
            hoard = []
            while True:
                hoard.append(bytearray(16 << 20))
        dist.barrier()

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert "MemoryError" in error.headline


def test_all_fail_alike(world: World) -> None:
    """Equal tracebacks are shown once, with the ranks that they are of."""

    def body(rank: Rank) -> None:
        raise RuntimeError("everywhere")

    error = failure(world, body)
    names = ", ".join(str(i) for i in range(world.size))
    assert f"traceback of ranks {names} (equal)" in str(error)
    assert str(error).count("in body\n") == 1


def test_unpicklable_result(world: World) -> None:
    """A result that can't travel is an error of the rank that returned it."""

    def body(rank: Rank) -> object:
        return threading.Lock() if is_last(rank) else None

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert "its result, a lock, can't be sent" in error.headline


def test_result_that_breaks_when_it_is_read(world: World) -> None:
    """A result that the controller can't unpickle is an error of the rank that sent it."""

    class Breaks:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("not a number",)

    error = failure(world, lambda rank: Breaks() if is_last(rank) else None)
    assert error.first is error.ends[LAST]
    assert "its result can't be read here" in error.headline


def test_unpicklable_exception(world: World) -> None:
    """An exception that can't travel is told all the same."""

    class Odd(Exception):
        def __init__(self, a: object, b: object) -> None:
            super().__init__("odd")
            self.handle = threading.Lock()

    def body(rank: Rank) -> None:
        if is_last(rank):
            raise Odd(1, 2)
        dist.barrier()

    error = failure(world, body)
    assert error.first is error.ends[LAST]
    assert "Odd: odd" in error.headline


def test_argument_that_cannot_travel(world: World) -> None:
    """What can't be sent is refused before any rank runs, with its reason."""
    with pytest.raises(TypeError, match="can't be sent to the ranks"):
        world.run(lambda rank, lock: None, threading.Lock())
    world.run(lambda rank: None)


def test_function_that_cannot_be_imported_there(world: World) -> None:
    """A function that a rank can't unpickle is a failure that says so."""

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return __import__, ("no_such_module_anywhere",)

    error = failure(world, lambda rank, trap: None, trap=Trap())
    assert "no_such_module_anywhere" in error.headline
    assert "can't be read on the rank" in error.headline


def test_first_among_several(world: World) -> None:
    """Of several ranks that fail by themselves, the earliest is first."""

    def body(rank: Rank) -> None:
        dist.barrier()
        if rank.index == 0:
            rank.store.wait(["failed"])
            raise RuntimeError("second")
        if is_last(rank):
            try:
                raise RuntimeError("first")
            finally:
                rank.store.set("failed", "1")

    error = failure(world, body)
    # The clock runs from where the exception leaves the function, and rank 0 can't raise before it was set free.
    assert "first" in error.ends[LAST].what
    assert "second" in error.ends[0].what


@pytest.mark.world(2)
def test_killed_while_another_waits_for_asynchronous_work(world: World) -> None:
    """A wait that breaks outside torch.distributed's own code is a consequence all the same."""

    def body(rank: Rank) -> None:
        dist.all_reduce(torch.ones(4))
        if is_last(rank):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4), async_op=True).wait()

    error = failure(world, body)
    assert error.first is error.ends[1]
    assert error.ends[0].by_transport or error.ends[0].kind == "stopped"


@pytest.mark.world(2)
@pytest.mark.parametrize("how", ["returns", "raises", "exits"])
def test_forked_child_that_comes_back_does_not_speak_for_the_rank(world: World, how: str) -> None:
    """A child that leaves the function ends there, with the code that a program of its own would have."""

    def body(rank: Rank) -> tuple[str, int]:
        pid = os.fork()
        if pid == 0:
            if how == "raises":
                raise ValueError("in the child")
            if how == "exits":
                sys.exit(3)
            return "child", 0
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        dist.barrier()
        return "parent", code

    assert world.run(body) == [("parent", {"returns": 0, "raises": 1, "exits": 3}[how])] * 2


@pytest.mark.world(2)
def test_rank_that_closes_the_connection_to_the_harness(world: World) -> None:
    """It says why it ends."""

    def body(rank: Rank) -> None:
        for fd in range(3, 256) if is_last(rank) else ():
            try:
                with socket.socket(fileno=os.dup(fd)) as found:
                    ours = found.family == socket.AF_UNIX
            except OSError:
                continue
            if ours:  # gloo's own descriptors are left open: its thread would abort, sooner or later
                os.close(fd)

    error = failure(world, body)
    assert error.first is error.ends[1]
    assert "lost its connection to the harness" in error.ends[1].output
