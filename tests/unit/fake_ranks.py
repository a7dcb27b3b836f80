"""Ranks that do what a test says when it says, on a clock that moves only while somebody waits for them."""

from __future__ import annotations

import heapq
import itertools
import math
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.worlds import answers, wire
from harness.worlds.blackbox import Issued
from harness.worlds.handle import HERE, Frame, Heard, KernelState, Launcher, News, Place, RankHandle
from harness.worlds.launch import Exit, ServerLost
from harness.worlds.network import Refusal
from harness.worlds.places import TORCH, WORLDS
from harness.worlds.rank import RankSetup

LOOP = (f"{WORLDS}rank.py", 200, "run")
TEST = ("/repo/tests/test_x.py", 12, "body")
ALL_REDUCE = (f"{TORCH}distributed/distributed_c10d.py", 3000, "all_reduce")
SETUP = RankSetup(0, 1, "", "cpu", ("", 0), 60.0)


class FakeClock:
    """Moves when it is told to."""

    now = 10_000.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)


@dataclass
class FakeBox:
    """A black box with what a test puts there."""

    phase: str = "running"
    issued: list[Issued] = field(default_factory=list)
    whole: bool = True
    reached: tuple[int, int] = (0, 0)

    @property
    def count(self) -> int:
        return len(self.issued)

    def recent(self, most: int = 8) -> list[Issued]:
        return self.issued[-most:]


@dataclass(eq=False)
class FakeRank:
    """A rank that sleeps in the kernel's eyes, uses no CPU and says nothing, unless a test makes it."""

    index: int
    launcher: FakeLauncher
    pid: int = 0
    exit: Exit | None = None
    box: FakeBox = field(default_factory=FakeBox)
    begun: str = ""
    output_closed: bool = False
    monitor_lost: bool = False
    main: str = "S"
    threads: Sequence[str] = ("S",)
    ticks_per_second: int = 0
    clock_ahead_ns: int = 0
    """How much its clock is ahead of the launcher's."""
    on: Place = HERE
    snapshot: Mapping[str, Any] | None = field(default_factory=lambda: snapshot())
    """What its monitor answers, by default that it is in a test; None if it does not."""
    snapshot_takes: float = 0.001
    stack: str = ""
    """What it writes when it is asked for its stacks."""
    stack_takes: float = 0.001
    waking: frozenset[int] = frozenset()
    """Threads that may wake up by themselves."""
    on_frame: Callable[[FakeRank], None] = lambda rank: None
    """What it does when it gets a frame."""
    sent: list[bytes] = field(default_factory=list)
    """Frames that it got."""
    lent: tuple[int, int] | None = None
    closed: bool = False
    _frames: deque[Frame | wire.WireError] = field(default_factory=deque)
    _printed: bytes = b""
    _crash: str = ""
    _snapshot_at: float = math.inf
    _stack_at: float = -math.inf

    # what a test makes it do

    def returns(self, value: object = None) -> None:
        """Answer its last frame with a result; the first, if it got none."""
        pickled = wire.pickled(value)[0] if value is not None else b""
        self._says(answers.returned(max(1, len(self.sent)), pickled, []))

    def answers(self, answer: answers.Answer) -> None:
        self._says(answers.frame(answer))

    def raises(self, type: str = "ValueError", message: str = "", **more: Any) -> None:
        """Answer with an exception, raised now unless ``time_ns`` says when."""
        report = {
            "type": type,
            "message": message,
            "text": f"{type}: {message}",
            "context": "",
            "frames": [TEST],
            "in_collective": False,
            "skip": False,
            "out_of_memory": False,
            "exit_code": None,
            "time_ns": self.launcher.clock.monotonic_ns() + self.clock_ahead_ns,
            **more,
        }
        self._says(answers.raised(1, report))

    def says(self, body: bytes) -> None:
        """Send a frame with any body."""
        self._says([b"", body])

    def _says(self, parts: list[bytes]) -> None:
        _, body, *buffers = parts
        self._frames.append((body, [bytearray(each) for each in buffers]))

    def breaks_off(self, error: wire.WireError) -> None:
        """Make :meth:`receive` raise this once all frames were taken."""
        self._frames.append(error)

    def prints(self, data: bytes) -> None:
        self._printed += data

    def dies(self, status: int, crash: str = "", **more: Any) -> None:
        """End with a wait status, and with what faulthandler wrote."""
        self._crash += crash
        self.exit = self.exit or Exit(status, self.launcher.clock.monotonic_ns(), **more)
        self.launcher.ended += 1

    # RankHandle

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        if self.exit is not None:
            raise wire.WireError("the peer has gone")
        self.sent.append(b"".join(frame))
        self.on_frame(self)

    def receive(self) -> Frame | None:
        if not self._frames:
            return None
        frame = self._frames[0]
        if isinstance(frame, wire.WireError):
            raise frame
        self._frames.popleft()
        return frame

    @property
    def more(self) -> bool:
        return bool(self._frames)

    def take_output(self) -> bytes:
        data, self._printed = self._printed, b""
        return data

    def lend(self, stdin: int, stdout: int) -> None:
        self.lent = stdin, stdout

    def ask_snapshot(self) -> None:
        if self._snapshot_at == math.inf and self.snapshot is not None:
            self._snapshot_at = self.launcher.clock.now + self.snapshot_takes
            self.launcher.at_time(self._snapshot_at, lambda: None)

    def take_snapshot(self) -> dict[str, Any] | None:
        if self.launcher.clock.now < self._snapshot_at:
            return None
        self._snapshot_at = math.inf
        return dict(self.snapshot or {})

    def ask_stack(self) -> None:
        self._stack_at = self.launcher.clock.now + self.stack_takes
        self.launcher.at_time(self._stack_at, self._writes_stack)

    def _writes_stack(self) -> None:
        self._crash += self.stack

    def stack_is_there(self) -> bool:
        return self.exit is not None or self.launcher.clock.now >= self._stack_at

    def crash_text(self) -> str:
        text, self._crash = self._crash, ""
        return text

    def kernel_state(self) -> KernelState:
        if self.exit is not None:
            return KernelState()
        return KernelState(self.main, round(self.launcher.clock.now * self.ticks_per_second), self.threads)

    def alarms(self, threads: Iterable[tuple[int, bool]]) -> dict[int, bool]:
        return {native: native in self.waking for native, _ in threads}

    def time_here(self, time_ns: int) -> int:
        return time_ns - self.clock_ahead_ns

    @property
    def place(self) -> Place:
        return self.on

    def close(self) -> None:
        self.closed = True


class FakeListener:
    """Moves the clock to the next thing that happens."""

    def __init__(self, launcher: FakeLauncher, ranks: Sequence[FakeRank], to: Collection[Heard]) -> None:
        self._launcher = launcher
        self._listened = [(what, rank) for rank in ranks for what in to]

    def wait(self, seconds: float) -> list[News]:
        launcher = self._launcher
        until = launcher.clock.now + max(0.0, seconds)
        ended = launcher.ended
        launcher.happen(launcher.clock.now)
        while not (news := self._news()) and launcher.ended == ended:
            if launcher.next > until:
                assert until < math.inf, "nothing will ever happen, and somebody waits for it without a limit"
                # A little later, so that a rest of the time that is lost in rounding is not waited for again.
                launcher.clock.now = math.nextafter(until, math.inf) if seconds > 0 else launcher.clock.now
                break
            launcher.happen(launcher.next)
        return news

    def ignore(self, rank: RankHandle, what: Heard) -> None:
        self._listened = [each for each in self._listened if each != (what, rank)]

    def _news(self) -> list[News]:
        return [News(what, rank) for what, rank in self._listened if _is_there(rank, what)]


def _is_there(rank: FakeRank, what: Heard) -> bool:
    if what is Heard.MESSAGE:
        return rank.more
    if what is Heard.OUTPUT:
        return bool(rank._printed) or rank.output_closed
    if what is Heard.SNAPSHOT:
        return rank.launcher.clock.now >= rank._snapshot_at
    return rank.stack_is_there()


class FakeLauncher:
    """A launcher of ``size`` ranks, which are there from the start.

    ``reader``: what the process does that reads results first, once it gets one.
    """

    network = ""
    refusal = Refusal()
    interfaces: Sequence[str] = ()

    def __init__(self, size: int = 2, reader: Callable[[FakeRank], None] = FakeRank.returns) -> None:
        self.clock = FakeClock()
        self.began = self.clock.now
        self.ranks = [FakeRank(index, self, pid=1000 + index) for index in range(size)]
        self.spawned: list[RankSetup] = []
        self.killed: list[RankHandle] = []
        self.lost = ""
        self.ended = 0
        self.closed = False
        self._reader = reader
        self._happenings: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    # what a test makes happen

    @property
    def seconds(self) -> float:
        """How much time has passed, to the millisecond."""
        return round(self.clock.now - self.began, 3)

    def at(self, seconds: float, do: Callable[..., object], *args: Any, **more: Any) -> None:
        """Have something happen so many seconds after the beginning, while somebody waits."""
        self.at_time(self.began + seconds, lambda: do(*args, **more))

    def at_time(self, time: float, do: Callable[[], object]) -> None:
        if time < math.inf:
            heapq.heappush(self._happenings, (time, next(self._order), do))

    def lose(self, why: str) -> None:
        """Lose what ranks are started from, and all ranks with it."""
        self.lost = why
        for rank in self.ranks:
            rank.dies(int(signal.SIGKILL), server=why)

    @property
    def next(self) -> float:
        return self._happenings[0][0] if self._happenings else math.inf

    def happen(self, time: float) -> None:
        """Move the clock, and let happen what is due by then."""
        self.clock.now = max(self.clock.now, time)
        while self._happenings and self._happenings[0][0] <= time:
            heapq.heappop(self._happenings)[2]()

    # Launcher

    @property
    def alive(self) -> bool:
        return not self.lost

    def spawn(self, setups: Sequence[RankSetup]) -> list[FakeRank]:
        if self.lost:
            raise ServerLost(self.lost)
        self.spawned += setups
        if setups[0].reads:
            return [FakeRank(0, self, pid=2000, on_frame=self._reader)]
        for rank in self.ranks:
            rank.answers(answers.Ready(0, 3))
        return self.ranks

    def listen(self, ranks: Sequence[RankHandle], to: Collection[Heard]) -> FakeListener:
        return FakeListener(self, [rank for rank in ranks if isinstance(rank, FakeRank)], to)

    def refresh(self, ranks: Sequence[RankHandle]) -> None:
        pass

    def poll(self) -> None:
        self.happen(self.clock.now)

    def kill(self, rank: RankHandle) -> None:
        assert isinstance(rank, FakeRank)
        if rank.exit is None:
            self.killed.append(rank)
            self.at_time(self.clock.now + 0.001, lambda: rank.dies(int(signal.SIGKILL)))

    def close(self) -> None:
        self.closed = True


def is_a_launcher(launcher: FakeLauncher) -> Launcher:
    """For the type checker: a fake launcher is one, and so are its ranks and its listeners."""
    return launcher


def record(
    op: str = "all_reduce", size: Sequence[int] = (4,), *, seq: int = 1, done: bool = False, group: str = "0"
) -> dict[str, Any]:
    """An entry of the Flight Recorder, as a monitor has it."""
    return {
        "group": group,
        "seq": seq,
        "p2p": False,
        "op": op,
        "sizes": [list(size)],
        "dtypes": ["Float"],
        "done": done,
        "timeout_s": 1800.0,
        "time_ns": 0,
    }


def snapshot(*records: dict[str, Any], frames: Sequence[tuple[str, int, str]] = (), called: str = "") -> dict[str, Any]:
    """A monitor's answer about a rank with one thread, which is in these frames, below a test's."""
    thread = {
        "name": "MainThread",
        "native": 1,
        "main": True,
        "called": called,
        "timeout": None,
        "frames": [LOOP, TEST, *frames],
    }
    return {"threads": [thread], "records": list(records), "complete": True, "groups": {}}


def in_collective(*records: dict[str, Any]) -> dict[str, Any]:
    """A monitor's answer about a rank that waits in a collective."""
    return snapshot(*records, frames=[ALL_REDUCE])
