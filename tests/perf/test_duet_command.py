"""``concord perf duet`` as a person at a terminal sees it, with sides that are made up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from harness.bench.duet.messages import Ranks
from harness.bench.duet.run import Duet
from harness.bench.duet.sides import Setting, SideFailed
from harness.bench.records import Series
from harness.commands import duet as command
from harness.commands.duet import asks_for, chosen, parsed, progress_of
from harness.commands.main import app
from tests.perf import duets
from tests.perf.duets import OFFERS, SIZES, FakeSide, Machine


class Stage:
    """Where a command finds its sides."""

    def __init__(self) -> None:
        self.machine = Machine(3, ranks=0.03)
        self.steps: dict[int, float] = {}
        self.settings: dict[str, Setting] = {}
        self.sides: dict[str, FakeSide] = {}
        self.prepared: Callable[[FakeSide], None] = lambda side: None

    def side(self, setting: Setting, log: Path) -> FakeSide:
        self.settings[setting.name] = setting
        side = FakeSide(setting.name, self.machine, self.steps if setting.name == "B" else {})
        side.setting = setting  # type: ignore[assignment]
        self.sides[setting.name] = side
        self.prepared(side)
        return side


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A folder of its own, and sides that are made up instead of processes."""
    found = Stage()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(command, "Side", found.side)
    clock = {"clock": lambda: found.machine.now, "now": lambda: found.machine.now}
    monkeypatch.setattr(command, "Duet", lambda *given: Duet(*given, **clock))  # type: ignore[arg-type]
    return found


def concord(*words: str) -> Result:
    return CliRunner().invoke(app, ["perf", "duet", *words])


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_slower_side(stage: Stage, tmp_path: Path) -> None:
    """The exit code is 1, the series is named with its interval, and all outputs say the same."""
    stage.steps = {SIZES[2]: 1.4}
    found = concord("--minutes", "30", "--json", "o.json", "--html", "o.html", "--markdown", "o.md")
    assert found.exit_code == 1, found.output
    said = r"B is slower in 1 of 6 series: all_reduce sum float32 8 KiB on 2 ranks \+\d\d\.\d % \(\+\d"
    assert re.search(said, flat(found.output)), found.output
    result = json.loads((tmp_path / "o.json").read_text())
    row = next(row for row in result["series"] if row["verdict"] == "slower")
    assert (row["bytes"], row["name"]) == (SIZES[2], OFFERS[2].name)
    assert row["low"] < 1.4 < row["high"]
    assert row["low"] > 1
    assert result["counts"]["slower"] == 1
    assert "slower" in (tmp_path / "o.md").read_text().splitlines()[4]
    assert "B is slower in 1 of 6" in (tmp_path / "o.html").read_text()


def test_counts_are_told_at_once(stage: Stage, tmp_path: Path) -> None:
    """What B needs more of is told before any time is measured, and in every output; the exit code is 1."""

    def more(side: FakeSide) -> None:
        side.needs = {SIZES[0]: {"copies": 4.0 if side.name == "A" else 6.0}}

    stage.prepared = more
    found = concord("--minutes", "0.1", "-k", "8 B", "--json", "o.json", "--html", "o.html", "--markdown", "o.md")
    assert found.exit_code == 1, found.output
    said = "copies 4 -> 6 (+50.0 %)"
    lines = flat(found.output)
    assert lines.index(f"B needs more: {said} in {OFFERS[0].name}") < lines.index("at most 0.1 min")
    assert "Counts that differ" in lines
    assert said in json.loads((tmp_path / "o.json").read_text())["headline"]
    assert "copies 4 -\\> 6" in (tmp_path / "o.md").read_text()
    assert "Counts that differ" in (tmp_path / "o.html").read_text()
    assert concord("--minutes", "0.1", "-k", "8 B", "--no-counts", "--out", "other").exit_code == 0


def test_a_side_that_does_not_count(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side with an older Concord knows no counts: it is said, and times are measured."""

    def refuses(self: FakeSide) -> object:
        raise SideFailed("A", "input", "no request: unknown")

    monkeypatch.setattr(FakeSide, "counted", refuses)
    found = concord("--minutes", "0.5", "-k", "8 B")
    assert found.exit_code == 0
    assert re.search(r"no counts: [AB]?.*no request: unknown", flat(found.output))
    assert "undecided in 1" in flat(found.output)


def test_equal_sides(stage: Stage) -> None:
    """Nothing is slower: the exit code is 0, and every series is equal."""
    found = concord("--minutes", "60", "--margin", "15", "-k", "8 KiB", "-k", "8 B")
    assert found.exit_code == 0, found.output
    assert "No series of 2 was found slower in B; equal within 15 % in 2" in flat(found.output)


def test_undecided_series_are_told_apart(stage: Stage, tmp_path: Path) -> None:
    """If the time is used up, undecided series are listed, what continues is said, and the exit code is 0."""
    found = concord("--minutes", "0.5", "--json", "o.json")
    assert found.exit_code == 0, found.output
    assert "undecided in 6" in flat(found.output)
    assert "The 0.5 minutes are used up: a larger --minutes continues" in flat(found.output)
    assert len(json.loads((tmp_path / "o.json").read_text())["undecided"]) == 6


def test_continues(stage: Stage) -> None:
    """The same command with more time goes on with what was measured; --anew begins again; another side is another."""
    concord("--minutes", "0.5")
    more = concord("--minutes", "1")
    assert re.search(r"continues after 0\.[5-9] min", flat(more.output)), more.output
    assert "continues after" not in concord("--minutes", "0.5", "--b-env", "GLOO_X=1").output
    assert "continues after" not in concord("--minutes", "0.1", "--anew").output
    hidden = [concord("--minutes", "0.5", "--b-env", f"MY_SETTING={value}").output for value in "121"]
    assert ["continues after" in said for said in hidden] == [False, False, True]
    used = concord("--minutes", "0.1")
    assert "the time of 0.1 min is used up" in flat(used.output)


def test_interrupted(stage: Stage, tmp_path: Path) -> None:
    """Ctrl-C keeps what was measured, shows it, and exits with 130; the same command continues."""

    def later(side: FakeSide) -> None:
        starts = [0]
        right = side.send

        def send(request: object) -> None:
            starts[0] += isinstance(request, Ranks)
            if starts[0] > 39:
                raise KeyboardInterrupt
            right(request)  # type: ignore[arg-type]

        side.send = send  # type: ignore[method-assign]

    stage.prepared = later
    found = concord("--minutes", "5", "--json", "o.json")
    assert found.exit_code == 130, found.output
    assert "Interrupted: the same command continues" in flat(found.output)
    result = json.loads((tmp_path / "o.json").read_text())
    (journal,) = tmp_path.rglob("duet.jsonl")
    assert result["generations"] == journal.read_text().count('"record":"generation"') > 1
    assert all(0.5 < row["ratio"] < 2 and row["low"] is None for row in result["series"])
    assert "this is an A/A duet" in flat(found.output)
    stage.prepared = lambda side: None
    assert "continues after" in concord("--minutes", "1").output


def test_a_side_that_dies(stage: Stage) -> None:
    """It is named with its reason, and what was measured is shown."""
    stage.prepared = lambda side: side.fails.update(
        {Ranks: SideFailed("B", "gone", "its process was killed by SIGKILL; its last words: [bold]x")}
        if side.name == "B"
        else {}
    )
    found = concord("--minutes", "5")
    assert found.exit_code == 1
    assert "concord: B: its process was killed by SIGKILL; its last words: [bold]x" in found.output
    assert "Ended because side B failed" in flat(found.output)


def test_sides_get_their_variables_and_options(stage: Stage, tmp_path: Path) -> None:
    """Variables, profiles and faults reach their side alone, and differences are shown."""
    words = (f"{sys.prefix} GLOO_DEVICE_TRANSPORT=UV", "--b-env", "OMP_NUM_THREADS=2", "--b-profile", "cpu-gloo")
    found = concord(*words, "--b-fault", "slow", "--minutes", "0.1", "--json", "o.json")
    assert found.exit_code == 0, found.output
    variables = {name: dict(setting.variables) for name, setting in stage.settings.items()}
    assert variables["A"]["GLOO_DEVICE_TRANSPORT"] == "UV"
    assert "GLOO_DEVICE_TRANSPORT" not in variables["B"]
    assert variables["B"]["OMP_NUM_THREADS"] == "2"
    assert stage.sides["A"].begun is not None
    assert stage.sides["B"].begun is not None
    assert (stage.sides["A"].begun.profile, stage.sides["A"].begun.faults) == ("", ())
    assert (stage.sides["B"].begun.profile, stage.sides["B"].begun.faults) == ("cpu-gloo", ("slow",))
    rows = json.loads((tmp_path / "o.json").read_text())["differences"]
    assert {row[0] for row in rows} == {"profile", "faults", "GLOO_DEVICE_TRANSPORT", "OMP_NUM_THREADS"}


def test_secrets_are_not_shown(stage: Stage, tmp_path: Path) -> None:
    """A variable that holds a credential reaches its side, and neither the journal nor the outputs."""
    found = concord(
        "--b-env", "MY_TOKEN=hunter2-secret-value", "--minutes", "0.1", "--json", "o.json", "--html", "o.html"
    )
    assert found.exit_code == 0, found.output
    assert dict(stage.settings["B"].variables)["MY_TOKEN"] == "hunter2-secret-value"
    written = [*(tmp_path / "reports").rglob("*"), tmp_path / "o.json", tmp_path / "o.html"]
    assert not any(b"hunter2" in file.read_bytes() for file in written if file.is_file())
    assert "hunter2" not in found.output


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of a package, in which the command is called."""
    found = tmp_path / "repository"
    found.mkdir()
    (found / "package.py").write_text("one")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "-b", "main"], ["add", "package.py"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=found, check=True)
    (found / "package.py").write_text("two")
    monkeypatch.chdir(found)
    return found


def test_a_change_against_its_base(stage: Stage, repository: Path) -> None:
    """A imports the sources of the commit, B those of the working tree, and both the same Concord."""
    texts: dict[str, str] = {}

    def read(side: FakeSide) -> None:
        first = dict(side.setting.variables)["PYTHONPATH"].split(os.pathsep)  # type: ignore[attr-defined]
        texts[side.name] = (Path(first[0]) / "package.py").read_text()
        assert (Path(first[1]) / "harness" / "bench").is_dir()

    stage.prepared = read
    found = concord("--base", "main", "--minutes", "0.1", "--json", "o.json")
    assert found.exit_code == 0, found.output
    assert texts == {"A": "one", "B": "two"}
    (row,) = json.loads(Path("o.json").read_text())["differences"]
    assert row[0] == "sources"
    assert row[1].startswith("main (")
    assert " with changes " in row[2]
    assert not list((repository / "reports").rglob("package.py"))
    unknown = concord("--base", "nothing")
    assert (unknown.exit_code, "git rev-parse" in unknown.output) == (2, True), unknown.output


def test_a_base_without_duets(stage: Stage, repository: Path) -> None:
    """A commit of Concord that has no duets yet is refused."""
    (repository / "harness" / "bench").mkdir(parents=True)
    (repository / "harness" / "bench" / "x.py").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    for words in (["add", "."], [*identity, "commit", "-q", "-m", "two"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    found = concord("--base", "main")
    assert (found.exit_code, "its Concord has no duets yet" in flat(found.output)) == (2, True), found.output


def test_list(stage: Stage) -> None:
    """All series that both sides offer are listed, and nothing is measured."""
    found = concord("--list")
    assert found.output.splitlines() == [series.name for series in OFFERS]
    assert not any(isinstance(request, Ranks) for request in stage.sides["A"].asked)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("/no/such/venv",), "/no/such/venv: there is no such environment"),
        (("", "", "--b-env", "NOVALUE"), "B: 'NOVALUE' is no variable: write NAME=VALUE"),
        (("'unclosed",), 'A: "\'unclosed": No closing quotation'),
        (
            ("-k", "no such series"),
            "no series that both sides offer has 'no such series' in its name; --list shows all 6",
        ),
        (("--margin", "0"), "margin"),
        (("--minutes", "-1"), "minutes"),
        (("--base", "--output=x"), "not a git repository"),
    ],
)
def test_bad_input(stage: Stage, words: tuple[str, ...], says: str) -> None:
    """It is said in a line what is wrong, and the exit code is 2."""
    found = concord(*words)
    assert found.exit_code == 2, found.output
    assert says in flat(found.output)
    assert "Traceback" not in found.output


def test_a_damaged_journal(stage: Stage, tmp_path: Path) -> None:
    """It is refused with its line, and stays as it is."""
    concord("--minutes", "0.1")
    (journal,) = tmp_path.rglob("duet.jsonl")
    journal.write_bytes(journal.read_bytes() + b"garbage\n")
    damaged = journal.read_bytes()
    found = concord("--minutes", "1")
    assert (found.exit_code, "no record of a duet" in flat(found.output)) == (2, True), found.output
    assert journal.read_bytes() == damaged


def test_two_at_once(stage: Stage, tmp_path: Path) -> None:
    """A duet that another process measures is refused."""
    import fcntl

    concord("--minutes", "0.1")
    (lock,) = tmp_path.rglob("lock")
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = concord("--minutes", "1")
    assert (found.exit_code, "by another process" in flat(found.output)) == (2, True), found.output


def test_texts_are_no_markup(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a terminal, Markdown or HTML could take for markup are text."""
    hostile = "<img src=x onerror=alert(1)>[red]|*x* @all https://evil.example `a`"
    series = tuple(Series(operation=hostile, op="sum", bytes=8 << i, world=2, dtype="float32") for i in range(2))
    monkeypatch.setattr(duets, "OFFERS", series)
    stage.steps = {8: 1.5}
    found = concord("--minutes", "9", "-k", "2 ranks", "--html", "o.html", "--markdown", "o.md")
    assert found.exit_code == 1, found.output
    assert "[red]" in found.output
    text = (tmp_path / "o.md").read_text()
    assert "<img" not in text.replace("\\<img", "")
    assert "https://" not in text
    assert " @all" not in text
    assert all(line.count("|") - line.count("\\|") == 6 for line in text.splitlines()[3:6])
    assert "<img src=x" not in (tmp_path / "o.html").read_text().split("<script>")[0]


def test_a_folder_that_can_not_be_written(stage: Stage, tmp_path: Path) -> None:
    """It is named."""
    (tmp_path / "file").write_text("")
    found = concord("--out", "file")
    assert (found.exit_code, "file" in found.output) == (2, True), found.output


@pytest.mark.parametrize(
    ("text", "asked"),
    [("8 KiB", True), ("all_reduce 8 KiB 2 ranks", True), ("128 KiB", False), ("KiB", False), ("4 ranks", False)],
)
def test_words_of_a_series(text: str, asked: bool) -> None:
    """Words are whole words, and a number belongs to its unit; a whole name always counts."""
    assert asks_for(text, OFFERS[2]) is asked
    assert asks_for(OFFERS[2].name, OFFERS[2])
    assert not asks_for("", OFFERS[2])


def test_what_a_user_wrote() -> None:
    """An environment comes first, and variables after it; a value may have anything in it."""
    assert parsed("A", "'/a b/venv' X=1 'Y=a b=c'", ["X=2"]) == ("/a b/venv", (("X", "2"), ("Y", "a b=c")))
    assert parsed("A", "X=1", []) == ("", (("X", "1"),))
    assert parsed("A", "", []) == ("", ())


def test_progress(stage: Stage, tmp_path: Path) -> None:
    """It says how far a duet is, when it looks next, and how long it takes at most."""
    found = duets.duet(tmp_path, Machine(1, ranks=0.02))
    assert progress_of(found.state, 600) == "generation 0, 0 of 6 decided, at most 10.0 min"
    found.run(60)
    said = progress_of(found.state, 600)
    assert re.search(r"^generation \d+, \d of 6 decided, next look in \d\.\d min, .*at most \d\.\d min$", said), said
    assert "too little time" in progress_of(found.state, 61)
    found.run(200)
    assert re.search(r"about \d+\.\d min to decide all", progress_of(found.state, 36_000))
    assert "not all will be decided in time" in progress_of(found.state, found.state.seconds + 1)


def test_relative_out(stage: Stage) -> None:
    """The journal's place is shown as it can be opened from here."""
    found = concord("--minutes", "0.1", "--out", "here")
    place = re.search(r"journal: (\S+)", found.output)
    assert place is not None
    assert os.path.exists(place[1])


def test_a_whole_name_asks_for_one_series() -> None:
    """A series that has other forms is asked for by its name alone; words ask for all forms."""
    other = msgspec.structs.replace(OFFERS[2], variant=(("place", "out"),))
    every = [OFFERS[2], other, OFFERS[3]]
    assert chosen(every, [OFFERS[2].name]) == [OFFERS[2]]
    assert chosen(every, [OFFERS[2].name, "128 KiB"]) == [OFFERS[2], OFFERS[3]]
    assert chosen(every, ["8 KiB"]) == [OFFERS[2], other]
