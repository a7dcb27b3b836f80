"""``concord bisect --perf``: the first slower environment or commit, with made-up duets, and once with real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from harness.commands import asked_duets, perf_bisect
from harness.commands.asked_duets import Asked, NoDuet, Row
from harness.commands.asked_duets import Result as Duet
from harness.commands.main import app
from harness.commands.perf_bisect import Answer, read, told
from harness.versions.weighing import ERROR, UNSURE

ROOT = Path(__file__).parents[2]
SERIES = "all_reduce sum float32 8 KiB 2 ranks · gloo on cpu"


class Duets:
    """Duets that are made up: candidates from a number on are slower by 40 %, unless an answer is to be another."""

    def __init__(self) -> None:
        self.first = 99
        self.asked: list[Asked] = []
        self.said: dict[int, Row | BaseException] = {}
        self.number_of: Callable[[Asked], int] = lambda asked: int(re.findall(r"N=(\d+)", asked.b)[0])

    def run(self, asked: Asked, say: object) -> Duet:
        self.asked.append(asked)
        said = self.said.get(len(self.asked))
        if isinstance(said, BaseException):
            raise said
        slower = self.number_of(asked) >= self.first
        return Duet([said or row(slower)], 60.0)


def row(slower: bool, **fields: object) -> Row:
    given = {"name": SERIES, "verdict": "slower" if slower else "equal", "ratio": 1.4 if slower else 1.01}
    return Row(**given | {"low": 1.3 if slower else 0.98, "high": 1.5 if slower else 1.04} | fields)  # type: ignore[arg-type]


@pytest.fixture
def duets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Duets:
    """A folder of its own, and duets that are made up instead of processes."""
    found = Duets()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asked_duets, "run", found.run)
    monkeypatch.setattr(perf_bisect, "environment", lambda place, root: None)
    return found


def bisect(*words: str) -> Result:
    return CliRunner().invoke(app, ["bisect", "--perf", SERIES, *words])


def environments(count: int) -> list[str]:
    """The options of so many environments."""
    between = [word for i in range(1, count - 1) for word in ("--env", f"venv N={i}")]
    return ["--good", "venv N=0", "--bad", f"venv N={count - 1}", *between]


def test_first_slower_environment(duets: Duets) -> None:
    """The last one is asked about first, each duet is with the good one, and half of the step counts as equal then."""
    duets.first = 5
    found = bisect(*environments(9), "--json", "found.json")
    assert found.exit_code == 0, found.output
    assert re.search(r"^first slower: venv N=5 \(9\d\.\d%, \d+ duets, \d\.\d min\)$", found.output, re.MULTILINE)
    assert re.search(r"9 candidates; about \d+ duets to do \(in nine of ten cases at most \d+\)", found.output)
    assert "likeliest: " in found.output
    assert [asked.a for asked in duets.asked] == ["venv N=0"] * len(duets.asked)
    assert (duets.asked[0].b, duets.asked[0].series) == ("venv N=8", [SERIES])
    assert [round(asked.margin) for asked in duets.asked[:2]] == [5, 18]
    result = json.loads(Path("found.json").read_text())
    assert (result["first_slower"], result["probability"] > 0.95) == ("venv N=5", True)
    assert len(result["answers"]) == len(duets.asked)


@pytest.mark.parametrize("wrong", range(1, 8))
def test_a_wrong_answer(duets: Duets, wrong: int) -> None:
    """Whichever duet is wrong, the result is right, with some more duets."""
    duets.first = 3
    right = {i: i >= 3 for i in range(7)}

    def lying(asked: Asked, say: object) -> Duet:
        duets.asked.append(asked)
        lie = len(duets.asked) == wrong
        return Duet([row(right[duets.number_of(asked)] != lie)], 60.0)

    asked_duets.run = lying  # restored by the fixture
    found = bisect(*environments(7))
    assert "first slower: venv N=3 (" in found.output, found.output
    assert len(duets.asked) < 20


def test_not_even_the_last_is_slower(duets: Duets) -> None:
    """It is said, and the exit code is 1."""
    found = bisect(*environments(4))
    assert found.exit_code == 1
    assert "none is slower, not even the last (9" in found.output
    assert {asked.b for asked in duets.asked} == {"venv N=3"}


def test_continues(duets: Duets) -> None:
    """An interrupted call, and one whose time was used up, go on with the answers that are kept."""
    duets.first = 5
    duets.said[3] = KeyboardInterrupt()
    first = bisect(*environments(9))
    assert first.exit_code == 130
    assert "interrupted; the same command continues" in first.output
    second = bisect(*environments(9))
    assert second.exit_code == 0
    assert "2 duets are kept" in second.output
    assert duets.asked[2].folder == duets.asked[3].folder  # where the interrupted duet has its journal
    before = len(duets.asked)
    assert bisect(*environments(9)).exit_code == 0
    assert len(duets.asked) == before
    other = bisect(*environments(9)[:-2])
    assert "are kept" not in other.output


def test_the_time_is_used_up(duets: Duets, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates that are probable are named, and more time continues."""
    duets.first = 5
    now = [0.0]
    monkeypatch.setattr(perf_bisect.time, "monotonic", lambda: now.__setitem__(0, now[0] + 300.0) or now[0])
    found = bisect(*environments(9), "--minutes", "12")
    assert found.exit_code == 1
    assert "the time is used up: a larger --minutes continues" in found.output
    assert re.search(r"first slower: one of venv N=\d.*\(3 duets, 15.0 min\)", found.output)
    assert [round(asked.minutes, 1) for asked in duets.asked] == [10.0, 7.0, 2.0]
    assert bisect(*environments(9), "--minutes", "600").exit_code == 0


def test_candidates_that_break(duets: Duets) -> None:
    """One that cannot be measured is skipped with its reason, and the result names those that nothing tells apart."""
    duets.first = 3
    right = duets.run

    def breaking(asked: Asked, say: object) -> Duet:
        if duets.number_of(asked) == 2:
            raise NoDuet("the duet exited with 2: it has no \x1b[31mtorch")
        return right(asked, say)

    asked_duets.run = breaking  # restored by the fixture
    found = bisect(*environments(5))
    assert found.exit_code == 1
    assert "venv N=2: skipped: the duet exited with 2: it has no" in found.output
    assert "\x1b" not in found.output
    assert "first slower: one of venv N=2, venv N=3 (" in found.output


def test_a_duet_that_breaks_once(duets: Duets) -> None:
    """It is tried once more at once; what could not be measured in one call is tried again by the next."""
    duets.first = 3
    duets.said[1] = NoDuet("a server was not ready")
    found = bisect(*environments(5))
    assert "venv N=4: skipped: a server was not ready: tried once more" in found.output
    assert "first slower: venv N=3 (" in found.output
    assert [duets.number_of(asked) for asked in duets.asked[:2]] == [4, 4]
    assert duets.asked[0].folder != duets.asked[1].folder


def test_made_environments(duets: Duets, tmp_path: Path) -> None:
    """A command makes each one that is asked about; one that can't be made is skipped."""
    duets.number_of = lambda asked: int(Path(asked.b, "version").read_text())
    duets.first = 3
    make = "mkdir {folder} && test {candidate} != 2 && echo {candidate} >{folder}/version"
    perf = {"--candidates": "0 1 2 3 4 5", "--make": make}
    from harness.versions import candidates

    class There:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

    original = candidates.environment
    candidates.environment = lambda folder, root: There(folder)  # type: ignore[assignment]
    try:
        found = bisect(*(word for pair in perf.items() for word in pair), "--discard")
    finally:
        candidates.environment = original
    assert "first slower: one of 2, 3 (" in found.output, found.output
    assert "2: skipped: the command that makes it exited with 1" in found.output
    assert [asked.a == asked.b for asked in duets.asked] == [False] * len(duets.asked)
    assert len(list(tmp_path.rglob("version"))) == 1  # the good one's


@pytest.fixture
def repository(tmp_path: Path, duets: Duets) -> list[str]:
    """A repository of six commits in the current folder.  Returns their ids."""
    found = []

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    for number in range(6):
        (tmp_path / "number").write_text(str(number))
        git("add", "number")
        git("commit", "-qm", f"change {number} \x1b[31m")
        found.append(git("rev-parse", "HEAD"))
    return found


def test_first_slower_commit(duets: Duets, repository: list[str]) -> None:
    """Each duet runs in a tree of the candidate's commit, against the good commit; the trees are removed."""
    duets.first = 4
    duets.number_of = lambda asked: int((asked.cwd or Path()).joinpath("number").read_text())
    found = bisect("--commits", "--good", repository[1], "--bad", "HEAD")
    assert found.exit_code == 0, found.output
    assert f"first slower: {repository[4][:12]} change 4" in found.output
    assert "\x1b" not in found.output
    assert all(asked.options == ("--base", repository[1]) for asked in duets.asked)
    assert not any(asked.cwd.exists() for asked in duets.asked if asked.cwd)
    wrong = bisect("--commits", "--good", "HEAD", "--bad", repository[1])
    assert (wrong.exit_code, "is no ancestor of" in wrong.output) == (2, True), wrong.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--good and --bad are needed"),
        (["--good", "a"], "--good and --bad are needed"),
        (["--good", "a", "--bad", "a"], "none twice"),
        (["--candidates", "1 2"], "give --candidates with --make"),
        (["--candidates", "1", "--make", "x"], "none twice"),
        (["--commits", "--good", "a", "--bad", "b", "--env", "c"], "or --commits"),
        (["--good", "a", "--bad", "b", "suites/"], "--perf has no test"),
        (["--good", "a", "--bad", "b", "--tries", "2"], "no --tries"),
    ],
)
def test_bad_input(duets: Duets, words: list[str], says: str) -> None:
    """It is refused in a line, before anything is measured."""
    found = bisect(*words)
    assert (found.exit_code, says in " ".join(found.output.split()), duets.asked) == (2, True, []), found.output


def test_neither_a_test_nor_a_series(duets: Duets) -> None:
    """One of them is needed, and commits go with a series."""
    for words, says in (([], "no test: name one"), (["suites/", "--commits"], "--commits goes with --perf")):
        found = CliRunner().invoke(app, ["bisect", *words])
        assert (found.exit_code, says in found.output) == (2, True)


def test_what_a_duet_says() -> None:
    """A decision counts as one; an estimate counts less, and is judged by half of the step; a failure is no answer."""
    assert told(row(True), 1.4)["bad"] is True
    assert told(row(False), 1.4) | {"error": 0} == told(row(False), 1.4) | {"bad": False, "error": 0}
    undecided = row(False, verdict="undecided", ratio=1.15, low=0.9, high=1.5)
    assert [told(undecided, step)["bad"] for step in (1.2, 1.5, 1.0)] == [True, False, True]
    assert (told(undecided, 1.2)["error"], told(row(True), 1.2)["error"]) == (UNSURE, ERROR)
    for nothing in (row(True, verdict="failed", why="A: rank 0 died"), row(True, verdict="undecided", ratio=None)):
        assert told(nothing, 1.2)["bad"] is None


@pytest.mark.parametrize(
    "text", ["{}\n", "[" * 10_000 + "\n", '{"candidate":"a","number":1,"bad":true,"error":0.9}\n', "\xff\n"]
)
def test_a_damaged_file_of_answers(text: str, tmp_path: Path) -> None:
    """The line is named, and what to do."""
    file = tmp_path / "answers.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"answers.jsonl, line 1: no answer of a bisection \(.+\); remove the file"):
        read(file, 3)


def test_a_cut_file_of_answers(tmp_path: Path) -> None:
    """A last line that was cut off does not count; an answer about no candidate is refused."""
    import msgspec

    file = tmp_path / "answers.jsonl"
    answer = Answer(candidate="a", number=2, bad=True)
    file.write_bytes(msgspec.json.encode(answer) + b'\n{"candidate":')
    assert read(file, 3) == [answer]
    with pytest.raises(ValueError, match="candidate 2 of 2"):
        read(file, 2)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_real_environments(tmp_path: Path) -> None:
    """Of three environments that a variable tells apart, the one whose all_reduce takes half longer is found."""
    venv = [f"{sys.prefix} CONCORD_SLOWER=8192={factor}" for factor in ("1.0", "1.00", "1.5")]
    command = [sys.executable, "-m", "harness.commands.main", "bisect", "--perf", SERIES]
    command += ["--profile", "tests/bench/slowed/profile.toml", "--good", venv[0], "--env", venv[1], "--bad", venv[2]]
    command += ["--minutes", "75", "--out", str(tmp_path), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["first_slower"] == venv[2]
