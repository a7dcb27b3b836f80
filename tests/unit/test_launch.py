"""What launchers share: how a process ended, what it printed, what it takes over from here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds.launch import Exit, Output, environment_of


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
