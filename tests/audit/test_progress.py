"""What an audit says while it runs, where there is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from harness.audit.table import Shown


def said(*phases: tuple[str, int, int, str]) -> list[str]:
    """Return the lines for phases: a name, how many steps were done before, of how many, and what each step says."""
    out = io.StringIO()
    with Shown(Console(file=out, force_terminal=False, width=100)) as shown:
        for name, done, of, line in phases:
            shown.phase(name, done, of)
            for _ in range(of - done):
                shown.step(line)
    return out.getvalue().splitlines()


def test_long_phase() -> None:
    """A phase without results says ten times how far it is, and one with fewer steps says each."""
    lines = said(("healthy", 0, 25, "passed test_x"))
    assert lines[0] == "healthy: 25 to do"
    assert lines[1:4] == ["healthy: 3 of 25", "healthy: 5 of 25", "healthy: 8 of 25"]
    assert len(lines) == 11
    assert lines[-1] == "healthy: 25 of 25"
    assert said(("healthy again", 0, 2, "passed")) == [
        "healthy again: 2 to do",
        "healthy again: 1 of 2",
        "healthy again: 2 of 2",
    ]


def test_continued_phase() -> None:
    """What an interrupted audit had done counts."""
    assert said(("healthy", 98, 100, "passed"))[1:] == ["healthy: 100 of 100"]
    assert said(("healthy", 100, 100, "passed")) == ["healthy: 0 to do"]


def test_defects() -> None:
    """Each defect has its line, which is progress enough."""
    lines = said(("healthy", 1, 1, ""), ("defects", 0, 2, "killed x by test_y, 0.1 s"))
    assert lines == ["healthy: 0 to do", "defects: 2 to do", *["killed x by test_y, 0.1 s"] * 2]
