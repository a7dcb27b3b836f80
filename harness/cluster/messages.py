"""The messages between the controller and an agent, as data.

A message is a struct and a payload of raw bytes.  Nothing here is a pickle: the pickles for ranks, and theirs, are
payloads that an agent passes on unread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from harness.worlds.rank import RankSetup

VERSION = 4
"""The version of this protocol.  A controller refuses an agent with another one."""


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message.  Times are seconds or nanoseconds on the monotonic clock of the host that sends it."""


# to the agent


class Begin(Message):
    """The first message of a controller: get ready to start ranks.

    ``private``, ``start``: as for a :class:`~harness.worlds.local.LocalLauncher`.
    """

    private: bool
    start: str


class Open(Message):
    """Make the listening socket of a rendezvous, on the address at which this connection ends.

    ``number``: of the answer, :class:`Opened` or :class:`Refused`; ``backlog``: of the socket.
    """

    number: int
    backlog: int


class Spawn(Message):
    """Start ranks.  The answer is :class:`Spawned` or :class:`Refused`, of this ``number``.

    ``tokens``: names for the ranks, unique in this connection; ``rendezvous``: the number of the :class:`Open` whose
    socket rank 0 inherits; 0 for none.
    """

    number: int
    tokens: list[int]
    setups: list[RankSetup]
    rendezvous: int


class Pass(Message):
    """Pass a frame, which is the payload, to ranks."""

    tokens: list[int]


class Kill(Message):
    """Kill a rank, without an answer."""

    token: int


class Forget(Message):
    """Release what is known of a rank."""

    token: int


class Ask(Message):
    """Ask for ranks' snapshots; each answers with :class:`Snapshot`."""

    tokens: list[int]


class Dump(Message):
    """Ask for ranks' stacks from a signal handler; each answers with :class:`Dumped`."""

    tokens: list[int]


class Look(Message):
    """Ask what the host knows of ranks.  The answer is :class:`Seen`, of this ``number``."""

    number: int
    tokens: list[int]


class Survey(Message):
    """Ask which devices the host has, as ranks with these variables would see them.

    The answer is :class:`Devices`, of this ``number``.  ``kind``, ``imports``, ``mask``: as for
    :func:`harness.devices.inventory`; without a ``kind``, of whichever accelerator there is.
    """

    number: int
    kind: str
    imports: list[str]
    mask: str
    env: dict[str, str]


class Execute(Message):
    """Execute Python with these arguments on the host; see :mod:`harness.cluster.errands`.

    Answered with :class:`Streamed`, :class:`Output` and :class:`Exited` of this ``number``.  ``{folder}`` in arguments
    and variables is a folder of its own.  ``cwd``: where it runs, if there is such a folder.
    """

    number: int
    arguments: list[str]
    env: dict[str, str]
    cwd: str


class Stream(Message):
    """The payload is for the stream of what is executed.  ``end``: nothing follows."""

    number: int
    end: bool


# to the controller


class Hello(Message):
    """The first message of an agent: what it is.  ``facts``: see :mod:`harness.cluster.facts`."""

    version: int
    facts: dict[str, Any]


class Opened(Message):
    """A rendezvous listens on this address."""

    number: int
    host: str
    port: int


class Spawned(Message):
    """Ranks have been started; ``network``: which network they are on, in words; ``interfaces``: see
    :func:`~harness.cluster.interfaces.chosen`, empty if all ranks of their world are on this host."""

    number: int
    network: str
    interfaces: str = ""


class Refused(Message):
    """What was asked for can't be done."""

    number: int
    why: str


class Devices(Message):
    """The devices of the host, as in :class:`harness.devices.Inventory`.

    ``name``: what their driver calls them; ``why``: why there are none of the kind that was asked for; empty if there
    are.
    """

    number: int
    kind: str
    devices: list[str]
    keys: list[str]
    name: str
    why: str


class Streamed(Message):
    """The payload is from the stream of what is executed; the first one is empty.  ``end``: nothing follows."""

    number: int
    end: bool


class Output(Message):
    """What is executed has printed the payload."""

    number: int


class Exited(Message):
    """What is executed has ended, with this status as ``subprocess`` has it; all that it left has been sent before."""

    number: int
    status: int


class Started(Message):
    """The process id of a rank."""

    token: int
    pid: int


class Frame(Message):
    """A frame of a rank; the payload is its body and its buffers, which have these ``sizes``."""

    token: int
    sizes: list[int]


class Broken(Message):
    """No frame will come from a rank any more.  ``garbage``: whether it sent something that is not a frame."""

    token: int
    why: str
    garbage: bool


class Printed(Message):
    """What a rank has printed is the payload.  ``end``: whether nobody can print any more."""

    token: int
    end: bool


class Snapshot(Message):
    """A monitor's answer is the payload, as JSON; empty if it can't be read or will never come.

    ``alarms``: by the kernel's id of a thread, whether it may wake up by itself; ``lost``: as
    :attr:`RankHandle.monitor_lost <harness.worlds.handle.RankHandle.monitor_lost>`.
    """

    token: int
    alarms: dict[int, bool]
    lost: bool


class Crashed(Message):
    """What faulthandler has written in a rank is the payload."""

    token: int


class Dumped(Message):
    """The stacks that were asked for have been written, or never will be."""

    token: int


class Noted(msgspec.Struct, frozen=True, array_like=True):
    """A collective in a black box; see :class:`~harness.worlds.blackbox.Issued`."""

    number: int
    time_ns: int
    op: str
    tensors: str
    group: str
    where: str


class State(msgspec.Struct, frozen=True, array_like=True):
    """A rank as its host sees it: its process in the kernel, and its black box.

    ``issued``: collectives that the controller has not been told of yet; ``unanswered``: other hosts, as in
    :class:`~harness.worlds.handle.KernelState`.
    """

    token: int
    main: str
    ticks: int
    threads: list[str]
    phase: str
    count: int
    whole: bool
    reached: tuple[int, int]
    begun: str
    issued: list[Noted]
    unanswered: list[str]


class Seen(Message):
    """What the host knows of ranks.  ``time_ns``: when it looked."""

    number: int
    time_ns: int
    states: list[State]


class Ended(Message):
    """A rank has ended; see :class:`~harness.worlds.launch.Exit`.  Everything that it left has been sent before."""

    token: int
    status: int
    time_ns: int
    maxrss_kib: int
    left: list[str]
    server: str
    state: State


TO_AGENT = Begin | Open | Spawn | Pass | Kill | Forget | Ask | Dump | Look | Survey | Execute | Stream
TO_CONTROLLER = (
    Hello
    | Opened
    | Spawned
    | Refused
    | Devices
    | Streamed
    | Output
    | Exited
    | Started
    | Frame
    | Broken
    | Printed
    | Snapshot
    | Crashed
    | Dumped
    | Seen
    | Ended
)
