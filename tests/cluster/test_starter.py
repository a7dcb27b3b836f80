"""The process beside pytest that starts agents."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from harness.cluster.starter import Starter, StarterEnded
from tests.cluster.conftest import gone


def starter(code: str, **how: bool) -> Starter:
    """A process that executes some Python."""
    return Starter([sys.executable, "-c", code], "the key", os.environ, **how)


def test_lines_and_the_end() -> None:
    """Its lines arrive as it prints them, and then how it ended, with what it said on standard error."""
    said = starter("import sys; print(sys.stdin.read()); print('two'); sys.exit('no \\x1b[31mred')")
    lines = said.lines(20)
    assert [next(lines), next(lines)] == ["the key", "two"]
    with pytest.raises(StarterEnded, match=r"python.* ended with status 1: no \\x1b\[31mred"):
        next(lines)
    said.stop()


def test_nothing_is_said() -> None:
    """A process that says nothing is not waited for any longer, and ends when it is told to."""
    silent = starter("import time; time.sleep(60)")
    with pytest.raises(StarterEnded, match=r"was not ready after 0\.2 s"):
        next(silent.lines(0.2))
    began = time.monotonic()
    silent.stop()
    silent.stop()
    assert time.monotonic() - began < 10


def test_waiting_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """After ten seconds the user sees for what pytest waits, and what it said so far."""
    late = starter("import sys, time; print('queued', file=sys.stderr, flush=True); time.sleep(11); print('ready')")
    assert next(late.lines(30)) == "ready"
    assert re.fullmatch(r"concord: waiting for python[\d.]*: queued\n", capsys.readouterr().err)
    late.stop()


def test_standard_input_ends_with_it() -> None:
    """A process that is kept sees the end of its standard input at the latest when pytest ends."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True); "
        "print(sys.stdin.read(), flush=True)"
    )
    kept = starter(code, kept=True)
    pid = int(next(kept.lines(20)))
    with pytest.raises(StarterEnded, match="was not ready"):
        next(kept.lines(1.0))
    kept.stop()
    assert gone(pid)


def test_it_ends_with_its_parent() -> None:
    """The kernel tells it to end when its parent is killed."""
    code = (
        "import os, sys, time; from harness.cluster.starter import Starter; "
        "h = Starter([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'], '', "
        "os.environ); print(next(h.lines(20)), flush=True); time.sleep(60)"
    )
    parent = starter(code)
    pid = int(next(parent.lines(20)))
    os.kill(parent._process.pid, signal.SIGKILL)
    assert gone(pid)
    parent.stop()
