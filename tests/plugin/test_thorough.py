"""Thorough runs, as users start them, interrupt them, and start them again."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions import Folder, Running, Session

from harness.thorough import journal

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MakeFolder = Callable[[dict[str, str]], Folder]

TESTS = """
    import os, time
    from pathlib import Path
    from hypothesis import assume, given, strategies as st
    from harness.programs.share import examples

    def note(*values):
        with open("drawn.txt", "a") as file:
            print(*values, file=file)

    @given(value=st.integers(0, 10**9))
    @examples(6)
    def test_first(value):
        time.sleep(0.01)
        note("first", value)
        assume(value % 4)

    @given(value=st.integers(0, 10**9))
    @examples(6)
    def test_second(value):
        time.sleep(0.01)
        note("second", value)
        assert value < 900_000_000 or not Path("defect").exists()
"""
FIRST, SECOND = "test_it.py::test_first", "test_it.py::test_second"


@pytest.fixture
def folder(make_folder: MakeFolder) -> Folder:
    return make_folder({"test_it.py": TESTS})


def environment(**more: str) -> dict[str, str]:
    """Of a thorough run; the CI variable makes Hypothesis derandomize, and have no database."""
    return {"CONCORD_EXAMPLES": "thorough", "PYTHONPATH": str(ROOT), "CI": "true", **more}


def started(folder: Folder, *arguments: str, terminal: bool = False, **more: str) -> Running:
    return folder.start(
        "-p", "harness.plugin", "-p", "no:cacheprovider", *arguments, env=environment(**more), terminal=terminal
    )


def ran(folder: Folder, *arguments: str, **more: str) -> Session:
    return started(folder, *arguments, **more).end()


def progress(folder: Folder) -> dict[str, journal.Progress]:
    """What the journal says, by test."""
    tally = journal.Journal(folder.path / "reports/out/thorough/progress.jsonl", "progress").read()
    return {p.test: p for p in tally.properties.values()}


def drawn(folder: Folder, name: str) -> list[int]:
    """What a property has drawn in all sessions so far."""
    lines = (folder.path / "drawn.txt").read_text().splitlines() if (folder.path / "drawn.txt").exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == name]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_counts(folder: Folder) -> None:
    """Fifty times the examples, new ones in every run, and a table of them."""
    one = ran(folder)
    assert one.counts == {"passed": 2}
    first, second = progress(folder)[FIRST], progress(folder)[SECOND]
    assert (first.passed, second.passed) == (300, 300)
    assert first.given_up > 20
    assert first.passed + first.given_up == len(drawn(folder, "first"))
    assert len(second.contents) > 250
    one.lines.fnmatch_lines([f"{FIRST} *300 *{len(first.contents)} *{first.given_up} * passed"])
    before = set(drawn(folder, "second"))
    two = ran(folder)
    assert "a new run: the one before was done" in two.out
    assert len(set(drawn(folder, "second")) - before) > 250


def test_other_settings_keep_nothing(folder: Folder) -> None:
    """Only a thorough run has a state."""
    session = ran(folder, CONCORD_EXAMPLES="2")
    assert session.counts == {"passed": 2}
    assert len(drawn(folder, "second")) == 12
    assert not (folder.path / "reports").exists()


@pytest.mark.parametrize("how", ["killed", pytest.param("killed, with workers", marks=pytest.mark.nightly), "Ctrl-C"])
def test_goes_on(folder: Folder, how: str) -> None:
    """Whatever interrupts a run, the same command goes on from there, and nothing is done twice."""
    more = ("-n", "2") if "workers" in how else ()
    running = started(folder, *more)
    until(lambda: len(drawn(folder, "second" if more else "first")) > 20)
    if how == "Ctrl-C":
        running.process.send_signal(signal.SIGINT)
        session = running.end()
        assert session.code == 2
        session.lines.fnmatch_lines([f"{FIRST} * interrupted", "2 of 2 not done: the same command goes on from here"])
    else:
        for pid in [running.process.pid, *running.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        running.end()
    before = progress(folder)
    known = {name: len(drawn(folder, name.rpartition("_")[2])) for name in (FIRST, SECOND)}
    for name in (FIRST, SECOND):  # one example may have been noted here, and not yet there
        assert known[name] - 1 <= before[name].passed + before[name].given_up <= known[name]
    session = ran(folder, *more)
    assert "goes on with the run of" in session.out
    assert session.counts == {"passed": 2}
    assert {p.passed for p in progress(folder).values()} == {300}
    assert len(drawn(folder, "first")) <= 1 + progress(folder)[FIRST].passed + progress(folder)[FIRST].given_up


@pytest.mark.nightly
def test_done_properties_are_passed_over(folder: Folder) -> None:
    """A property that is done is not run again until all are; then they begin anew."""
    assert ran(folder, "-k", "first").counts == {"passed": 1}
    running = started(folder)
    until(lambda: len(drawn(folder, "second")) > 50)
    running.process.send_signal(signal.SIGINT)
    running.end()
    count = len(drawn(folder, "first"))
    assert ran(folder).counts == {"passed": 2}
    assert len(drawn(folder, "first")) == count
    running = started(folder)
    until(lambda: len(drawn(folder, "first")) > count + 20)
    running.process.send_signal(signal.SIGINT)
    running.end()
    count = len(drawn(folder, "first"))
    assert "--start-over" in ran(folder, "-k", "first", "--start-over").out
    assert len(drawn(folder, "first")) >= count + 300
    kept = folder.path / "reports/out/thorough/progress-before.jsonl"
    assert journal.Journal(kept, "before").read().begun is not None


@pytest.mark.nightly
def test_selected_properties_that_are_done_begin_anew(folder: Folder) -> None:
    """What is left of another command's run does not keep a command from running."""
    running = started(folder)
    until(lambda: len(drawn(folder, "second")) > 50)
    running.process.send_signal(signal.SIGINT)
    running.end()
    count = len(drawn(folder, "first"))
    assert ran(folder, "-k", "first").counts == {"passed": 1}
    assert len(drawn(folder, "first")) >= count + 300


@pytest.mark.nightly
def test_failures_come_first(folder: Folder) -> None:
    """A failure is repeated from its seed, and is the first example of the next run, in CI and in workers too."""
    folder.write("defect", "")
    session = ran(folder, "-n", "2")
    assert session.counts == {"passed": 1, "failed": 1}
    assert "value=900000000," in session.out
    (seed,) = set(re.findall(r"--hypothesis-seed=(\d+)", session.out))
    sequence = drawn(folder, "second")
    kept = progress(folder)[SECOND]
    assert kept.outcome == "failed"

    (folder.path / "drawn.txt").unlink()
    session = ran(folder, "-k", "second")
    assert session.counts == {"failed": 1}
    assert drawn(folder, "second")[0] == 900_000_000
    assert "this failed before" in session.out

    (folder.path / "drawn.txt").unlink()
    counted = progress(folder)[SECOND].passed
    session = ran(folder, "-k", "second", f"--hypothesis-seed={seed}")
    assert session.counts == {"failed": 1}
    assert "this counts for nothing in the thorough run" in session.out
    assert "not done" not in session.out
    again = drawn(folder, "second")
    first = next(i for i, value in enumerate(again) if value >= 900_000_000)
    assert Counter(again[: first + 1]) <= Counter(sequence)
    assert progress(folder)[SECOND].passed == counted

    (folder.path / "defect").unlink()
    assert ran(folder, "-k", "second").counts == {"passed": 1}
    assert progress(folder)[SECOND].passed == 300


@pytest.mark.nightly
def test_budget(folder: Folder) -> None:
    """Properties share the time evenly, and say how far they are, with workers and without a terminal, too."""
    for workers, each in ((), 4.0), (("-n", "2"), 8.0):
        session = ran(folder, *workers, "--timeout=2", CONCORD_BUDGET="8s")
        assert session.counts == {"passed": 2}
        for p in progress(folder).values():
            assert each - 0.5 <= p.seconds <= each + 2
        assert re.search(rf"concord: {FIRST}: \d+ passed, \d+ given up, \ds, \ds left", session.out)


def test_progress_on_a_terminal(folder: Folder) -> None:
    """It is shown where output goes to, though the tests' own output is captured."""
    running = started(folder, terminal=True, CONCORD_BUDGET="6s")
    running.until("thorough, 6s for all properties; a new run")
    running.until(f"concord: {FIRST}: ")
    running.until(" 1 of 2 properties done")
    assert running.end().code == 0


@pytest.mark.nightly
def test_one_at_a_time(folder: Folder) -> None:
    """Two runs would do each other's work."""
    running = started(folder)
    until(lambda: len(drawn(folder, "first")) > 10)
    other = ran(folder)
    assert other.code == pytest.ExitCode.USAGE_ERROR
    assert "another thorough run is at work in" in other.err
    elsewhere = ran(folder, "-k", "first", CONCORD_STATE="elsewhere")
    assert elsewhere.counts == {"passed": 1}
    assert (folder.path / "elsewhere/progress.jsonl").exists()
    running.process.send_signal(signal.SIGINT)
    running.end()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CONCORD_EXAMPLES": "many"}, "CONCORD_EXAMPLES='many': one of smoke, default, thorough, or a factor above 0"),
        ({"CONCORD_EXAMPLES": "-1"}, "CONCORD_EXAMPLES='-1': one of"),
        ({"CONCORD_BUDGET": "1"}, "CONCORD_BUDGET='1': a time above 0 with its units, as in 90s, 30m, 8h or 1h30m"),
        ({"CONCORD_EXAMPLES": "smoke", "CONCORD_BUDGET": "1h"}, "set CONCORD_EXAMPLES=thorough as well, or unset it"),
        ({"CONCORD_STATE": "pytest.ini"}, "pytest.ini: File exists; name another folder in CONCORD_STATE"),
    ],
)
def test_bad_variables(folder: Folder, variables: dict[str, str], message: str) -> None:
    """One line that says what is wrong and what to do."""
    session = ran(folder, **variables)
    assert session.code == pytest.ExitCode.USAGE_ERROR
    (line,) = [x for x in session.err.splitlines() if x.strip()]
    assert message in line


def later(text: str, message: str) -> Any:
    """Return the case of a bad journal for the nightly job: each takes a session of its own."""
    return pytest.param(text, message, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("garbage\n", "line 1: no record of a thorough run"),
        later('{"record":"session","id":"1"}\n', "line 1: no record of a thorough run (not where it belongs)"),
        later('{"record":"thorough","time":0,"about":{},"version":9}\n', "version 9, and this Concord reads up to 1"),
        later('{"record":"thorough","time":0,"about":{}}\n\x00\xff\n', "line 2: no record"),
        later(
            '{"record":"thorough","time":0,"about":{}}\n{"record":"done","property":"x","outcome":"passed"}\n',
            "line 2: nobody planned the property 'x'",
        ),
    ],
)
def test_bad_journal(folder: Folder, text: str, message: str) -> None:
    """One line that names the file and the line; starting over keeps what was there."""
    path = folder.path / "reports/out/thorough/progress.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    session = ran(folder, "-k", "first")
    assert session.code == pytest.ExitCode.USAGE_ERROR
    (line,) = [x for x in session.err.splitlines() if x.strip()]
    assert "reports/out/thorough/progress.jsonl, line" in line
    assert message in line
    assert line.endswith("--start-over begins a new one, and keeps this file beside it")
    assert ran(folder, "-k", "first", "--start-over").counts == {"passed": 1}
    assert path.with_name("progress-before.jsonl").read_bytes() == text.encode("latin-1")


@pytest.mark.nightly
def test_cut_off_line(folder: Folder) -> None:
    """What a power cut leaves of the last line does not count, and spoils nothing."""
    assert ran(folder, "-k", "first").counts == {"passed": 1}
    path = folder.path / "reports/out/thorough/progress.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[: len(lines) // 2]
    path.write_bytes(b"".join(kept) + lines[len(kept)][:9])
    examples = sum(json.loads(line).get("outcome") == "passed" for line in kept)
    session = ran(folder, "-k", "first")
    assert session.counts == {"passed": 1}
    assert progress(folder)[FIRST].passed == 300
    assert sum(json.loads(x).get("outcome") == "passed" for x in path.read_text().splitlines()[len(kept) :]) == (
        300 - examples + 1  # and that it is done
    )


@pytest.mark.nightly
def test_other_torch(folder: Folder) -> None:
    """What another version did says nothing about this one."""
    assert ran(folder, "-k", "first").counts == {"passed": 1}
    path = folder.path / "reports/out/thorough/progress.jsonl"
    head, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(re.sub(r'"torch":"[^"]*"', '"torch":"1.0"', head) + "".join(rest[:50]))
    assert "a new run: the one before was of torch 1.0" in ran(folder, "-k", "first").out


@pytest.mark.nightly
def test_other_subject(folder: Folder) -> None:
    """What another subject did says nothing about this one."""
    assert ran(folder, "-k", "first", "--subject", "reference").counts == {"passed": 1}
    path = folder.path / "reports/out/thorough/progress.jsonl"
    head, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(head + "".join(rest[:50]))
    assert "a new run: the one before was of subject reference" in ran(folder, "-k", "first").out
