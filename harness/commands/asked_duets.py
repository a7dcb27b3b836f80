"""Duets that other commands ask for: ``concord perf duet`` in a process of its own, whose result is read from a file.

Whatever happens to that process, the command that asked goes on with what it has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

import harness
from harness.redaction import Redactor
from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import one_line
from harness.safe_io.untrusted import Allowance, Refused, json_checked

Ratio = Annotated[float, Meta(ge=0, le=1e9)]
INTERRUPTED = 130
_OF_HISTORY = "CONCORD_HISTORY"
_LARGEST = 256 << 20
_SLACK = 900.0
"""Seconds that a duet may take beyond its time: to start, to end a generation, and to give up a side."""
_ENDED = (0, 1)
"""Exit statuses of a duet with a result."""


class NoDuet(ValueError):
    """A duet that has no result.  The message says why."""


class Row(msgspec.Struct, frozen=True):
    """What a duet says about a series: B against A."""

    name: str
    verdict: str
    ratio: Ratio | None = None
    low: Ratio | None = None
    high: Ratio | None = None
    figure: str = ""
    why: str = ""
    generations: int = 0


class Result(msgspec.Struct, frozen=True):
    """What a duet says."""

    series: list[Row]
    seconds: float
    ended: str = ""
    """Why it ended before everything was decided; empty: it did not."""


@dataclass(frozen=True)
class Asked:
    """A duet to run."""

    a: str
    b: str
    series: Sequence[str]
    """Names of series."""
    minutes: float
    margin: float
    """Percent."""
    folder: Path
    """For its journal, its sides' output and its result; the same folder continues an interrupted duet."""
    options: Sequence[str] = ()
    """More options of ``concord perf duet``."""
    cwd: Path | None = None


def run(asked: Asked, say: Callable[[str], object]) -> Result:
    """Run a duet, and pass its output on without credentials.

    Errors: :class:`NoDuet`; OSError; KeyboardInterrupt if it was interrupted.
    """
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    named = [word for name in asked.series for word in ("-k", name)]
    command = [sys.executable, "-P", "-m", "harness.commands.main", "perf", "duet", asked.a, asked.b, *named]
    command += ["--minutes", f"{asked.minutes:g}", "--margin", f"{asked.margin:g}", "--out", str(folder)]
    command += ["--json", str(file), *asked.options]
    status, last = _finished(command, 60 * asked.minutes + _SLACK, asked.cwd, say)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status not in _ENDED:
        how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
        raise NoDuet(f"the duet {how}{f': {last}' if last else ''}")
    return read(file)


def _finished(command: Sequence[str], limit: float, cwd: Path | None, say: Callable[[str], object]) -> tuple[int, str]:
    """Run a command for at most ``limit`` seconds.  Returns its exit status and its last line."""
    without, last = Redactor(os.environ, sys.argv[1:]), ""
    inherited = {name: value for name, value in os.environ.items() if name != _OF_HISTORY}
    own = str(Path(harness.__file__).parents[1])
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (own, inherited.get("PYTHONPATH", ""))))
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=inherited, cwd=cwd, stdin=subprocess.DEVNULL, **how) as process:  # type: ignore[call-overload]
        late = threading.Timer(limit, process.kill)  # its sides end with it
        late.start()
        try:
            for text in map(without, process.stdout):
                say(text)
                last = text.strip() or last
        finally:
            late.cancel()
    return process.returncode, one_line(last)[:500]


def read(file: Path) -> Result:
    """Read the result of a duet.  Errors: :class:`NoDuet`."""
    try:
        data = json_checked(contents(file, _LARGEST), Allowance())
        return msgspec.json.decode(data, type=Result)
    except (FileError, Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise NoDuet(f"the duet left no result that can be read: {one_line(str(e))[:300]}") from e
