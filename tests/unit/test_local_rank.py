"""A rank on this host: what comes through its descriptors, and what the kernel says of its process."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from harness.worlds import wire
from harness.worlds.blackbox import BlackBox
from harness.worlds.handle import Heard, KernelState, News
from harness.worlds.listening import LocalListener
from harness.worlds.local_rank import LocalRank, has_yet_to_handle, kernel_state


class TestKernelState:
    def test_dead(self) -> None:
        """A process that has gone has no state."""
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        assert kernel_state(process.pid) == KernelState("", 0, [])

    @pytest.mark.parametrize("pid", [0, -1, 2**31])
    def test_no_process(self, pid: int) -> None:
        """A number that is no process has no state."""
        assert kernel_state(pid) == KernelState("", 0, [])

    def test_ourselves(self) -> None:
        """Whoever asks is running, and has used time."""
        state, ticks, states, unanswered = kernel_state(os.getpid())
        assert (state, ticks > 0, "R" in states, unanswered) == ("R", True, True, ())

    def test_stopped(self) -> None:
        """A process that was stopped is seen to be."""
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            state = kernel_state(process.pid)[0]
            process.kill()
        assert state == "T"

    def test_name_with_parentheses(self) -> None:
        """A process can be called anything and is still read right."""
        code = "import sys; open('/proc/self/comm', 'w').write(') R 1 ('); print(flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            state = kernel_state(process.pid)
            process.kill()
        assert (state[0], state[2]) == ("T", ["T"])


WITH_A_HANDLER = """
import ctypes, os, signal, sys
number = int(sys.argv[1])
if sys.argv[2] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
@HANDLER
def handle(number):
    os.write(1, b"handling\\n")
    os.read(0, 1)
ctypes.CDLL(None).signal(number, handle)
os.write(1, b"ready\\n")  # print() may not be interrupted by a handler that prints
while os.read(0, 1):
    os.write(1, b"awake\\n")
"""


class TestSignalsThatWait:
    """Whether a process has yet to handle a signal that it was sent."""

    @staticmethod
    @contextmanager
    def process(how: str = "") -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-c", WITH_A_HANDLER, str(int(signal.SIGUSR1)), how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
            process.kill()

    @staticmethod
    def waits(process: subprocess.Popen[str]) -> bool:
        return has_yet_to_handle(process.pid, signal.SIGUSR1)

    def test_none_was_sent(self) -> None:
        """A process that was sent nothing has nothing to handle."""
        with self.process() as process:
            assert not self.waits(process)

    def test_while_it_is_handled(self) -> None:
        """A handler that is at work has not yet done its work; once it returns it has."""
        with self.process() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline() == "handling\n"
            during = self.waits(process)
            process.stdin.write("12")
            process.stdin.flush()
            assert process.stdout.readline() == "awake\n"
            assert (during, self.waits(process)) == (True, False)

    def test_blocked(self) -> None:
        """A signal that a process does not take waits."""
        with self.process("blocked") as process:
            process.send_signal(signal.SIGUSR1)
            assert self.waits(process)

    def test_stopped(self) -> None:
        """A process that was stopped handles nothing: there is nothing to wait for."""
        with self.process() as process:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            process.send_signal(signal.SIGUSR1)
            assert not self.waits(process)

    def test_gone(self) -> None:
        """Nor does one that has gone."""
        with self.process() as process:
            pass
        assert not self.waits(process)


class Rank:
    """A rank process without a process: the test holds the other ends."""

    def __init__(self, stack: ExitStack) -> None:
        control, self.control = socket.socketpair()
        monitor, self.monitor = socket.socketpair()
        output, self.output = os.pipe()
        box = BlackBox.create("test")
        self.crash = os.memfd_create("test")
        self.process = LocalRank(0, 1, control, monitor, output, BlackBox(box), os.dup(self.crash))
        os.close(box)
        stack.callback(os.close, self.crash)
        stack.enter_context(self.control)
        stack.enter_context(self.monitor)
        stack.callback(self.process.close)

    def answer(self, data: bytes) -> None:
        self.monitor.sendall(struct.pack("!I", len(data)) + data)


@pytest.fixture
def rank() -> Iterator[Rank]:
    with ExitStack() as stack:
        yield Rank(stack)


class TestLocalRank:
    def test_nothing_yet(self, rank: Rank) -> None:
        """A rank that says nothing keeps nobody waiting."""
        found = rank.process.take_snapshot(), rank.process.take_output(), rank.process.crash_text()
        os.close(rank.output)
        assert found == (None, b"", "")

    def test_output(self, rank: Rank) -> None:
        """What a rank prints is there, and its end is noticed."""
        os.write(rank.output, b"hello")
        os.close(rank.output)
        assert (rank.process.take_output(), rank.process.output_closed) == (b"hello", True)

    def test_crash_text(self, rank: Rank) -> None:
        """What faulthandler writes is given once."""
        os.write(rank.crash, b"Fatal \xff")
        os.close(rank.output)
        found = rank.process.crash_text(), rank.process.crash_text()
        assert found == ("Fatal \N{REPLACEMENT CHARACTER}", "")

    def test_snapshot(self, rank: Rank) -> None:
        """A monitor's answer is given when all of it is there."""
        os.close(rank.output)
        data = json.dumps({"threads": []}).encode()
        rank.monitor.sendall(struct.pack("!I", len(data)) + data[:3])
        early = rank.process.take_snapshot()
        rank.monitor.sendall(data[3:])
        assert (early, rank.process.take_snapshot()) == (None, {"threads": []})

    def test_two_snapshots(self, rank: Rank) -> None:
        """Answers that come together are given one by one."""
        os.close(rank.output)
        rank.answer(b'{"a":1}')
        rank.answer(b'{"b":2}')
        assert [rank.process.take_snapshot() for _ in range(3)] == [{"a": 1}, {"b": 2}, None]

    @pytest.mark.parametrize(
        "data", [b"", b"garbage", b"\xff\xfe\x00", b"[1]", b"null", b"[" * 100_000], ids=lambda d: ascii(d[:9])
    )
    def test_garbage_snapshot(self, rank: Rank, data: bytes) -> None:
        """An answer that is none is one of which nothing can be read, and the next one is read again."""
        os.close(rank.output)
        rank.answer(data)
        rank.answer(b'{"a":1}')
        assert [rank.process.take_snapshot() for _ in range(2)] == [{}, {"a": 1}]

    def test_absurd_length(self, rank: Rank) -> None:
        """After an answer that announces four gigabytes nothing can be read."""
        os.close(rank.output)
        rank.monitor.sendall(b"\xff" * 10)
        assert (rank.process.take_snapshot(), rank.process.monitor_lost) == ({}, True)

    def test_answer_without_a_question(self, rank: Rank) -> None:
        """What was there before anybody asked is not taken for the answer."""
        os.close(rank.output)
        rank.answer(b'{"a":1}')
        rank.process.ask_snapshot()
        assert (rank.process.take_snapshot(), rank.process.monitor_lost) == ({}, True)

    def test_monitor_has_gone(self, rank: Rank) -> None:
        """A monitor that has gone never answers."""
        os.close(rank.output)
        rank.monitor.close()
        rank.process.ask_snapshot()
        assert rank.process.take_snapshot() == {}

    def test_send_to_one_that_does_not_read(self, rank: Rank) -> None:
        """A rank that does not read its control connection is an error after the time limit."""
        os.close(rank.output)
        with pytest.raises(wire.WireError, match="does not read"):
            rank.process.send(wire.dumps(b"x" * (16 << 20)), timeout=0.05)

    def test_closed_twice(self, rank: Rank) -> None:
        """Closing gives back every descriptor, and may be done twice."""
        os.close(rank.output)
        fds = [
            rank.process.control.fileno(),
            rank.process.monitor.fileno(),
            rank.process.output_fd,
            rank.process.crash_fd,
        ]
        rank.process.close()
        rank.process.close()
        closed = []
        for fd in fds:
            with pytest.raises(OSError) as error:
                fcntl.fcntl(fd, fcntl.F_GETFD)
            closed.append(error.value.errno)
        assert len(closed) == 4


class Server:
    """What a listener asks of its launcher: the test holds the other end of its connection."""

    def __init__(self, stack: ExitStack) -> None:
        self.ours, self.theirs = (stack.enter_context(end) for end in socket.socketpair())
        self.polled = self.checked = 0

    def poll(self) -> None:
        self.polled += 1
        self.ours.recv(1)

    def check(self) -> bool:
        self.checked += 1
        return False

    def listener(self, rank: Rank, *to: Heard) -> LocalListener:
        return LocalListener(self.ours.fileno(), self.poll, self.check, [rank.process], to)


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack)


@pytest.fixture
def printing(rank: Rank) -> Iterator[Rank]:
    """A rank whose output is still open."""
    yield rank
    os.close(rank.output)


class TestLocalListener:
    def test_nothing(self, printing: Rank, server: Server) -> None:
        """A look at silent ranks finds nothing, and asks whether the server is there."""
        listener = server.listener(printing, Heard.MESSAGE, Heard.OUTPUT, Heard.SNAPSHOT)
        assert (listener.wait(0), listener.wait(-1), server.polled, server.checked) == ([], [], 0, 2)

    def test_each(self, printing: Rank, server: Server) -> None:
        """Messages, output and snapshots are told, each by its name, until they are taken."""
        listener = server.listener(printing, Heard.MESSAGE, Heard.OUTPUT, Heard.SNAPSHOT)
        wire.send(printing.control, 1)
        os.write(printing.output, b"x")
        printing.answer(b"{}")
        news = [News(what, printing.process) for what in (Heard.MESSAGE, Heard.OUTPUT, Heard.SNAPSHOT)]
        assert (listener.wait(math.inf), listener.wait(0)) == (news, news)
        printing.process.receive()
        printing.process.take_output()
        printing.process.take_snapshot()
        assert listener.wait(0) == []

    def test_only_what_was_asked_for(self, printing: Rank, server: Server) -> None:
        """A listener to one thing does not tell of another."""
        listener = server.listener(printing, Heard.SNAPSHOT)
        os.write(printing.output, b"x")
        assert listener.wait(0) == []

    def test_ignored(self, printing: Rank, server: Server) -> None:
        """What is ignored is not told any more; to ignore it twice changes nothing."""
        listener = server.listener(printing, Heard.OUTPUT, Heard.STACK)
        os.write(printing.output, b"x")
        for what in (Heard.OUTPUT, Heard.OUTPUT, Heard.STACK, Heard.STACK):
            listener.ignore(printing.process, what)
        assert listener.wait(0) == []

    def test_server(self, printing: Rank, server: Server) -> None:
        """The end of a rank, which the server tells, ends the wait without news of its own."""
        server.theirs.send(b"x")
        assert (server.listener(printing).wait(math.inf), server.polled) == ([], 1)

    def test_stacks(self, printing: Rank, server: Server) -> None:
        """Stacks are told of as soon as no signal waits to be handled: at once, where there is no process."""
        assert server.listener(printing, Heard.STACK).wait(math.inf) == [News(Heard.STACK, printing.process)]

    def test_server_has_been_closed(self, printing: Rank) -> None:
        """A listener of a launcher that is closed has only its ranks to listen to."""
        listener = LocalListener(-1, lambda: None, lambda: False, [printing.process], (Heard.OUTPUT,))
        os.write(printing.output, b"x")
        assert listener.wait(0) == [News(Heard.OUTPUT, printing.process)]
