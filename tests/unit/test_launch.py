"""The controller's end of a rank: how a process ended, what it printed, what it answered."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds import wire
from harness.worlds.blackbox import BlackBox
from harness.worlds.launch import Exit, Output, RankProcess, environment_of, has_yet_to_handle, kernel_state


class TestExit:
    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (0, "exited with code 0"),
            (3 << 8, "exited with code 3"),
            (255 << 8, "exited with code 255"),
            (int(signal.SIGKILL), "killed by SIGKILL (by someone, or by the kernel for want of memory)"),
            (int(signal.SIGSEGV), "killed by SIGSEGV"),
            (int(signal.SIGABRT) | 0x80, "killed by SIGABRT"),
            (40, "killed by signal 40"),
        ],
    )
    def test_text(self, status: int, expected: str) -> None:
        """An end is told with the signal's name or the code."""
        assert str(Exit(status, 0)) == expected

    @pytest.mark.parametrize(("status", "expected"), [(0, True), (1 << 8, False), (9, False)])
    def test_clean(self, status: int, expected: bool) -> None:
        """Only code 0 is clean."""
        assert Exit(status, 0).clean == expected

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
    def test_real_signal(self, number: signal.Signals) -> None:
        """The status of a process that a signal has ended gives that signal, and no code."""
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        process.send_signal(number)
        _, status = os.waitpid(process.pid, 0)
        process.returncode = 0
        assert process.stdin is not None
        process.stdin.close()
        assert (Exit(status, 0).signal, Exit(status, 0).code) == (number, None)


class TestOutput:
    def test_empty(self) -> None:
        """A rank that printed nothing has no text."""
        assert Output().text() == ""

    def test_pieces(self) -> None:
        """What comes in pieces is put together, also within a letter."""
        output = Output()
        for byte in "snow \N{SNOWMAN} fire \U0001f525".encode():
            output.add(bytes([byte]))
        assert output.text() == "snow \N{SNOWMAN} fire \U0001f525"

    def test_not_text(self) -> None:
        """Bytes that are no text are replaced."""
        output = Output()
        output.add(b"a\xff\x00b")
        assert output.text() == "a\N{REPLACEMENT CHARACTER}\x00b"

    def test_all_that_fits(self) -> None:
        """As much as head and tail hold is shown whole."""
        output = Output()
        data = os.urandom((Output.HEAD + Output.TAIL) // 2).hex().encode()
        output.add(data)
        assert output.text() == data.decode()

    def test_ten_megabytes(self) -> None:
        """Of very much, the first and the last are kept, with a note of how much is between them."""
        output = Output()
        for i in range(10 * 1024):
            output.add(f"{i:08d}".encode() * 128)
        text, left_out = output.text(), 10 * 1024 * 1024 - Output.HEAD - Output.TAIL
        assert (text[:8], f"[... {left_out} bytes left out ...]" in text, text[-8:]) == ("00000000", True, "00010239")

    def test_memory_is_bounded(self) -> None:
        """However much is printed, what is kept has an end."""
        output = Output()
        for _ in range(200):
            output.add(b"x" * 100_000)
        assert len(output._head) + len(output._tail) <= Output.HEAD + 2 * Output.TAIL + 100_000

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.binary(max_size=40), max_size=30))
    def test_nothing_is_lost(self, pieces: list[bytes]) -> None:
        """Head, tail and what is said to be left out add up to all that was printed."""

        class Small(Output):
            HEAD = 16
            TAIL = 16

        output = Small()
        for piece in pieces:
            output.add(piece)
        whole = b"".join(pieces)
        if len(whole) <= 32:
            assert output.text() == whole.decode(errors="replace")
        else:
            note = f"\n[... {len(whole) - 32} bytes left out ...]\n".encode()
            assert output.text() == (whole[:16] + note + whole[-16:]).decode(errors="replace")


class TestKernelState:
    def test_dead(self) -> None:
        """A process that has gone has no state."""
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        assert kernel_state(process.pid) == ("", 0, [])

    @pytest.mark.parametrize("pid", [0, -1, 2**31])
    def test_no_process(self, pid: int) -> None:
        """A number that is no process has no state."""
        assert kernel_state(pid) == ("", 0, [])

    def test_ourselves(self) -> None:
        """Whoever asks is running, and has used time."""
        state, ticks, states = kernel_state(os.getpid())
        assert (state, ticks > 0, "R" in states) == ("R", True, True)

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


class TestEnvironment:
    def test_copy(self) -> None:
        """The environment of a world is a copy."""
        given_ = {"A": "1"}
        assert (environment_of(given_), environment_of(given_) is given_) == ({"A": "1"}, False)

    @pytest.mark.parametrize("bad", [{"A": 1}, {1: "A"}, {"A": None}], ids=str)
    def test_not_text(self, bad: dict[str, str]) -> None:
        """A value that is no text is refused by name."""
        with pytest.raises(TypeError, match="names and values must be strings"):
            environment_of(bad)


class Rank:
    """A rank process without a process: the test holds the other ends."""

    def __init__(self, stack: ExitStack) -> None:
        control, self.control = socket.socketpair()
        monitor, self.monitor = socket.socketpair()
        output, self.output = os.pipe()
        box = BlackBox.create("test")
        self.crash = os.memfd_create("test")
        self.process = RankProcess(0, 1, control, monitor, output, BlackBox(box), os.dup(self.crash))
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


class TestRankProcess:
    def test_nothing_yet(self, rank: Rank) -> None:
        """A rank that says nothing keeps nobody waiting."""
        found = rank.process.take_snapshot(), rank.process.drain_output(), rank.process.crash_text()
        os.close(rank.output)
        assert found == (None, b"", "")

    def test_output(self, rank: Rank) -> None:
        """What a rank prints is kept, and its end is noticed."""
        os.write(rank.output, b"hello")
        os.close(rank.output)
        found = rank.process.drain_output()
        assert (found, rank.process.output.text(), rank.process.output_closed) == (b"hello", "hello", True)

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
        """A monitor that has gone does not answer."""
        os.close(rank.output)
        rank.monitor.close()
        rank.process.ask_snapshot()
        assert rank.process.take_snapshot() is None

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
