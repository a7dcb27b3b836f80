"""What ranks print, as it appears on the controller's terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest

from harness.worlds.launch import Output
from harness.worlds.terminal import Terminal, prefixed


@contextlib.contextmanager
def released() -> Iterator[None]:
    yield


@pytest.fixture
def live() -> Terminal:
    return Terminal(immediately=True, release=released)


@pytest.fixture
def captured() -> Terminal:
    return Terminal(immediately=False, release=released)


def output_of(data: bytes) -> Output:
    output = Output()
    output.add(data)
    return output


def test_prefixed() -> None:
    """A line says which rank it is from."""
    assert prefixed(3, "x") == "[rank 3] x"


def test_lines(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is shown with its rank."""
    live.live(1, b"one\n\ntwo\n")
    assert capsys.readouterr().out == "[rank 1] one\n[rank 1] \n[rank 1] two\n"


def test_partial_line_waits(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """A line is shown when it is whole, not before."""
    live.live(0, b"on")
    assert capsys.readouterr().out == ""
    live.live(0, b"e\nt")
    assert capsys.readouterr().out == "[rank 0] one\n"


def test_ranks_do_not_mix(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Half lines of different ranks are kept apart."""
    live.live(0, b"zero")
    live.live(1, b"one\n")
    live.live(0, b"!\n")
    assert capsys.readouterr().out == "[rank 1] one\n[rank 0] zero!\n"


def test_rest_at_the_end(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """A last line without an end is shown when the run is over, once."""
    live.live(0, b"shown\nrest")
    live.finished(0, output_of(b"shown\nrest"))
    live.finished(0, output_of(b""))
    assert capsys.readouterr().out == "[rank 0] shown\n[rank 0] rest\n"


def test_split_letter(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """A letter that arrives in two pieces is one letter."""
    data = "\N{SNOWMAN}\n".encode()
    live.live(0, data[:1])
    live.live(0, data[1:])
    assert capsys.readouterr().out == "[rank 0] \N{SNOWMAN}\n"


def test_not_text(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that are no text are replaced."""
    live.live(0, b"a\xffb\n")
    assert capsys.readouterr().out == "[rank 0] a\N{REPLACEMENT CHARACTER}b\n"


@pytest.mark.parametrize("immediately", [True, False])
def test_terminal_without_unicode(immediately: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal that can't show a letter, the letter is spelled, and the run goes on."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True))
    terminal = Terminal(immediately=immediately, release=released)
    terminal.live(0, "\N{SNOWMAN}\n".encode())
    terminal.finished(0, output_of("\N{SNOWMAN}\n".encode()))
    assert raw.getvalue() == b"[rank 0] \\u2603\n"


def test_captured_shows_nothing_live(captured: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Where pytest captures, nothing is shown as it comes."""
    captured.live(0, b"one\n")
    assert capsys.readouterr().out == ""


def test_captured_shows_all_at_the_end(captured: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Where pytest captures, all that a rank printed is shown at the end of the run."""
    captured.finished(2, output_of(b"one\ntwo\n"))
    assert capsys.readouterr().out == "[rank 2] one\n[rank 2] two\n"


def test_lent() -> None:
    """While the terminal is lent, whoever captures it has let go; afterwards it has it again."""
    states = []

    @contextlib.contextmanager
    def release() -> Iterator[None]:
        states.append("released")
        yield
        states.append("captured")

    with Terminal(immediately=True, release=release).lent() as (stdin, stdout):
        states.append(f"{stdin} {stdout}")
    assert states == ["released", "0 1", "captured"]


def test_rank_that_is_gone(live: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a line of a rank that ended is shown, and the next rank of that number begins a line of its own."""
    live.live(0, b"half")
    live.gone(0)
    live.gone(0)
    live.live(0, b"whole\n")
    assert capsys.readouterr().out == "[rank 0] half\n[rank 0] whole\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"\x1b[2J\x1b]0;title\x07\x9b", "\\x1b[2J\\x1b]0;title\\x07\N{REPLACEMENT CHARACTER}"),
        (b"\x1b[1;31mred\x1b[0m!", "\x1b[1;31mred\x1b[0m!\x1b[0m"),
        ("\u202etxt".encode(), "\\u202etxt"),
        (b"10%\r20%", "10%\\r20%"),
        (b"line\r", "line"),
    ],
    ids=["driving", "colors", "bidi", "progress", "windows"],
)
def test_live_output_drives_nothing(
    live: Terminal, capsys: pytest.CaptureFixture[str], line: bytes, expected: str
) -> None:
    """Output that is shown as it comes keeps its colors, which end with the line; all else is shown as escapes."""
    live.live(0, line + b"\n")
    assert capsys.readouterr().out == f"[rank 0] {expected}\n"


def test_captured_output_drives_nothing(captured: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """Output that is shown at the end of a run is shown as escapes, colors included."""
    captured.finished(0, output_of(b"\x1b[31mred\x1b[2J\x1b[0m\n"))
    assert capsys.readouterr().out == "[rank 0] \\x1b[31mred\\x1b[2J\\x1b[0m\n"
