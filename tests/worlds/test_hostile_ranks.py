"""Whatever a rank does to the channels that it has to the harness costs its own run, with the blame on that rank."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness import Rank, RanksFailed, World

pytestmark = [pytest.mark.world(2), pytest.mark.usefixtures("works"), pytest.mark.timeout(180)]


def blamed(world: World, body: Callable[[Rank], object], within: float = 15.0, **options: Any) -> RanksFailed:
    """The failure of a run, which must come in time and be rank 1's."""
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        world.run(body, **options)
    assert time.monotonic() - began < within
    assert caught.value.culprits == (1,), str(caught.value)
    return caught.value


def memfd(name: str) -> int:
    """The descriptor of one of this rank's files without a name in a file system."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:concord-{name}"):
                return int(fd)
        except OSError:
            continue
    raise LookupError(name)


def control() -> socket.socket:
    """This rank's control channel, as a test that writes into the wrong descriptor would hit it."""
    frame: Any = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "control"):
        frame = frame.f_back
    return frame.f_locals["self"].control


def monitor() -> socket.socket:
    """This rank's other channel, on which its monitor thread answers."""
    (ident,) = [t.ident for t in threading.enumerate() if t.name == "concord-monitor"]
    return sys._current_frames()[ident].f_locals["sock"]


@pytest.fixture
def memory() -> Callable[[], int]:
    """How much more memory this process has had at most than before, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    return lambda: (peak() - before) >> 10


def peak() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0])


# the files that are shared


@pytest.mark.parametrize("name", ["rank", "crash"])
@pytest.mark.parametrize("size", [0, 1 << 33])
def test_shared_files_keep_their_size(world: World, name: str, size: int) -> None:
    """A rank that cuts or grows what it shares with the harness is refused by the kernel, and fails with that."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            os.ftruncate(memfd(name), size)
        dist.barrier()

    assert "PermissionError" in blamed(world, body).headline


def test_crash_file_does_not_grow(world: World) -> None:
    """A rank that writes without an end to its crash file is stopped by the kernel, and crashes as any does."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            try:
                while True:
                    os.write(memfd("crash"), b"x" * (1 << 20))
            except PermissionError:
                os.abort()
        dist.barrier()

    assert "killed by SIGABRT" in blamed(world, body).headline


@pytest.mark.parametrize("letter", [b"\xff", b"\0", b"9"], ids=ascii)
def test_scribbled_black_box(world: World, letter: bytes) -> None:
    """A rank whose code has written all over its black box is reported like any other."""

    def body(rank: Rank) -> None:
        dist.barrier()
        if rank.index == 1:
            fd = memfd("rank")
            os.pwrite(fd, letter * os.fstat(fd).st_size, 0)
            os.abort()
        dist.barrier()

    assert "killed by SIGABRT" in blamed(world, body).headline


# the control channel


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello, world\n" * 10,
        b"\0" * 4096,
        b"cncd" + struct.pack("!IQ", 0, 1 << 60),
        b"cncd" + struct.pack("!IQ", (1 << 32) - 1, 10),
        b"cncd" + struct.pack("!IQ", 0, 5) + b"\x80\x05\x88.." + b"more",
        b"cncd" + struct.pack("!IQ", 0, 1) + b"\xc0",
        b"cncd" + struct.pack("!IQ", 0, 2) + b"\x93\x01",
    ],
    ids=["text", "zeros", "huge", "many", "pickle", "nil", "torn"],
)
def test_garbage_on_the_control_channel(world: World, garbage: bytes) -> None:
    """Bytes that are no answer are noticed at once: the rank is named, with what it wrote, and where."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            sock = control()
            os.write(2, f"descriptor {sock.fileno()}\n".encode())
            # From a thread, so that the rank sleeps by then, however busy the machine is.
            threading.Timer(1.0, os.write, (sock.fileno(), garbage)).start()
            time.sleep(1000)

    error = blamed(world, body)
    descriptor = error.ends[1].output.strip()
    assert f"wrote what is no answer to its control channel ({descriptor})" in error.headline
    assert error.verdict == "failed"
    assert "time.sleep(1000)" in str(error)


def test_answer_that_nobody_asked_for(world: World) -> None:
    """A proper frame with an answer to something else is a failure of the rank that sent it, and no error of ours."""
    from harness.worlds import answers

    def body(rank: Rank) -> None:
        if rank.index == 1:
            control().sendall(b"".join(answers.frame(answers.Checked(job=1, left=[]))))
        dist.barrier()

    assert "wrote what is no answer" in blamed(world, body).headline


def test_frames_without_end(world: World) -> None:
    """A rank that sends answers as fast as it can is heard once."""
    from harness.worlds import answers

    def body(rank: Rank) -> None:
        if rank.index == 1:
            sock, frame = control(), b"".join(answers.frame(answers.Returned(job=1))) * 100
            while True:
                sock.sendall(frame)

    blamed(world, body)


def test_frame_that_never_ends(world: World, memory: Callable[[], int]) -> None:
    """A frame that is announced and comes byte by byte takes neither memory nor more than the run's time."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            sock = control()
            sock.sendall(b"cncd" + struct.pack("!IQ", 0, 256 << 20))
            while True:
                sock.sendall(b"x")
                time.sleep(0.01)

    with pytest.raises(RanksFailed, match="not finished after 2 s") as caught:
        world.run(body, timeout=2)
    assert "of an answer of 268,435,456 bytes" in caught.value.ends[1].what
    assert memory() < 100


# results


class Unread:
    """A result whose reading does something."""

    def __init__(self, what: Callable[..., object], *arguments: object) -> None:
        self.reduced = what, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def raises(kind: type[BaseException]) -> None:
    raise kind("on purpose")


def loops() -> None:
    while True:
        pass


def recurses(depth: int = 0) -> None:
    recurses(depth + 1)


def recurses_in_c() -> None:
    sys.setrecursionlimit(1 << 30)
    one: Any = []
    other: Any = []
    for _ in range(1_000_000):
        one, other = [one], [other]
    assert one == other


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ((time.sleep, 1000), "can't be read here: not done after"),
        ((loops,), "can't be read here: not done after"),
        ((os._exit, 0), "can't be read here: reading it exited with code 0"),
        ((os.abort,), "can't be read here: reading it was killed by SIGABRT"),
        ((recurses_in_c,), "can't be read here: reading it was killed by SIGSEGV"),
        ((recurses,), "RecursionError"),
        ((raises, ValueError), "ValueError: on purpose"),
        ((raises, SystemExit), "sys.exit"),
        ((raises, KeyboardInterrupt), "KeyboardInterrupt: on purpose"),
        ((exec, "import pytest; pytest.exit('all over')"), "all over"),
    ],
    ids=[
        "sleeps",
        "loops",
        "exits",
        "aborts",
        "recurses-in-c",
        "recurses",
        "raises",
        "sys-exit",
        "interrupt",
        "pytest",
    ],
)
def test_result_that_does_something_when_it_is_read(world: World, what: tuple[Any, ...], expected: str) -> None:
    """Whatever the reading of a result does, it is a failure of the rank that returned it, within the run's time."""
    timeout = 3 if "not done" in expected else 30  # a C stack takes its time to overflow where others work
    error = blamed(world, lambda rank: Unread(*what) if rank.index == 1 else None, timeout=timeout)
    assert expected in error.headline
    assert error.verdict == "failed"


def test_result_that_holds_the_interpreter(world: World) -> None:
    """A result whose reading would hold the controller's interpreter lock is found out before it can."""
    slow = (eval, "sum(range(10**12))")
    assert (
        "not done after" in blamed(world, lambda rank: Unread(*slow) if rank.index == 1 else None, timeout=3).headline
    )


def test_result_that_is_bad_in_the_controller_only(world: World) -> None:
    """A result that sleeps where there is no rank is a failure of the rank that returned it, too."""
    slow = (exec, "import sys, time\nif '_pytest.main' in sys.modules: time.sleep(1000)")
    assert (
        "not done after" in blamed(world, lambda rank: Unread(*slow) if rank.index == 1 else None, timeout=3).headline
    )


# what is printed, and where the rank is


def test_gigabytes_of_output(world: World, memory: Callable[[], int]) -> None:
    """A rank that prints without an end costs the controller no memory, and is ended in time."""

    def body(rank: Rank) -> None:
        while rank.index == 1:
            os.write(1, b"x" * (1 << 20))

    with pytest.raises(RanksFailed, match="not finished after 2 s"):
        world.run(body, timeout=2)
    assert memory() < 100


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 64,
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 20) + b'{"threads": [1, 2]} ',
        struct.pack("!I", 100_000) + b"[" * 100_000,
        struct.pack("!I", 5) + b"\xff\xfe\xfd\xfc\xfb",
    ],
    ids=["noise", "huge", "other", "deep", "no-text"],
)
def test_garbage_on_the_monitor_channel(world: World, answer: bytes) -> None:
    """A rank whose monitor channel has something else in it is stopped in time, and its stack is had by signal."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            monitor().sendall(answer * 3)
            time.sleep(1000)

    with pytest.raises(RanksFailed, match="not finished after 2 s") as caught:
        world.run(body, timeout=2)
    assert "rank 1: stopped by the harness" in str(caught.value)


def test_monitor_channel_without_end(world: World, memory: Callable[[], int]) -> None:
    """A rank that floods its monitor channel takes neither the controller's memory nor its time."""

    def body(rank: Rank) -> None:
        sock = monitor()
        sock.setblocking(True)
        while rank.index == 1:
            sock.sendall(b"\x7f" * (1 << 20))

    with pytest.raises(RanksFailed, match="not finished after 2 s"):
        world.run(body, timeout=2)
    assert memory() < 100


# what it says of its failure


class TalkativeError(Exception):
    """An exception whose text is had in some way."""

    def __init__(self, text: Callable[[], Any]) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def chained(length: int) -> BaseException:
    error: BaseException = ValueError("the root")
    for i in range(length):
        following = KeyError(f"number {i}")
        following.__cause__, error = error, following
    return error


def in_a_circle() -> BaseException:
    error, other = ValueError("one"), ValueError("other")
    error.__cause__, other.__cause__ = other, error
    return error


def with_notes(count: int) -> BaseException:
    error = ValueError("noted")
    for i in range(count):
        error.add_note(f"note {i} " * 100)
    return error


def nested(depth: int) -> BaseException:
    error: Exception = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("a group", [error, ValueError("beside")])
    return error


def deep(left: int) -> None:
    if left == 0:
        raise ValueError("at the bottom")
    deep(left - 1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: chained(5000), "KeyError: 'number 4999'"),
        (in_a_circle, "ValueError: one"),
        (lambda: with_notes(5000), "ValueError: noted"),
        (lambda: nested(5000), "ExceptionGroup: a group"),
        (lambda: ValueError("x" * (1 << 28)), "ValueError: xxx"),
        (lambda: TalkativeError(lambda: "y" * (1 << 28)), "TalkativeError: yyy"),
        (lambda: TalkativeError(lambda: time.sleep(1000)), "TalkativeError: (its message could not be read: "),
        (lambda: TalkativeError(loops), "TalkativeError: (its message could not be read: "),
        (lambda: TalkativeError(lambda: 3), "TalkativeError: (its message could not be read: TypeError)"),
        (lambda: TalkativeError(recurses), "TalkativeError: (its message could not be read: RecursionError)"),
    ],
    ids=["causes", "circle", "notes", "groups", "long", "made-long", "sleeps", "loops", "no-text", "recurses"],
)
def test_exception_that_is_hard_to_tell(world: World, make: Callable[[], BaseException], expected: str) -> None:
    """However an exception is made, its rank tells it within seconds, and in bounded length."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            raise make()
        dist.barrier()

    error = blamed(world, body, within=20)
    assert expected in error.headline
    assert len(str(error)) < 200_000
    assert "in body" in str(error)


def test_traceback_of_a_hundred_thousand_frames(world: World) -> None:
    """Both ends of it are shown."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            sys.setrecursionlimit(200_000)
            deep(100_000)
        dist.barrier()

    error = blamed(world, body)
    assert "ValueError: at the bottom" in error.headline
    assert ("in body" in str(error), "frames are left out" in str(error)) == (True, True)


def test_source_that_is_no_file(world: World, tmp_path: Path) -> None:
    """Where code says that it is from a device or a pipe, nobody opens that to show a line of it."""
    os.mkfifo(tmp_path / "pipe.py")

    def body(rank: Rank) -> None:
        if rank.index == 1:
            exec(compile("raise ValueError('from nowhere')", str(tmp_path / "pipe.py"), "exec"))
        dist.barrier()

    assert "ValueError: from nowhere" in blamed(world, body, within=20).headline


def test_stack_in_what_is_no_file(world: World) -> None:
    """The stack of a rank that hangs is shown without reading what its code says that it is from."""

    def body(rank: Rank) -> None:
        exec(compile("import time\ntime.sleep(1000)", "/dev/zero", "exec"))

    with pytest.raises(RanksFailed, match="not finished after 2 s") as caught:
        world.run(body, timeout=2)
    assert "/dev/zero:2" in str(caught.value)
