"""The nightly job: its parts, its one line, and that a bad part stops no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands import nightly
from harness.commands.main import app
from harness.commands.nightly import (
    Outcome,
    Part,
    last_words,
    markdown,
    of_confirm,
    of_gate,
    of_pytest,
    one_line,
    parts,
)

ROOT = Path(__file__).parents[2]
GOOD = Part("gate", ("concord", "perf", "gate"), of_gate)
BAD = Part("suites", ("pytest", "suites/"), of_pytest, {"CONCORD_EXAMPLES": "thorough"})


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["..", "=== 5 passed in 1.20s ==="], "5 passed in 1.20s"),
        (["FAILED a.py::b - x", "1 failed, 2 passed in 3s"], "1 failed, 2 passed in 3s: a.py::b"),
        ([f"FAILED t{i}" for i in range(5)] + ["5 failed"], "5 failed: t0, t1, t2 and 2 more"),
        (["ERROR: usage"], "no result"),
        ([], "no result"),
    ],
)
def test_what_pytest_said(lines: list[str], says: str) -> None:
    """Its last line, and a few of the tests that were bad."""
    assert of_pytest(lines) == says


def test_what_others_said() -> None:
    """The gate's first alarm, the last line of others, and that there was none."""
    assert of_gate(["night 1: 2 alarms", "ALARM  slower", "ALARM  lost"]) == "slower (and 1 more)"
    assert of_gate(["", "night 1: no alarm"]) == "night 1: no alarm"
    assert last_words(["a", "b", ""]) == "b"
    assert last_words([]) == of_gate([]) == "no output"


def test_what_the_duet_said() -> None:
    """What it found slower, or its last line; its options reach it, and the gate has spoken before it begins."""
    assert of_confirm(["suspected: a", "equal: a", "slower: b", "slower: c"]) == "slower: b; slower: c"
    assert of_confirm(["suspected: a", "concord: no duet with x: gone"]) == "concord: no duet with x: gone"
    given = ["--against", "venv", "--minutes", "5"]
    night = parts(Path("o"), budget="1h", sample=1, history="", duet=given)
    names = [part.name for part in night]
    assert names.index("gate") + 1 == names.index("confirm") == names.index("page") - 1
    assert list(night[names.index("confirm")].command[-4:]) == given


def test_a_night_without_anything_to_do() -> None:
    """One line that says so, with what each part said."""
    assert one_line([Outcome(GOOD, 0, 1.0, "fine")]) == "nightly: nothing to do; gate: fine"


def test_a_bad_night() -> None:
    """One line: which part, what, and how to run it by hand; good parts are not in it."""
    found = one_line([Outcome(GOOD, 0, 1.0, "fine"), Outcome(BAD, 1, 2.0, "1 failed: t")])
    assert found == "nightly: suites: 1 failed: t (`CONCORD_EXAMPLES=thorough pytest suites/`)"


def test_the_summary_shows_text_as_text() -> None:
    """A line of output is no markup of the job's summary."""
    found = markdown([Outcome(GOOD, 1, 61.4, "<b>|`x`")])
    assert "| gate | **exit 1** | 61 s | \\<b\\>\\|\\`x\\` |" in found


def test_parts_by_name() -> None:
    """Some of them, in the night's order; a name that is none is refused."""
    names = [part.name for part in parts(Path("o"), budget="1h", sample=1, history="", only=["audit", "gate"])]
    assert names == ["gate", "audit"]
    with pytest.raises(ValueError, match="no part 'x' of the nightly job; there are benchmarks, "):
        parts(Path("o"), budget="1h", sample=1, history="", only=["x"])


HISTORY = "postgresql://bob:hunter2@db/perf"


def test_the_history_is_on_no_command_line() -> None:
    """A history's URL is in the environment of the parts that need it, and nobody is shown its password."""
    night = parts(Path("o"), budget="1h", sample=1, history=HISTORY)
    assert [part.name for part in night if part.env.get("CONCORD_HISTORY") == HISTORY] == [
        *("history", "gate", "confirm", "page")
    ]
    shown = repr([(part.command, part.by_hand) for part in night])
    assert "hunter2" not in shown
    assert "CONCORD_HISTORY=postgresql://***@db/perf concord perf gate" in shown


def test_a_night_shows_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither what is printed, nor logs, nor the job's summary have a password; only the history's parts know it."""
    (tmp_path / "suites").mkdir()
    told = 'import os; raise SystemExit(f\'night {os.environ.get("CONCORD_HISTORY", "untold")} hunter2\')'
    (tmp_path / "pytest.py").write_text(told)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("CONCORD_HISTORY", HISTORY)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    chosen = [
        Part("suites", ("pytest", "suites"), last_words),
        Part("gate", ("pytest", "perf"), last_words, {"CONCORD_HISTORY": HISTORY}, history=True),
    ]
    monkeypatch.setattr(nightly, "parts", lambda *args, **options: chosen)
    result = CliRunner().invoke(app, ["nightly", "--out", str(tmp_path / "out"), "--history", HISTORY])
    kept = "".join(file.read_text() for file in [*(tmp_path / "out").iterdir(), tmp_path / "summary"])
    assert "night untold ***" in kept
    assert "night postgresql://***@db/perf ***" in kept
    assert "hunter2" not in result.output + kept + "".join(capfd.readouterr())


def test_every_part_is_a_command_that_there_is() -> None:
    """concord has the subcommands and the options, pytest has the options."""
    helped: dict[tuple[str, ...], str] = {}
    for part in parts(Path("o"), budget="1h", sample=1, history="sqlite://"):
        first, *rest = part.command
        words = tuple(rest[: next((i for i, w in enumerate(rest) if w.startswith("-") or "/" in w), len(rest))])
        if first == "concord":
            if words not in helped:
                result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
                assert result.exit_code == 0, result.output
                helped[words] = result.output
            missing = [w for w in rest if w.startswith("-") and f"{w} " not in helped[words]]
            assert missing == [], part.by_hand


def test_a_bad_part_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts run, their output is kept, the last line and the exit code say which was bad."""
    tests = tmp_path / "suites"
    tests.mkdir()
    (tests / "test_x.py").write_text("def test_bad(): assert False\n\ndef test_good(): pass\n")
    chosen = [
        Part("one", ("pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", "bad"), of_pytest),
        Part("two", ("pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", "good"), of_pytest),
    ]
    monkeypatch.setattr(nightly, "parts", lambda *args, **options: chosen)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    result = CliRunner().invoke(app, ["nightly", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    last = result.output.strip().split("\n")[-1]
    assert last.startswith("nightly: one: 1 failed, 1 deselected")
    assert "test_x.py::test_bad" in last
    assert "two" not in last
    assert "1 passed" in (tmp_path / "out" / "two.log").read_text()
    assert (tmp_path / "summary").read_text() == (tmp_path / "out" / "summary.md").read_text()


def test_from_another_folder(tmp_path: Path) -> None:
    """It says where it has to be run."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.commands.main", "nightly"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "has no folder suites; run this where they are" in done.stderr
