"""The handle of a rank on another host: what its agent has told, and what the agent is asked for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from harness.cluster import messages
from harness.safe_io.shown import printable
from harness.worlds import wire
from harness.worlds.blackbox import Issued
from harness.worlds.handle import Frame, Heard, KernelState, Place
from harness.worlds.launch import Exit

_MOST_KEPT = 128


class Above(Protocol):
    """The host of a rank, as its handle uses it; see :class:`~harness.cluster.host.Host`."""

    @property
    def lost(self) -> str:
        """What became of it; empty while it can be used."""
        ...

    def send(self, message: messages.Message, payload: Sequence[bytes | bytearray] = ()) -> None:
        """Send a message to its agent."""
        ...

    def pass_on(self, token: int, frame: Sequence[bytes]) -> None:
        """Send a frame to a rank."""
        ...

    def time_here(self, time_ns: int) -> int:
        """Convert a time on its clock to ours."""
        ...

    @property
    def place(self) -> Place:
        """Its name, and how exact its times are."""
        ...

    def forget(self, token: int) -> None:
        """Release a rank."""
        ...


@dataclass
class RemoteBox:
    """A rank's black box, as its agent has told; see :class:`~harness.worlds.handle.Box`."""

    phase: str = "starting"
    count: int = 0
    whole: bool = True
    reached: tuple[int, int] = (0, 0)
    issued: deque[Issued] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))

    def recent(self, most: int = 8) -> list[Issued]:
        """Return the last collectives that are known, oldest first."""
        return list(self.issued)[-most:]


@dataclass(eq=False)
class RemoteRank:
    """The handle of a rank on another host; see :class:`~harness.worlds.handle.RankHandle`.

    ``token``: the name by which its agent knows it.
    """

    index: int
    token: int
    host: Above
    pid: int = 0
    exit: Exit | None = None
    box: RemoteBox = field(default_factory=RemoteBox)
    begun: str = ""
    output_closed: bool = False
    monitor_lost: bool = False
    closed: bool = False
    _frames: deque[Frame] = field(default_factory=deque)
    _broken: wire.WireError | None = None
    _printed: bytearray = field(default_factory=bytearray)
    _crash: str = ""
    _kernel: KernelState = field(default_factory=KernelState)
    _asked: bool = False
    _snapshot: dict[str, Any] | None = None
    _alarms: dict[int, bool] = field(default_factory=dict)
    _dumping: bool = False

    def send(self, frame: list[bytes], timeout: float = 30.0) -> None:
        if self.exit is not None or self.host.lost:
            raise wire.WireError("the peer has gone")
        self.host.pass_on(self.token, frame)

    def receive(self) -> Frame | None:
        if self._frames:
            return self._frames.popleft()
        if self._broken is not None:
            raise self._broken
        return None

    @property
    def more(self) -> bool:
        return bool(self._frames)

    def take_output(self) -> bytes:
        printed, self._printed = bytes(self._printed), bytearray()
        return printed

    def lend(self, stdin: int, stdout: int) -> None:
        raise wire.WireError("a rank on another host can't use this terminal")

    # evidence

    def ask_snapshot(self) -> None:
        if not self._asked and not self.monitor_lost and self.exit is None:
            self._asked = True
            self.host.send(messages.Ask([self.token]))

    def take_snapshot(self) -> dict[str, Any] | None:
        if self.monitor_lost or self.exit is not None:
            return {}
        answer, self._snapshot = self._snapshot, None
        return answer

    def ask_stack(self) -> None:
        self.crash_text()
        if self.exit is None and not self._dumping:
            self._dumping = True
            self.host.send(messages.Dump([self.token]))

    def stack_is_there(self) -> bool:
        return self.exit is not None or not self._dumping

    def crash_text(self) -> str:
        text, self._crash = self._crash, ""
        return text

    def kernel_state(self) -> KernelState:
        return self._kernel

    def alarms(self, threads: Iterable[tuple[int, bool]]) -> dict[int, bool]:
        return {native: self._alarms[native] for native, _ in threads if native in self._alarms}

    def time_here(self, time_ns: int) -> int:
        return self.host.time_here(time_ns)

    @property
    def place(self) -> Place:
        return self.host.place

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.host.forget(self.token)

    # what its agent tells

    def has(self, what: Heard) -> bool:
        """Return whether there is news of this kind."""
        if what is Heard.MESSAGE:
            return bool(self._frames) or self._broken is not None
        if what is Heard.OUTPUT:
            return bool(self._printed) or self.output_closed
        if what is Heard.SNAPSHOT:
            return self._snapshot is not None or self.monitor_lost
        return self.stack_is_there()

    def unknown(self) -> None:
        """Forget the kernel's state, because the agent does not tell it."""
        self._kernel = KernelState()

    def told(self, message: messages.Message, payload: bytearray) -> None:
        """Note what its agent tells.  Errors: ValueError for what no agent would tell."""
        match message:
            case messages.Started():
                self.pid = message.pid
            case messages.Frame():
                if not message.sizes or sum(message.sizes) != len(payload):
                    raise ValueError("a frame whose parts have other sizes than it says")
                self._frames.append(_cut(payload, message.sizes))
            case messages.Broken():
                self._broken = (wire.NotAFrame if message.garbage else wire.WireError)(message.why)
            case messages.Printed():
                self._printed += payload
                self.output_closed = self.output_closed or message.end
            case messages.Snapshot():
                self._asked = False
                self._alarms = message.alarms
                self.monitor_lost = self.monitor_lost or message.lost
                answer = json.loads(bytes(payload)) if payload else {}
                self._snapshot = answer if isinstance(answer, dict) else {}
            case messages.Crashed():
                self._crash += payload.decode(errors="replace")
            case messages.Dumped():
                self._dumping = False

    def seen(self, state: messages.State) -> None:
        """Note what its host knows of it."""
        self._kernel = KernelState(state.main, state.ticks, state.threads, tuple(map(printable, state.unanswered)))
        self.begun = state.begun
        box = self.box
        box.phase, box.count, box.whole, box.reached = state.phase, state.count, state.whole, state.reached
        box.issued.extend(Issued(*msgspec.structs.astuple(noted)) for noted in state.issued)


def _cut(payload: bytearray, sizes: Sequence[int]) -> Frame:
    """Return the body and the buffers of a frame."""
    if len(sizes) == 1:
        return payload, []
    parts, view, begin = [], memoryview(payload), 0
    for size in sizes:
        parts.append(bytearray(view[begin : begin + size]))
        begin += size
    return parts[0], parts[1:]
