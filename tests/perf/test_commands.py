"""``concord perf`` from files to verdicts, as a person at a terminal sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from harness.bench.history.nights import dumps
from harness.bench.history.store import VARIABLE, History
from harness.commands.main import app
from harness.commands.perf import sparkline, time_of
from tests.perf.nights import night, noisy, series


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of 24 nights of six series, by way of the variable."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "perf.sqlite"))
    monkeypatch.setenv("COLUMNS", "300")
    logs = noisy(np.random.default_rng(3), 24, 6, outliers=0.0)
    with History() as history:
        for i, row in enumerate(logs):
            history.add(night(f"n{i}", started=86400.0 * (i + 1), values=np.exp(row).tolist()))
    return tmp_path


def concord(*words: str) -> Result:
    return CliRunner().invoke(app, ["perf", *words])


def add(*factors: float, start: int = 24) -> None:
    """Nights in which the series of 4 and 8 KiB take so many times as long."""
    logs = noisy(np.random.default_rng(3), 24 + start, 6, outliers=0.0)
    level = np.median(logs[:24], 0)
    with History() as history:
        for i, factor in enumerate(factors):
            values = np.exp(level + 0.005 * np.random.default_rng(i + start).standard_normal(6))
            values[2:4] *= factor
            history.add(night(f"n{start + i}", started=86400.0 * (start + i + 1), values=values.tolist()))


def test_gate_names_a_band_and_accept_ends_it(place: Path) -> None:
    """An injected step is one alarm with its band; accepted with a reason, it is one no more."""
    assert concord("gate").exit_code == 0
    add(1.5, 1.5, 1.5)
    found = concord("gate", "--json", str(place / "found.json"))
    assert found.exit_code == 1
    assert re.search(
        r"ALARM  all_reduce sum float32 4 KiB to 8 KiB on 4 ranks \+\d+ % \(\d+ to \d+ %\) since", found.output
    )
    assert "commit commit-n24" in found.output
    (alarm,) = json.loads((place / "found.json").read_text())["alarms"]
    assert alarm["since"] == "n24"
    assert "step +" in concord("show").output
    assert concord("accept", "4 KiB", "--reason", "checked on purpose", "--who", "someone").exit_code == 0
    with History() as history:
        kept = history.line().accepted
    assert {(one.reason, one.who, one.night) for one in kept} == {("checked on purpose", "someone", "n24")}
    assert concord("gate").exit_code == 0


def test_accept_wants_an_alarm_and_a_reason(place: Path) -> None:
    """Words that no alarm has, and an empty reason, change nothing and say why."""
    for words, reason, says in (
        ("4 KiB", "r", "no alarm has '4 KiB' in its line: there is none"),
        ("x", " ", "no reason"),
    ):
        found = concord("accept", words, "--reason", reason)
        assert (found.exit_code, says in found.output) == (2, True), found.output


def test_store(place: Path) -> None:
    """Files are stored once; what is none is named, and does not keep the others out."""
    (place / "a.json").write_bytes(dumps(night("a", started=9e6)))
    (place / "b.json").write_text("{")
    first = concord("store", str(place / "b.json"), str(place / "a.json"))
    assert (first.exit_code, "a.json: night a: 3 series" in first.output, "b.json: damaged" in first.output) == (
        2,
        True,
        True,
    )
    again = concord("store", str(place / "a.json"))
    assert (again.exit_code, "there already" in again.output) == (0, True)


def test_lists(place: Path) -> None:
    """Nights and series are listed, with names that a terminal could take for markup left alone."""
    with History() as history:
        history.add(night("[bold]x", started=9e6, of=series(3, operation="[red]op")))
    nights, names = concord("history"), concord("history", "--series")
    assert nights.output.count("commit-n") == 24
    assert "[bold]x" in nights.output
    assert "[red]op sum float32 1 KiB 4 ranks" in names.output


def test_bad_input(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command says in a line what is wrong, and exits with 2."""
    (place / "text").write_text("no database at all, only text " * 30)
    for command in ("gate", "show", "history", "calibrate"):
        found = concord(command, "--history", str(place / "text"))
        assert (found.exit_code, "not a history" in found.output) == (2, True), found.output
    for command in ("gate", "show", "calibrate"):
        empty = concord(command, "--history", str(place / "new.sqlite"))
        assert (empty.exit_code, "no nights yet" in empty.output) == (2, True)
        unknown = concord(command, "--night", "nobody")
        assert (unknown.exit_code, "no night nobody" in unknown.output) == (2, True)


def test_calibrate(place: Path) -> None:
    """Rates and detection are printed for the gate and the others, and written."""
    found = concord("calibrate", "--nights", "20", "--trials", "5", "--json", str(place / "c.json"))
    assert found.exit_code == 0, found.output
    for words in (
        "24 nights, 6 series",
        "E-divisive",
        "pytest-benchmark mean:5%",
        "smallest step found within 3 nights",
    ):
        assert words in found.output
    written = json.loads((place / "c.json").read_text())
    assert written["alarms"]["concord perf gate"]["of"] == 20


@pytest.mark.parametrize("columns", ["80", "300"])
def test_nights_are_listed_and_named(place: Path, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """The list has beginnings of ids on one line each, by which a night can be named; one of two ids is refused."""
    monkeypatch.setenv("COLUMNS", columns)
    ids = ["nccl-tests-1234567890abcdef", "nccl-tests-1234567890abcdee", "0123456789abcdef0123456789abcdef"]
    with History() as history:
        for i, name in enumerate(ids):
            history.add(night(name, started=86400.0 * (40 + i), values=[1.0] * 6))
    found = [line.strip() for line in concord("history").output.splitlines()]
    for short in (*ids[:2], "0123456789ab"):
        (line,) = [line for line in found if line.startswith(short)]
        assert "1970-" in line
        assert concord("show", "--night", short).exit_code == 0
    several = concord("show", "--night", "nccl-tests-")
    assert (several.exit_code, "2 nights whose ids begin with nccl-tests-" in several.output) == (2, True)
    assert concord("show", "--night", "n1").exit_code == 0  # whose id is the beginning of others


def test_calibrate_needs_nights(tmp_path: Path) -> None:
    """A few nights are too few, and the error says how many it takes."""
    with History(tmp_path / "h") as history:
        history.add(night("a"))
    found = concord("calibrate", "--history", str(tmp_path / "h"))
    assert (found.exit_code, "needs 8 nights" in found.output) == (2, True)


def test_sparklines_and_times() -> None:
    """A sparkline has a character a night, gaps included; times have a unit."""
    assert sparkline(np.array([1.0, np.nan, 3.0])) == "▁ █"
    assert sparkline(np.array([2.0, 2.0])) == "▄▄"
    assert sparkline(np.array([np.nan])) == " "
    assert [time_of(x) for x in (2.5, 0.0025, 2.5e-6, 2.5e-9)] == ["2.5 s", "2.5 ms", "2.5 µs", "2.5 ns"]


def test_scaling(place: Path) -> None:
    """The newest night's curves are a table; without several numbers of ranks, it is said how to measure them."""
    nothing = concord("scaling")
    assert nothing.exit_code == 2
    assert "nothing was measured on several numbers of ranks; measure with --perf-ranks 1,2,4" in nothing.output
    several = [*series(1, world=2), *series(1, world=4)]
    with History() as history:
        history.add(night("several", started=86400.0 * 60, values=[1e-3, 3e-3], of=several))
    found = concord("scaling", "--night", "several")
    assert found.exit_code == 0
    assert re.search(r"all_reduce +1 KiB, float32 +\S+ 100% +\S+ 50%", found.output)
