"""The controller's end of one agent: the connection to it, its facts, its clock, and its ranks."""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.cluster import credentials, messages
from harness.cluster.channel import Channel, tuned
from harness.cluster.facts import differences
from harness.cluster.interfaces import plain
from harness.cluster.messages import TO_CONTROLLER, Message
from harness.cluster.remote_rank import RemoteRank
from harness.safe_io.shown import printable
from harness.safe_io.waiting import readable
from harness.worlds.handle import Place
from harness.worlds.launch import Exit, LaunchError
from harness.worlds.rank import RankSetup

CONNECTING = 10.0
"""Seconds for the connection to an agent, and for its first message."""
_KERNEL_LATER = 20.0
"""Seconds by which the kernel gives a connection up later than :meth:`Host.check`, which knows when nobody listened."""
_DRIFT = 1e-4
"""Seconds a second by which the clocks of two hosts may drift apart; they are said to be within 20 to 50 millionths."""


class HostRefused(LaunchError):
    """The error for a host whose ranks can't be used; it says which one, why, and what to do."""


class Host:
    """A host of ranks.

    ``address``: of its agent; ``channel``: to it, from :func:`connect`; ``facts``: what the agent says of its host;
    ``patience``: the host is given up after so many seconds without an answer.
    """

    def __init__(
        self, address: tuple[str, int], channel: Channel, facts: Mapping[str, Any], patience: float = 10.0
    ) -> None:
        self.address = address
        self.facts = facts
        self._channel = channel
        self._patience = patience
        self._ranks: dict[int, RemoteRank] = {}
        self._frame: Sequence[bytes] | None = None
        self._readers: list[int] = []
        """The ranks that get that frame, by their tokens."""
        self._next = 1
        self._answers: dict[int, Any] = {}
        self._errands: list[tuple[messages.Streamed | messages.Output | messages.Exited, bytearray]] = []
        self._asked: dict[int, int] = {}
        """By number of a :class:`~messages.Look`, when it was sent."""
        self._heard = time.monotonic()
        self._next_question = 0.0
        self._offset_ns = 0
        self._offset_error_ns = 1 << 62
        """By how much the offset was wrong when it was measured."""
        self._measured = 0.0
        self.interfaces = ""
        """The interface by which its ranks last reached other hosts (:func:`~harness.cluster.interfaces.chosen`)."""
        self.ended = 0
        """How many of its ranks have ended."""
        self.lost = ""
        """What became of it, once it can't be used any more; empty until then."""

    @property
    def name(self) -> str:
        """Its name for people: its own, and where its agent listens."""
        host, port = self.address
        own = printable(str(self.facts.get("host", "")))[:60]
        return f"host {own} ({f'[{host}]' if ':' in host else host}:{port})"

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._channel.fileno()

    @property
    def channel(self) -> Channel:
        """The connection."""
        return self._channel

    def send(self, message: Message, payload: Sequence[bytes | bytearray] = ()) -> None:
        """Send a message to the agent.  What becomes of it is noticed later."""
        self._pass_on()
        self._channel.send(message, payload)

    def pass_on(self, token: int, frame: Sequence[bytes]) -> None:
        """Send a frame to a rank, soon: the same frame for several ranks, one after the other, travels once."""
        if self._frame is not frame:
            self._pass_on()
            self._frame = frame
        self._readers.append(token)

    def _pass_on(self) -> None:
        if self._frame is not None:
            self._channel.send(messages.Pass(self._readers), self._frame)
            self._frame, self._readers = None, []

    # ranks

    def open(self, backlog: int, timeout: float) -> tuple[int, str, int]:
        """Open a rendezvous; returns its number, host and port.  Errors: LaunchError."""
        number = self._number()
        self.send(messages.Open(number, backlog))
        opened: messages.Opened = self._answer(number, timeout)
        return number, plain(opened.host), opened.port

    def spawn(self, setups: Sequence[RankSetup], rendezvous: int = 0) -> tuple[int, list[RemoteRank]]:
        """Ask for ranks; returns the number that :meth:`spawned` takes, and their handles."""
        number = self._number()
        ranks = [RemoteRank(setup.index, self._number(), self) for setup in setups]
        self._ranks.update((rank.token, rank) for rank in ranks)
        self.send(messages.Spawn(number, [rank.token for rank in ranks], list(setups), rendezvous))
        return number, ranks

    def spawned(self, number: int, timeout: float) -> str:
        """Wait until ranks have been started; returns the network that they are on, in words.  Errors: LaunchError."""
        answer: messages.Spawned = self._answer(number, timeout)
        if answer.interfaces:
            self.interfaces = printable(answer.interfaces)[:200]
        return answer.network

    def forget(self, token: int) -> None:
        """Release a rank."""
        if self._ranks.pop(token, None) is not None:
            self.send(messages.Forget(token))

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _answer(self, number: int, timeout: float, what: str = "start ranks") -> Any:
        """Wait for the answer to a question.  Errors: LaunchError if it is a refusal, or does not come."""
        until = time.monotonic() + timeout
        while number not in self._answers:
            if self.lost:
                raise LaunchError(self.lost)
            if (left := until - time.monotonic()) <= 0:
                raise LaunchError(f"{self.name} did not {what} within {timeout:g} s")
            wait([self], min(left, 1.0))
            self.check()
        answer = self._answers.pop(number)
        if isinstance(answer, messages.Refused):
            raise LaunchError(f"{self.name}: {printable(answer.why)}")
        return answer

    def survey(self, kind: str, imports: Sequence[str], mask: str, env: Mapping[str, str]) -> int:
        """Ask which devices the host has; returns the number that :meth:`surveyed` takes."""
        number = self._number()
        self.send(messages.Survey(number, kind, list(imports), mask, dict(env)))
        return number

    def surveyed(self, number: int, timeout: float) -> messages.Devices:
        """Wait for the answer.  Errors: LaunchError."""
        answer: messages.Devices = self._answer(number, timeout, "say which devices it has")
        return answer

    def execute(self, arguments: Sequence[str], env: Mapping[str, str], cwd: str) -> int:
        """Execute Python there (:mod:`harness.cluster.errands`); returns the number that is in messages about it."""
        number = self._number()
        self.send(messages.Execute(number, list(arguments), dict(env), cwd))
        return number

    def errands(self) -> list[tuple[messages.Streamed | messages.Output | messages.Exited, bytearray]]:
        """Return what has arrived from what is executed there."""
        arrived, self._errands = self._errands, []
        return arrived

    # what is known of them

    def look(self, ranks: Collection[RemoteRank]) -> int:
        """Ask what the host knows of ranks; returns the number that :meth:`answered` takes."""
        number = self._number()
        self._asked[number] = time.monotonic_ns()
        self.send(messages.Look(number, [rank.token for rank in ranks]))
        return number

    def answered(self, number: int) -> bool:
        """Return whether a question of :meth:`look` was answered, or never will be."""
        return number not in self._asked or bool(self.lost)

    def time_here(self, time_ns: int) -> int:
        """Convert a time on the host's monotonic clock to ours, in nanoseconds."""
        return time_ns - self._offset_ns

    @property
    def clock_error_ns(self) -> int:
        """By how much :meth:`time_here` may be wrong: since the clocks were compared, they may have drifted apart."""
        return self._offset_error_ns + round((time.monotonic() - self._measured) * _DRIFT * 1e9)

    @property
    def place(self) -> Place:
        """Its name, and by how much :meth:`time_here` may be wrong."""
        return Place(self.name, self.clock_error_ns)

    # the connection

    def pump(self) -> None:
        """Take what has arrived, without waiting, and note what has become of the host."""
        if self.lost:
            return
        self._pass_on()
        self._channel.flush()
        before = self._channel.received
        for message, payload in self._channel.receive():
            try:
                self._note(message, payload)
            except (ValueError, RecursionError) as e:
                self.lose(f"{self.name} sent what no agent sends: {e}")
                return
        if self._channel.received != before:
            self._heard = time.monotonic()
        if self._channel.lost:
            self.lose(f"the agent of {self.name} has gone: {self._channel.lost}")

    def check(self) -> None:
        """Ask from time to time whether the host is there, and give it up if it is silent for too long."""
        now = time.monotonic()
        if self.lost or now < self._next_question:
            return
        late = now - self._next_question > 2.0  # nobody has listened meanwhile, so its silence means nothing
        self._next_question = now + 1.0
        if self._asked and not late and now - self._heard > self._patience:
            self.lose(f"{self.name} did not answer for {self._patience:g} s")
            return
        if late or not self._asked:
            self._heard = now
        self.look(())

    def _note(self, message: Any, payload: bytearray) -> None:
        if isinstance(message, messages.Seen):
            asked = self._asked.pop(message.number, None)
            if asked is not None:
                self._measure(asked, message.time_ns, time.monotonic_ns())
            for state in message.states:
                if (rank := self._ranks.get(state.token)) is not None:
                    rank.seen(state)
        elif isinstance(message, messages.Opened | messages.Spawned | messages.Refused | messages.Devices):
            self._answers[message.number] = message
        elif isinstance(message, messages.Streamed | messages.Output | messages.Exited):
            self._errands.append((message, payload))
        elif isinstance(message, messages.Hello):
            raise ValueError("a second greeting")
        elif (rank := self._ranks.get(message.token)) is not None:
            if isinstance(message, messages.Ended):
                rank.seen(message.state)
                when = self.time_here(message.time_ns)
                server = f"{self.name}: {printable(message.server)}" if message.server else ""
                left = tuple(printable(each) for each in message.left)
                self._end(rank, Exit(message.status, when, message.maxrss_kib, left, server, self.clock_error_ns))
            else:
                rank.told(message, payload)

    def _end(self, rank: RemoteRank, ended: Exit) -> None:
        if rank.exit is None:
            rank.exit = ended
            self.ended += 1

    def _measure(self, sent: int, there: int, received: int) -> None:
        """Note the difference of the clocks, from a question and its answer."""
        error = (received - sent) // 2
        if error <= self.clock_error_ns:
            self._offset_ns = there - (sent + received) // 2
            self._offset_error_ns, self._measured = error, time.monotonic()

    def lose(self, why: str) -> None:
        """Give the host up: all of its ranks are gone."""
        if self.lost:
            return
        self.lost = why
        self._channel.close()
        self._asked.clear()
        for rank in self._ranks.values():
            self._end(rank, Exit(int(signal.SIGKILL), time.monotonic_ns(), server=why))

    def close(self) -> None:
        """Close the connection, with which all ranks end."""
        self.lost = self.lost or "it has been closed"
        self._channel.close()


def wait(hosts: Sequence[Host], seconds: float) -> None:
    """Wait until something has arrived from any host, and take it."""
    connected = [host for host in hosts if not host.lost]
    for host in connected:
        host._pass_on()
    if not any(host.channel.readable for host in connected):
        poll = select.poll()
        for host in connected:
            poll.register(host.fileno(), select.POLLIN | (select.POLLOUT if host.channel.wants_to_write else 0))
        poll.poll(max(0.0, seconds) * 1000)
    for host in connected:
        host.pump()


def connect(
    address: tuple[str, int],
    key: credentials.Key,
    ours: Mapping[str, Any],
    begin: messages.Begin | None,
    *,
    patience: float = 10.0,
    within: float = CONNECTING,
) -> Host:
    """Connect to the agent at an address.

    ``ours``: facts of this host, with which the agent's must agree; ``begin``: what the agent gets ready for; None if
    no rank will be asked for.

    Errors: :class:`HostRefused` if there is no agent, if it has another key, or if its ranks can't be used.
    """
    where = f"{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout=within)
    except OSError as e:
        raise HostRefused(f"no agent answers at {where}: {e.strerror or e}; `concord agent` starts one") from None
    try:
        tuned(sock, patience + _KERNEL_LATER)
        tls = credentials.context(key, server=False).wrap_socket(sock, suppress_ragged_eofs=False)
    except (OSError, ValueError) as e:
        sock.close()
        told = getattr(e, "reason", None) or getattr(e, "strerror", None) or str(e)
        raise HostRefused(
            f"what listens at {where} is not an agent with our key ({told}); start it with the session's key"
        ) from None
    channel = Channel(tls, TO_CONTROLLER)
    until = time.monotonic() + within
    while True:
        arrived = channel.receive()
        if arrived:
            break
        if channel.lost:
            # With TLS 1.3, an agent refuses our key only after our side of the handshake.
            raise HostRefused(f"the agent at {where} refused the connection ({channel.lost}): has it the same key?")
        if (left := until - time.monotonic()) <= 0:
            channel.close()
            raise HostRefused(f"the agent at {where} did not greet us within {within:g} s")
        readable(channel, left)
    hello = arrived[0].message
    host = Host(address, channel, hello.facts if isinstance(hello, messages.Hello) else {}, patience)
    wrong = []
    if not isinstance(hello, messages.Hello) or hello.version != messages.VERSION:
        wrong = ["it speaks another version of the protocol: install the same Concord there"]
    elif "refused" in hello.facts:
        wrong = [str(hello.facts["refused"])]
    wrong = wrong or differences(ours, hello.facts)
    if wrong:
        host.close()
        raise HostRefused(f"{host.name} can't run ranks of this session: {printable('; '.join(wrong))}")
    if begin is not None:
        host.send(begin)
    return host
