"""The agent's end of one session: a launcher of this host, served to a controller over a channel.

It runs in a process of its own, which ends with the connection, and all of its ranks with it.  What it does to ranks
goes through the protocols of :mod:`harness.worlds.handle`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

from harness.cluster import interfaces, messages
from harness.cluster.channel import Arrived, Channel
from harness.cluster.connections import unanswered
from harness.cluster.errands import Errand
from harness.cluster.facts import facts
from harness.cluster.survey import Surveyor
from harness.worlds import wire
from harness.worlds.handle import Heard
from harness.worlds.launch import LaunchError
from harness.worlds.listening import LocalListener
from harness.worlds.local import LocalLauncher
from harness.worlds.local_rank import LocalRank
from harness.worlds.observing import threads_of
from harness.worlds.rank import RankSetup

_MOST_WAITING = 256 << 20
"""Bytes that may wait for the controller before what ranks say is left where it is."""
_STACK_INTERVAL = 0.005
_LONGEST = 1.0
_BETWEEN_TABLES = 1.0
"""Seconds between two looks at a rank's connections, and before the first.  The kernel walks through all connections of
the machine, which takes milliseconds, and a packet is late only after a second anyway."""
_NEWS = (Heard.MESSAGE, Heard.OUTPUT, Heard.SNAPSHOT)


class _Held:
    """What a session knows of one of its ranks."""

    def __init__(self, token: int, rank: LocalRank, apart: bool) -> None:
        self.token = token
        self.rank = rank
        self.apart = apart
        """Whether its world is on several hosts."""
        self.pid = 0
        self.told = 0
        """How many collectives of its black box the controller knows."""
        self.waiting: deque[memoryview] = deque()
        """What it has yet to read: a rank that reads nothing keeps nobody else waiting."""
        self.dumping = False
        """Whether the controller waits for its stacks."""
        self.ended = False
        self.silent: set[Heard] = set()
        """What is not listened to any more."""
        self._unanswered: list[str] = []
        self._ask_again = 0.0
        self.gets_work()

    def gets_work(self) -> None:
        """Begin anew to wait before the kernel is asked for its connections."""
        self._unanswered = []
        self._ask_again = time.monotonic() + _BETWEEN_TABLES

    def unanswered(self) -> list[str]:
        """Return hosts that do not acknowledge what this rank has sent; see :mod:`~harness.cluster.connections`."""
        if self.apart and time.monotonic() >= self._ask_again:
            self._unanswered = unanswered(self.rank.pid)
            self._ask_again = time.monotonic() + _BETWEEN_TABLES
        return self._unanswered


class Session:
    """Serves one controller until it goes.

    ``channel``: to the controller; ``address``: the address of this host at which the connection ends, where rendezvous
    listen; ``launcher``: makes the launcher of this host.

    A controller that says nothing is waited for: it may be busy.  One that has died closes the connection, and the
    kernel notices one whose host has gone (:func:`~harness.cluster.channel.tuned`).
    """

    def __init__(
        self,
        channel: Channel,
        address: str,
        *,
        launcher: Callable[..., LocalLauncher] = LocalLauncher,
    ) -> None:
        self._channel = channel
        self._address = address
        self._make_launcher = launcher
        self._kind: messages.Begin | None = None
        self._launcher: LocalLauncher | None = None
        self._listener: LocalListener | None = None
        self._held: dict[int, _Held] = {}
        self._opened: dict[int, socket.socket] = {}
        self._asked: list[messages.Spawn] = []
        self._surveys: list[Surveyor] = []
        self._errands: list[Errand] = []

    def serve(self) -> str:
        """Serve until the connection is lost; returns why."""
        self._channel.send(messages.Hello(messages.VERSION, facts()))
        try:
            while not self._channel.lost:
                self._wait()
                for arrived in self._channel.receive():
                    self._do(arrived)
                self._spawn_asked()
                self._answer_surveys()
                self._run_errands()
                self._relay()
            return self._channel.lost
        finally:
            self._channel.close()
            for survey in self._surveys:
                survey.close()
            for errand in self._errands:
                errand.close()
            if self._launcher is not None:
                self._launcher.close()

    # what the controller asks for

    def _do(self, arrived: Arrived) -> None:
        message = arrived.message
        match message:
            case messages.Pass():
                for token in message.tokens:
                    if (held := self._held.get(token)) is not None:
                        held.gets_work()
                        held.waiting.append(memoryview(arrived.payload))
                        _pass_on(held)
            case messages.Look():
                states = [self._state(held) for token in message.tokens if (held := self._held.get(token))]
                self._channel.send(messages.Seen(message.number, time.monotonic_ns(), states))
            case messages.Ask():
                for token in message.tokens:
                    if (held := self._held.get(token)) is not None:
                        if Heard.SNAPSHOT in held.silent:  # it had nothing to say the last time
                            held.silent.discard(Heard.SNAPSHOT)
                            self._listener = None
                        held.rank.ask_snapshot()
            case messages.Dump():
                for token in message.tokens:
                    if (held := self._held.get(token)) is not None:
                        held.rank.ask_stack()
                        held.dumping = True
            case messages.Kill():
                if (held := self._held.get(message.token)) is not None and self._launcher is not None:
                    self._launcher.kill(held.rank)
            case messages.Forget():
                if (held := self._held.pop(message.token, None)) is not None:
                    held.rank.close()
                    self._listener = None
            case messages.Begin():
                self._kind = message
                self._prepared()
            case messages.Open():
                self._open(message)
            case messages.Spawn():
                self._asked.append(message)
            case messages.Survey():
                self._surveys.append(Surveyor(message))
            case messages.Execute():
                self._execute(message)
            case messages.Stream():
                for errand in self._errands:
                    if errand.number == message.number:
                        errand.feed(arrived.payload, end=message.end)

    def _prepared(self) -> LocalLauncher:
        """Return the launcher; a new one, whose server still has to start, in place of one that was lost."""
        if self._launcher is not None and not self._launcher.alive:
            self._relay()  # the ends of its ranks
            self._launcher.close()
            self._launcher = self._listener = None
        if self._launcher is None:
            kind = self._kind or messages.Begin(False, "fork")
            self._launcher = self._make_launcher(private=kind.private, start=kind.start)
        return self._launcher

    def _open(self, message: messages.Open) -> None:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            sock = socket.create_server((self._address, 0), family=family, backlog=message.backlog)
        except OSError as e:
            why = f"a rendezvous can't listen on {self._address}: {e.strerror}"
            self._channel.send(messages.Refused(message.number, why))
            return
        self._opened[message.number] = sock
        self._channel.send(messages.Opened(message.number, self._address, sock.getsockname()[1]))

    def _spawn_asked(self) -> None:
        """Start the ranks that were asked for, once that needs no waiting."""
        while self._asked and self._prepared().settled:
            asked = self._asked.pop(0)
            rendezvous = self._opened.pop(asked.rendezvous, None)
            try:
                launcher = self._prepared()
                setups = [_fitted(setup) for setup in asked.setups]
                ranks = launcher.spawn(setups, rendezvous)
            except (LaunchError, OSError) as e:
                self._channel.send(messages.Refused(asked.number, str(e)))
                continue
            finally:
                if rendezvous is not None:
                    rendezvous.close()
            for token, rank, setup in zip(asked.tokens, ranks, setups, strict=True):
                self._held[token] = _Held(token, rank, bool(setup.store[1]))
            self._listener = None
            apart = [setup for setup in setups if setup.store[1]]
            chosen = interfaces.chosen({**os.environ, **dict(apart[0].env)}) if apart else ""
            self._channel.send(messages.Spawned(asked.number, launcher.network, chosen))

    def _answer_surveys(self) -> None:
        """Tell the controller which devices the host has, once that is known."""
        for survey in list(self._surveys):
            if (found := survey.answer()) is not None:
                self._surveys.remove(survey)
                self._channel.send(found)

    def _execute(self, asked: messages.Execute) -> None:
        try:
            self._errands.append(Errand(asked, self._channel.send))
        except OSError as e:
            self._channel.send(messages.Output(asked.number), [f"it can't be started: {e}\n".encode()])
            self._channel.send(messages.Exited(asked.number, 127))

    def _run_errands(self) -> None:
        """Relay what is executed here, and forget what has ended."""
        enough = self._channel.waiting >= _MOST_WAITING
        self._errands = [errand for errand in self._errands if not errand.turn(enough)]

    # what ranks say

    def _wait(self) -> None:
        """Wait until the controller or a rank has something to say."""
        self._channel.flush()
        if self._channel.readable:
            return
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.wants_to_write else 0))
        if self._channel.waiting < _MOST_WAITING:
            for fd in self._listening().descriptors if self._launcher is not None else ():
                poll.register(fd, select.POLLIN)
        for survey in self._surveys:
            poll.register(survey.fileno(), select.POLLIN)
        for errand in self._errands:
            for fd, events in errand.descriptors(self._channel.waiting >= _MOST_WAITING):
                poll.register(fd, events)
        for held in self._held.values():
            if held.waiting:
                poll.register(held.rank.control.fileno(), select.POLLIN | select.POLLOUT)
        dumping = any(held.dumping for held in self._held.values())
        starting = bool(self._asked)
        poll.poll(1000 * (_STACK_INTERVAL if dumping else 0.05 if starting else _LONGEST))

    def _listening(self) -> LocalListener:
        """Return the listener to all ranks; a new one if there are other ranks than before."""
        if self._listener is None:
            assert self._launcher is not None
            ranks = [held.rank for held in self._held.values() if not held.rank.closed]
            self._listener = self._launcher.listen(ranks, _NEWS)
            for held in self._held.values():
                for what in held.silent:
                    self._listener.ignore(held.rank, what)
        return self._listener

    def _relay(self) -> None:
        """Tell the controller what ranks have said, and how they have ended."""
        for held in self._held.values():
            _pass_on(held)
        if self._launcher is None or self._channel.waiting >= _MOST_WAITING:
            return
        listener = self._listening()
        held_by = {id(held.rank): held for held in self._held.values()}
        for what, rank in listener.wait(0):
            held = held_by[id(rank)]
            if what is Heard.MESSAGE:
                self._frames(held)
            elif what is Heard.OUTPUT:
                self._output(held)
            else:
                self._snapshot(held)
        for held in self._held.values():
            if held.pid != held.rank.pid:
                held.pid = held.rank.pid
                self._channel.send(messages.Started(held.token, held.pid))
            if held.dumping and held.rank.stack_is_there():
                held.dumping = False
                self._crash(held)
                self._channel.send(messages.Dumped(held.token))
            if held.rank.exit is not None and not held.ended:
                self._end(held)

    def _ignore(self, held: _Held, what: Heard) -> None:
        held.silent.add(what)
        self._listening().ignore(held.rank, what)

    def _frames(self, held: _Held) -> None:
        if Heard.MESSAGE in held.silent:
            return
        try:
            while (frame := held.rank.receive()) is not None:
                body, buffers = frame
                parts = [body, *buffers]
                self._channel.send(messages.Frame(held.token, list(map(len, parts))), parts)
                if not held.rank.more:
                    return
        except wire.WireError as e:
            self._ignore(held, Heard.MESSAGE)
            self._channel.send(messages.Broken(held.token, str(e), isinstance(e, wire.NotAFrame)))

    def _output(self, held: _Held) -> None:
        if Heard.OUTPUT in held.silent:
            return
        printed, closed = held.rank.take_output(), held.rank.output_closed
        if closed:
            self._ignore(held, Heard.OUTPUT)
        if printed or closed:
            self._channel.send(messages.Printed(held.token, closed), [printed])

    def _snapshot(self, held: _Held) -> None:
        answer = held.rank.take_snapshot()
        if answer is None:
            return
        alarms = held.rank.alarms(threads_of(answer)) if answer else {}
        try:
            told = json.dumps(answer).encode() if answer else b""
        except (ValueError, RecursionError):  # a rank can write anything into its channel
            told = b""
        self._channel.send(messages.Snapshot(held.token, alarms, held.rank.monitor_lost), [told])
        if not answer:  # the channel may stay readable
            self._ignore(held, Heard.SNAPSHOT)

    def _crash(self, held: _Held) -> None:
        if text := held.rank.crash_text():
            self._channel.send(messages.Crashed(held.token), [text.encode()])

    def _end(self, held: _Held) -> None:
        """Tell what a rank has left, and then that it has ended."""
        ended = held.rank.exit
        assert ended is not None
        held.ended = True
        self._frames(held)
        self._output(held)
        self._crash(held)
        self._channel.send(
            messages.Ended(
                held.token,
                ended.status,
                ended.time_ns,
                ended.maxrss_kib,
                list(ended.left),
                ended.server,
                self._state(held),
            )
        )

    def _state(self, held: _Held) -> messages.State:
        rank = held.rank
        kernel = rank.kernel_state()
        box = rank.box
        count = box.count
        recent = box.recent(count - held.told) if count > held.told else []
        held.told = count
        return messages.State(
            held.token,
            kernel.main,
            kernel.ticks,
            list(kernel.threads),
            box.phase,
            count,
            box.whole,
            box.reached,
            rank.begun,
            [messages.Noted(*dataclasses.astuple(issued)) for issued in recent],
            held.unanswered(),
        )


def _pass_on(held: _Held) -> None:
    """Send a rank what waits for it, as far as its socket takes it."""
    try:
        while held.waiting:
            part = held.waiting[0]
            sent = held.rank.offer(part)
            if sent == len(part):
                held.waiting.popleft()
                continue
            held.waiting[0] = part[sent:]
            if not sent:
                return
    except wire.WireError:
        held.waiting.clear()  # the launcher reports how it ended


def _fitted(setup: RankSetup) -> RankSetup:
    """Return a rank's setup as it fits this host: its imports, its folder, and the interface towards its rendezvous."""
    there = [entry for entry in setup.sys_path if os.path.exists(entry)]
    path = [*there, *(entry for entry in sys.path if isinstance(entry, str) and entry not in there)]
    cwd = setup.cwd if os.path.isdir(setup.cwd) else os.getcwd()
    env = dict(setup.env)
    if setup.store[1]:
        name = interfaces.interface_of(interfaces.towards(setup.store[0]))
        env.update((each, name) for each in interfaces.VARIABLES if name and each not in env and each not in os.environ)
    return dataclasses.replace(setup, sys_path=path, cwd=cwd, env=env)
