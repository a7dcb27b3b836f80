"""Pytest sessions as users start them: in a folder of their own, in processes of their own, with real ranks.

pytest's own ``pytester`` makes a session per test.  Here a session costs seconds (it imports torch), so several tests
look at the outcome of one, and a session has to outlive the test that first asked for it.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from warm import WARM, Forked, can_fork

from harness import results

_MARK = "CONCORD_TEST_SESSION"
_LONGEST = 600.0
_FAREWELL = 60.0
_OF_THE_OUTER_SESSION = ("PYTEST_", "COV_", "HYPOTHESIS_", "FORCE_COLOR", "PY_COLORS", "CI", "GITHUB_ACTIONS")


def interruptible() -> None:
    """Take Ctrl-C as a program at a terminal does: one that a script starts in the background is made deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Session:
    """A pytest session that has ended."""

    code: int
    """Exit code; minus the signal that killed it."""
    out: str
    err: str
    folder: Path
    orphans: tuple[str, ...]
    """Command lines of its processes that were still there some seconds after it had gone."""

    @property
    def lines(self) -> pytest.LineMatcher:
        """Standard output, for ``fnmatch_lines`` and its like."""
        return pytest.LineMatcher(self.out.split("\n"))

    @property
    def counts(self) -> dict[str, int]:
        """How many tests that were not deselected came to each outcome, from pytest's own last line."""
        found = pytest.RunResult(self.code, self.out.split("\n"), [], 0.0).parseoutcomes()
        return {outcome: count for outcome, count in found.items() if outcome not in ("deselected", "warnings")}

    def section(self, test: str) -> str:
        """What pytest shows of one failed test: from the line with its name to the next test's."""
        return _between(self.out.split("\n"), lambda line: line.strip("_").strip() == test and line.startswith("___"))

    @property
    def results(self) -> results.Run:
        """The results file of a session with ``--concord-results out``."""
        (path,) = self.folder.glob("out/*/results.jsonl")
        return results.read(path)

    def junit(self, name: str) -> ElementTree.Element:
        """The ``testcase`` element of a session with ``--junitxml=junit.xml``."""
        tree = ElementTree.parse(self.folder / "junit.xml")
        (found,) = (case for case in tree.iter("testcase") if case.get("name") == name)
        return found


def _started(
    arguments: Sequence[str], folder: Path, env: Mapping[str, str], files: Sequence[int], *, fork: bool
) -> subprocess.Popen[bytes] | Forked:
    """Start ``pytest ARGUMENTS``, with ``files`` as its standard input, output and error."""
    if fork:
        return WARM.fork(arguments, folder, env, files)
    command = [sys.executable, "-m", "pytest", *arguments]
    stdin, stdout, stderr = files
    return subprocess.Popen(
        command, cwd=folder, env=env, preexec_fn=interruptible, stdin=stdin, stdout=stdout, stderr=stderr
    )


def _between(lines: list[str], begins: Callable[[str], bool]) -> str:
    starts = [i for i, line in enumerate(lines) if begins(line)]
    assert len(starts) == 1, f"{len(starts)} such sections in:\n" + "\n".join(lines)
    ends = [i for i, line in enumerate(lines) if i > starts[0] and line.startswith(("___", "===", "!!!"))]
    ends += [
        i
        for i, line in enumerate(lines)
        if i > starts[0] and ("verdicts by stack" in line or line[:10] == "verdicts: ")
    ]
    return "\n".join(lines[starts[0] : min(ends, default=len(lines))])


class Running:
    """A pytest session that is going on."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], env: dict[str, str], *, terminal: bool, fresh: bool
    ) -> None:
        self.folder = folder
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._deadline = time.monotonic() + _LONGEST
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_OUTER_SESSION)}
        key, _, value = self._mark.partition("=")
        # A session that shared its leases would wait for whatever else runs on the machine.
        temporary, leases = folder / ".tmp", folder / ".leases"
        temporary.mkdir(exist_ok=True)
        leases.mkdir(mode=0o700, exist_ok=True)
        apart = {"TMPDIR": str(temporary), "CONCORD_LEASES": str(leases)}
        # What these ranks do needs no more of torch, and the rest takes twice as long to import.
        quick = {"CONCORD_PRELOAD": "torch"}
        environment = {**inherited, "COLUMNS": "160", **apart, **quick, **env, key: value}
        self._terminal, slave = pty.openpty() if terminal else (-1, -1)
        self._seen = ""
        self._out, self._err = (folder / f"{name}-{value}.txt" for name in ("stdout", "stderr"))
        with open(os.devnull, "rb") as null, open(self._out, "wb") as out, open(self._err, "wb") as err:
            files = [slave] * 3 if terminal else [null.fileno(), out.fileno(), err.fileno()]
            self.process = _started(arguments, folder, environment, files, fork=not fresh and can_fork(env))
        if terminal:
            os.close(slave)

    def end(self) -> Session:
        """Wait for its end, and for the ends of all processes that it started."""
        if self._terminal >= 0:
            self._read(lambda: False)
            os.close(self._terminal)
        try:
            code = self.process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            orphans = self._leave_nothing()
            raise AssertionError(f"no end after {_LONGEST:g} s; {orphans} left:\n{self._text()}") from None
        return Session(code, self._text(), self._err.read_text(errors="replace"), self.folder, self._leave_nothing())

    def until(self, text: str) -> str:
        """Read the terminal until it shows a text that it has not shown before; returns what came up to there."""
        self._read(lambda: text in self._seen)
        found, mark, self._seen = self._seen.partition(text)
        if not mark:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the terminal never showed {text!r}:\n{self._text()}")
        return found + mark

    def type(self, line: str) -> None:
        """Type a line on the terminal."""
        os.write(self._terminal, line.encode() + b"\n")

    def processes(self) -> dict[int, str]:
        """The session's processes that exist now: pid and command line."""
        mark = self._mark.encode()
        found = {}
        for entry in os.listdir("/proc"):
            try:
                environ = Path("/proc", entry, "environ").read_bytes() if entry.isdigit() else b""
                if mark in environ.split(b"\0"):
                    found[int(entry)] = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except OSError:
                continue  # it has gone, or is not ours to look at
        return found

    def _leave_nothing(self) -> tuple[str, ...]:
        """Wait until all of its processes have gone; kill, and give back, those that stay."""
        deadline = time.monotonic() + _FAREWELL
        while (left := self.processes()) and (remaining := deadline - time.monotonic()) > 0:
            for pid in left:
                _wait_for(pid, remaining)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return tuple(left.values())

    def _read(self, enough: Callable[[], bool]) -> None:
        while not enough():
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._terminal], [], [], left)[0]:
                return
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # everybody has closed the other side
                return
            text = data.decode(errors="replace").replace("\r\n", "\n")
            self._seen += text
            with open(self._out, "a") as file:
                file.write(text)

    def _text(self) -> str:
        return self._out.read_text(errors="replace")


def _wait_for(pid: int, timeout: float) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([fd], [], [], timeout)
    finally:
        os.close(fd)


class Folder:
    """A folder of tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("pytest.ini", "[pytest]\n")

    def write(self, name: str, text: str) -> None:
        """Write a file, its text dedented."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, terminal: bool = False, fresh: bool = False
    ) -> Running:
        """Start ``pytest ARGUMENTS`` here.

        With ``terminal``, on a terminal that the caller types on; with ``fresh``, in a Python that has imported
        nothing, where a session otherwise may be forked from one that has imported torch.
        """
        return Running(self.path, arguments, env or {}, terminal=terminal, fresh=fresh)

    def run(self, *arguments: str, env: dict[str, str] | None = None, fresh: bool = False) -> Session:
        """Run ``pytest ARGUMENTS`` here to its end (:meth:`start`).

        Errors: AssertionError if it does not end, or leaves a process behind.
        """
        session = self.start(*arguments, env=env, fresh=fresh).end()
        assert session.orphans == (), session.out
        return session
