"""The seam between a world and the place where its ranks run: a launcher, the handles of its ranks, and its clock.

A world, its wait, its watchdog and its post-mortem use ranks through these protocols only, so that ranks may run on
another host, or be made up by a test.  Nothing here is a descriptor of a rank or a file that it shares, and nobody
signals a process by the id that a handle shows.  Times are seconds or nanoseconds of the launcher's :class:`Clock`.

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
"""A frame that has arrived: its body, and the buffers beside it."""


class Clock(Protocol):
    """A monotonic clock.  The module :mod:`time` is one."""

    def monotonic(self) -> float:
        """Now, in seconds."""
        ...

    def monotonic_ns(self) -> int:
        """Now, in nanoseconds, on the same clock."""
        ...


class KernelState(NamedTuple):
    """A rank's process as the kernel of its host sees it."""

    main: str = ""
    """State of its main thread, a letter of :manpage:`proc(5)`: ``S`` sleeps, ``R`` runs, ``T`` is stopped by a signal.
    Empty if the process has gone."""
    ticks: int = 0
    """CPU time used by all its threads, in ticks of 10 ms."""
    threads: Sequence[str] = ()
    """States of all its threads."""

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
    def count(self) -> int:
        """How many collectives the rank has issued from Python."""
        ...

    @property
    def whole(self) -> bool:
        """Whether :meth:`recent` can still give all of them."""
        ...

    def recent(self, most: int = 8) -> list[Issued]:
        """The last collectives, oldest first.  Times are of the rank's own clock."""
        ...


class RankHandle(Protocol):
    """The controller's end of one rank.

    No method waits for the rank, except :meth:`send` for at most its timeout.  To wait, ask the launcher for a
    :class:`Listener`.  Unless it says so, no method raises: a rank that has gone has nothing more to say.
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
        """How its process ended; None until a listener or :meth:`Launcher.poll` has noticed."""
        ...

    @property
    def box(self) -> Box:
        """Its black box."""
        ...

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        """Write the parts of a frame (:func:`~harness.worlds.wire.parts_of`), or the whole frame as one part.

        Errors: :class:`~harness.worlds.wire.WireError` if the rank has gone, or does not read for ``timeout`` seconds.
        """
        ...

    def receive(self) -> Frame | None:
        """Take the next frame that has arrived as a whole; None if there is none.

        Errors: :class:`~harness.worlds.wire.NotAFrame` for bytes that are no frame, and
        :class:`~harness.worlds.wire.WireError` once the connection is closed and every whole frame was taken.
        """
        ...

    @property
    def more(self) -> bool:
        """Whether the next frame may be there already, so that no listener tells of it."""
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
        """Whether :meth:`take_output` has given everything, and nobody can print any more."""
        ...

    def lend(self, stdin: int, stdout: int) -> None:
        """Give the rank's debugger a terminal: answers the :class:`~harness.worlds.answers.Debug` that it has sent.

        ``stdin``, ``stdout``: descriptors of the controller's own terminal, lent until the rank says ``Debugged``.  A
        handle whose rank runs elsewhere copies bytes between them and the rank.

        Errors: :class:`~harness.worlds.wire.WireError` if the rank has gone.
        """
        ...

    # evidence

    def ask_snapshot(self) -> None:
        """Ask the rank's monitor thread for a :func:`~harness.worlds.monitor.snapshot`: stacks, collectives, groups."""
        ...

    def take_snapshot(self) -> dict[str, Any] | None:
        """The monitor's answer; None until it is there; empty if nothing can be read of it, or it never comes."""
        ...

    @property
    def monitor_lost(self) -> bool:
        """Whether something other than the monitor wrote into its channel, so that no snapshot can be trusted."""
        ...

    def ask_stack(self) -> None:
        """Make the rank dump its Python stacks from a signal handler, which works without its interpreter lock."""
        ...

    def stack_is_there(self) -> bool:
        """Whether the stacks that :meth:`ask_stack` asked for have been written, or never will be."""
        ...

    def crash_text(self) -> str:
        """What faulthandler has written since the last call."""
        ...

    def kernel_state(self) -> KernelState:
        """The rank's process as its kernel sees it now."""
        ...

    def alarms(self, threads: Iterable[tuple[int, bool]]) -> dict[int, bool]:
        """Which threads may wake up by themselves, by the system calls that they are in.

        ``threads``: the kernel's id of each, as a snapshot has it, and whether it is the main thread.  Waiting for a
        lock without a time limit, or reading, is no alarm; any other call is.  Of the main thread, whose frames tell
        more, only a sleep and a wait for a child are alarms.  A thread of which nothing is known is left out.
        """
        ...

    def time_here(self, time_ns: int) -> int:
        """Convert a time on the rank's monotonic clock to the launcher's clock, both in nanoseconds."""
        ...

    def close(self) -> None:
        """Give back everything that this handle holds.  May be called twice."""
        ...


class Heard(enum.Enum):
    """What a listener can tell of a rank."""

    MESSAGE = "message"
    """:meth:`RankHandle.receive` has something to take or to raise."""
    OUTPUT = "output"
    """:meth:`RankHandle.take_output` has something to take, or the output has been closed."""
    SNAPSHOT = "snapshot"
    """:meth:`RankHandle.take_snapshot` may have an answer."""
    STACK = "stack"
    """:meth:`RankHandle.stack_is_there`."""


class News(NamedTuple):
    """Something that can be taken from a rank."""

    what: Heard
    rank: RankHandle


class Listener(Protocol):
    """Waits for some ranks at once."""

    def wait(self, seconds: float) -> Sequence[News]:
        """Wait until there is news of any rank, and return it.

        What has not been taken is told again by the next call.  How ranks end is not told as news: their
        :attr:`RankHandle.exit` is set, and that ends the wait too.

        ``seconds``: how long to wait at most; 0 only looks; :data:`math.inf` is allowed.  May return sooner without
        news, so callers look at the clock.  Also sees to it that silence is not the launcher's own fault: where the
        launcher has lost its ranks, they get an :class:`~harness.worlds.launch.Exit` whose ``server`` says why.
        """
        ...

    def ignore(self, rank: RankHandle, what: Heard) -> None:
        """Tell no more of this: it is closed, or was taken.  May be called twice."""
        ...


class Launcher(Protocol):
    """Starts ranks somewhere, waits for them, and tells how they end."""

    @property
    def clock(self) -> Clock:
        """The clock of all times here, and the one by which a listener waits."""
        ...

    @property
    def alive(self) -> bool:
        """Whether ranks can be started, as far as that is known."""
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
    def refusal(self) -> Refusal:
        """Why ranks can't have a network of their own; false if they have one.  May wait until that is known."""
        ...

    def spawn(self, setups: Sequence[RankSetup]) -> Sequence[RankHandle]:
        """Start a rank for each set-up.  Returns at once, in the same order; the ranks report for themselves.

        Errors: :class:`~harness.worlds.launch.LaunchError` if ranks can't be started here;
        :class:`~harness.worlds.launch.ServerLost` if they could before, and a new launcher may do it.
        """
        ...

    def listen(self, ranks: Sequence[RankHandle], to: Collection[Heard]) -> Listener:
        """A listener to these kinds of news of these ranks of this launcher.  Nothing has to be given back."""
        ...

    def poll(self) -> None:
        """Note which ranks have ended, without waiting: sets :attr:`RankHandle.exit`."""
        ...

    def kill(self, rank: RankHandle) -> None:
        """Kill a rank and all that it started, without waiting for its end."""
        ...

    def close(self) -> None:
        """Kill all ranks and stop."""
        ...
