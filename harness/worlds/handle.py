"""The interface between a world and the place where its ranks run: a launcher, the handles of ranks, and a clock.

A world, its wait, its watchdog and its post-mortem use ranks only through these protocols, so ranks may run on another
host, or be made up by a test.  No protocol exposes a descriptor of a rank or a file that it shares, and nobody signals
a process by the id that a handle shows.  Times are seconds or nanoseconds of the launcher's :class:`Clock`.

:mod:`harness.worlds.local` is the implementation for this host.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from harness.worlds.blackbox import Issued
from harness.worlds.launch import Exit
from harness.worlds.network import Refusal
from harness.worlds.rank import RankSetup

Frame = tuple[bytes | bytearray, list[bytearray]]
"""A frame that has arrived: its body and its buffers."""


class Clock(Protocol):
    """A monotonic clock.  The module :mod:`time` is one."""

    def monotonic(self) -> float:
        """Return the time now, in seconds."""
        ...

    def monotonic_ns(self) -> int:
        """Return the time now, in nanoseconds, on the same clock."""
        ...


class KernelState(NamedTuple):
    """A rank's process as the kernel of its host sees it."""

    main: str = ""
    """State of its main thread, a letter of :manpage:`proc(5)`: ``S`` for sleeping, ``R`` for running, ``T`` for
    stopped by a signal.  Empty if the process has gone."""
    ticks: int = 0
    """CPU time used by all its threads, in ticks of 10 ms."""
    threads: Sequence[str] = ()
    """States of all its threads."""
    unanswered: Sequence[str] = ()
    """Addresses of other hosts that do not acknowledge what it has sent them."""

    @property
    def wants_to_run(self) -> bool:
        """Whether a thread has a core or waits for one."""
        return "R" in self.threads or "D" in self.threads


class Box(Protocol):
    """The controller's view of a rank's black box, which outlives the rank; see :mod:`harness.worlds.blackbox`."""

    @property
    def phase(self) -> str:
        """One of :data:`~harness.worlds.blackbox.PHASES`, or ``unknown``."""
        ...

    @property
    def reached(self) -> tuple[int, int]:
        """How far its function says that it has come; see :meth:`~harness.worlds.rank.Rank.progress`."""
        ...

    @property
    def count(self) -> int:
        """The number of collectives that the rank has issued from Python."""
        ...

    @property
    def whole(self) -> bool:
        """Whether :meth:`recent` can still return all of them."""
        ...

    def recent(self, most: int = 8) -> list[Issued]:
        """Return the last collectives, oldest first.  Times are on the rank's own clock."""
        ...


class RankHandle(Protocol):
    """The controller's end of one rank.

    No method waits for the rank, except :meth:`send`, for at most its timeout.  To wait, ask the launcher for a
    :class:`Listener`.  A method raises only the errors that it documents: a rank that has gone just sends nothing more.
    """

    @property
    def index(self) -> int:
        """Its rank in the world."""
        ...

    @property
    def pid(self) -> int:
        """Its process id on the host where it runs, which need not be this one; 0 until it is known.  Only for display
        and for tests."""
        ...

    @property
    def exit(self) -> Exit | None:
        """How its process ended; None until a listener or :meth:`Launcher.poll` has noticed the end."""
        ...

    @property
    def box(self) -> Box:
        """Its black box."""
        ...

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        """Send a frame, as its parts (:func:`~harness.worlds.wire.parts_of`) or as one part.

        Errors: :class:`~harness.worlds.wire.WireError` if the rank has gone, or does not read for ``timeout`` seconds.
        """
        ...

    def receive(self) -> Frame | None:
        """Take the next frame that has arrived completely; None if there is none.

        Errors: :class:`~harness.worlds.wire.NotAFrame` for bytes that are not a frame, and
        :class:`~harness.worlds.wire.WireError` once the connection is closed and every complete frame was taken.
        """
        ...

    @property
    def more(self) -> bool:
        """Whether the next frame may have been read already, so that no listener reports it."""
        ...

    @property
    def begun(self) -> str:
        """How much of an unfinished frame has arrived, in words; empty between two frames."""
        ...

    def take_output(self) -> bytes:
        """Take what the rank has printed since the last call.  May leave some for the next call."""
        ...

    @property
    def output_closed(self) -> bool:
        """Whether :meth:`take_output` has returned everything, and nobody can print any more."""
        ...

    def lend(self, stdin: int, stdout: int) -> None:
        """Lend the rank's debugger a terminal, in answer to the :class:`~harness.worlds.answers.Debug` that it sent.

        ``stdin``, ``stdout``: descriptors of the controller's own terminal, lent until the rank sends ``Debugged``.  A
        handle whose rank runs elsewhere copies bytes between them and the rank.

        Errors: :class:`~harness.worlds.wire.WireError` if the rank has gone.
        """
        ...

    # evidence

    def ask_snapshot(self) -> None:
        """Ask the rank's monitor thread for a :func:`~harness.worlds.monitor.snapshot`: stacks, collectives, groups."""
        ...

    def take_snapshot(self) -> dict[str, Any] | None:
        """Take the monitor's answer: None until it has arrived, empty if it can't be read or will never come."""
        ...

    @property
    def monitor_lost(self) -> bool:
        """Whether something other than the monitor wrote to its channel, so that no snapshot can be trusted."""
        ...

    def ask_stack(self) -> None:
        """Make the rank dump its Python stacks from a signal handler, which does not need its interpreter lock."""
        ...

    def stack_is_there(self) -> bool:
        """Return whether the stacks that :meth:`ask_stack` asked for have been written, or never will be."""
        ...

    def crash_text(self) -> str:
        """Return what faulthandler has written since the last call."""
        ...

    def kernel_state(self) -> KernelState:
        """Return the rank's process as its kernel sees it now."""
        ...

    def alarms(self, threads: Iterable[tuple[int, bool]]) -> dict[int, bool]:
        """Return, by the kernel's id, whether each thread may wake up by itself, judged by its current system call.

        ``threads``: for each thread, the kernel's id as in a snapshot, and whether it is the main thread.

        A thread that reads, or waits for a lock without a time limit, does not wake up by itself; one in any other call
        may.  The main thread's frames tell more, so for it only a sleep or a wait for a child counts.  Threads about
        which nothing is known are left out.
        """
        ...

    def time_here(self, time_ns: int) -> int:
        """Convert a time on the rank's monotonic clock to the launcher's clock, both in nanoseconds."""
        ...

    @property
    def place(self) -> Place:
        """The rank's host."""
        ...

    def close(self) -> None:
        """Release everything that this handle holds.  May be called twice."""
        ...


class Place(NamedTuple):
    """The host of a rank."""

    name: str = ""
    """For people; empty for the launcher's own."""
    error_ns: int = 0
    """By how much times on its clock may be wrong after :meth:`RankHandle.time_here`."""


HERE = Place()
"""The launcher's own host."""


class Heard(enum.Enum):
    """A kind of news about a rank."""

    MESSAGE = "message"
    """:meth:`RankHandle.receive` has something to return or to raise."""
    OUTPUT = "output"
    """:meth:`RankHandle.take_output` has something to return, or the output has been closed."""
    SNAPSHOT = "snapshot"
    """:meth:`RankHandle.take_snapshot` may have an answer."""
    STACK = "stack"
    """:meth:`RankHandle.stack_is_there` returns True."""


class News(NamedTuple):
    """Something that can be taken from a rank."""

    what: Heard
    rank: RankHandle


class Listener(Protocol):
    """Waits for news of several ranks at once."""

    def wait(self, seconds: float) -> Sequence[News]:
        """Wait until there is news of any rank, and return it.

        The next call reports again what has not been taken.  The end of a rank is not reported as news: its
        :attr:`RankHandle.exit` is set, and that ends the wait, too.

        ``seconds``: how long to wait at most; 0 only looks; :data:`math.inf` is allowed.  May return early without
        news, so callers check the clock.

        Also makes sure that silence is not the launcher's own fault: if the launcher has lost its ranks, they get an
        :class:`~harness.worlds.launch.Exit` whose ``server`` says why.
        """
        ...

    def ignore(self, rank: RankHandle, what: Heard) -> None:
        """Stop reporting this news of a rank, because it is closed or was taken.  May be called twice."""
        ...


class Launcher(Protocol):
    """Starts ranks somewhere, waits for them, and reports how they end."""

    @property
    def clock(self) -> Clock:
        """The clock of all times here, by which listeners wait, too."""
        ...

    @property
    def alive(self) -> bool:
        """Whether ranks can be started, as far as is known."""
        ...

    @property
    def lost(self) -> str:
        """Why no rank can be started any more, in words; empty if ranks can be started."""
        ...

    @property
    def network(self) -> str:
        """Which network ranks are on, in words; empty until it is known."""
        ...

    @property
    def interfaces(self) -> Sequence[str]:
        """The network interface by which ranks of each host reached others, in words; none on one host."""
        ...

    @property
    def refusal(self) -> Refusal:
        """Why ranks can't have a network of their own; false if they have one.  May wait until that is known."""
        ...

    def spawn(self, setups: Sequence[RankSetup]) -> Sequence[RankHandle]:
        """Start a rank for each setup.  Returns handles at once, in the same order; ranks report when they are ready.

        Errors: :class:`~harness.worlds.launch.LaunchError` if ranks can't be started here;
        :class:`~harness.worlds.launch.ServerLost` if they could be started before, and a new launcher may still work.
        """
        ...

    def listen(self, ranks: Sequence[RankHandle], to: Collection[Heard]) -> Listener:
        """Return a listener to these kinds of news of these ranks of this launcher.  It need not be closed."""
        ...

    def refresh(self, ranks: Sequence[RankHandle]) -> None:
        """Bring the :meth:`RankHandle.kernel_state` and the :attr:`RankHandle.box` of ranks up to date.

        Without a call, a launcher of ranks on another host may return what it knew last.  May wait for that host, for
        about a second.  A rank about which nothing new is known then has no kernel state.
        """
        ...

    def poll(self) -> None:
        """Set the :attr:`RankHandle.exit` of ranks that have ended, without waiting."""
        ...

    def kill(self, rank: RankHandle) -> None:
        """Kill a rank and everything that it started, without waiting for its end."""
        ...

    def close(self) -> None:
        """Kill all ranks and stop."""
        ...
