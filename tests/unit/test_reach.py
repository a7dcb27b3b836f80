"""Which lines ranks reach: written at once, by every thread, and reported as coverage does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from harness.audit import reach

SOURCE = """
def f(a):
    if a:
        return 1
    return 2


def g(a):
    for i in range(a):
        if i > 5:
            raise KeyError
    return a


def never():
    return 0
"""


def run(folder: Path, code: str) -> tuple[reach.Steps, str, int]:
    """Trace a process that runs some code with the source at hand; its steps, the source's path, the exit status."""
    file, out = folder / "traced.py", folder / "out"
    file.write_text(SOURCE)
    out.mkdir()
    text = f"""
        import os, sys, threading
        sys.path.insert(0, {str(folder)!r})
        import traced
        from harness.audit import reach
        reach.start(reach.argument({str(out)!r}, [{str(file)!r}]))
        {code}
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], env=environment, check=False)
    return reach.collect(out, [str(file)]), str(file), ended.returncode


def lines(folder: Path, code: str) -> list[int]:
    steps, file, _ = run(folder, code)
    return sorted({line for step in steps.get(file, ()) for line in step if line > 0})


def test_lines(tmp_path: Path) -> None:
    """Those of functions that are called, and of the branches that are taken."""
    assert lines(tmp_path, "traced.f(1)") == [3, 4]


def test_other_branch(tmp_path: Path) -> None:
    """The other side."""
    assert lines(tmp_path, "traced.f(0)") == [3, 5]


def test_threads(tmp_path: Path) -> None:
    """Of threads as well."""
    assert lines(tmp_path, "t = threading.Thread(target=traced.f, args=(1,)); t.start(); t.join()") == [3, 4]


def test_killed(tmp_path: Path) -> None:
    """Nothing is lost with a process that is killed."""
    steps, file, status = run(tmp_path, f"traced.g(2); os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert status == -signal.SIGKILL
    assert sorted(steps[file]) == [(-8, 9), (9, 10), (9, 12), (10, 9), (12, -8)]


def test_exceptions_are_no_returns(tmp_path: Path) -> None:
    """A function that is left by an exception has not reached its end."""
    steps, file, _ = run(tmp_path, "try: traced.g(9)\n        except KeyError: pass")
    assert (10, 11) in steps[file]
    assert (11, -8) not in steps[file]


def test_collected_once(tmp_path: Path) -> None:
    """What was collected is not there a second time."""
    steps, _, _ = run(tmp_path, "traced.f(1)")
    assert steps
    assert reach.collect(tmp_path / "out", []) == {}


def test_report(tmp_path: Path) -> None:
    """Lines and branches as coverage counts them; a file that nobody reached has its row."""
    steps, _file, _ = run(tmp_path, "traced.f(1); traced.g(1)")
    other = tmp_path / "other.py"
    other.write_text("def h():\n    return 1\n")
    text = reach.report({**steps, str(other): ()}, tmp_path / "pages")
    (row,) = [line for line in text.split("\n") if "traced.py" in line]
    assert row.split()[-3:] == ["5,", "11,", "16"]
    (row,) = [line for line in text.split("\n") if "other.py" in line]
    assert row.split()[-1] == "2"
    assert (tmp_path / "pages" / "index.html").is_file()
