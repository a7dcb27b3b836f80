"""Agents whose ranks are simulated: they say what real ones would say, and import no torch.

``python -m tests.bench.simulated COUNT``: agents on so many ports of loopback, which it prints.  The session's key is
on standard input.  A line on standard input makes rank 0 of the first agent die in the next run, as if it had been
killed; the others then say that their connection is lost, as ranks of gloo do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

from harness.cluster import credentials, messages
from harness.cluster.channel import Channel, tuned
from harness.cluster.facts import facts
from harness.worlds import answers
from harness.worlds.evidence import describe_exception

IDLE = ("S", 0, ["S"], "idle", 0, True, "")


@dataclass
class Simulated:
    """The session of one agent."""

    channel: Channel
    number: int
    jobs: dict[int, int] = field(default_factory=dict)
    """By a rank's token, the job that it did last."""

    def take(self, message: object, doomed: threading.Event) -> None:
        """Answer a message as an agent whose ranks do everything at once."""
        send = self.channel.send
        match message:
            case messages.Open():
                send(messages.Opened(message.number, "127.0.0.1", 1))
            case messages.Spawn():
                send(messages.Spawned(message.number, "simulated"))
                for token in message.tokens:
                    self.jobs[token] = 0
                    send(messages.Started(token, os.getpid()))
                    self.answer(token, answers.frame(answers.Ready(0)))
            case messages.Pass():
                for token in message.tokens:
                    self.jobs[token] += 1
                    self.do(token, dies=doomed.is_set())
            case messages.Look():
                states = [state(token) for token in message.tokens]
                send(messages.Seen(message.number, time.monotonic_ns(), states))
            case messages.Ask():
                for token in message.tokens:
                    send(messages.Snapshot(token, {}, True), [b""])
            case messages.Dump():
                for token in message.tokens:
                    send(messages.Dumped(token))
            case messages.Kill():
                self.end(message.token, signal.SIGKILL)
            case messages.Forget():
                self.jobs.pop(message.token, None)

    def do(self, token: int, *, dies: bool) -> None:
        """Do what a rank was asked for: it returns None."""
        if dies and self.number == 0 and token == min(self.jobs):
            self.end(token, signal.SIGKILL)
        elif dies:
            self.answer(token, answers.raised(self.jobs[token], lost_connection()))
        else:
            self.answer(token, answers.returned(self.jobs[token], b"", []))

    def answer(self, token: int, parts: list[bytes]) -> None:
        body = parts[1]
        self.channel.send(messages.Frame(token, [len(body)]), [body])

    def end(self, token: int, number: int) -> None:
        self.channel.send(messages.Ended(token, number, time.monotonic_ns(), 0, [], "", state(token)))


def state(token: int) -> messages.State:
    main, ticks, threads, phase, count, whole, begun = IDLE
    return messages.State(token, main, ticks, threads, phase, count, whole, (0, 0), begun, [], [])


def lost_connection() -> dict[str, object]:
    """What a rank of gloo says when another has gone."""
    try:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    except RuntimeError as e:
        return {**describe_exception(e), "in_collective": True}


def serve(key: credentials.Key, count: int) -> None:
    """Serve until standard input ends."""
    tls = credentials.context(key, server=True)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    print(json.dumps([listener.getsockname()[1] for listener in listeners]), flush=True)
    known, doomed = facts(), threading.Event()
    threading.Thread(target=read_lines, args=(doomed,), daemon=True).start()
    sessions: dict[int, Simulated] = {}
    poll = select.epoll()
    by_fd = {listener.fileno(): (number, listener) for number, listener in enumerate(listeners)}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll(1.0):
            if fd in by_fd:
                number, listener = by_fd[fd]
                sock, _ = listener.accept()
                tuned(sock, 30)
                try:
                    wrapped = tls.wrap_socket(sock, server_side=True)
                except OSError:
                    continue
                channel = Channel(wrapped, messages.TO_AGENT)
                channel.send(messages.Hello(messages.VERSION, known))
                sessions[channel.fileno()] = Simulated(channel, number)
                poll.register(channel.fileno(), select.EPOLLIN)
                fd = channel.fileno()
            session = sessions[fd]
            for arrived in session.channel.receive():
                session.take(arrived.message, doomed)
            session.channel.flush()
            if session.channel.lost:
                poll.unregister(fd)
                del sessions[fd]
                session.channel.close()


def read_lines(doomed: threading.Event) -> None:
    """Rank 0 dies in the next run when there is a line; this process ends with standard input."""
    for _ in sys.stdin:
        doomed.set()
    os._exit(0)


if __name__ == "__main__":
    serve(credentials.Key(json.loads(sys.stdin.readline())), int(sys.argv[1]))
