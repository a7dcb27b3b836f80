"""``concord perf confirm``: what history may not say yet, a duet with the accepted environment says the same night.

Sides of duets are made up, as in the tests of ``concord perf duet``; everything between the commands is real.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from harness.bench.detection.gate import decide, followed_of
from harness.bench.detection.suspicions import suspected
from harness.bench.detection.tails import RATE
from harness.bench.history.lines import Dueted
from harness.bench.history.store import VARIABLE, History
from harness.bench.records import Series
from harness.bench.view import view
from harness.commands import asked_duets
from harness.commands.asked_duets import NoDuet
from harness.commands.main import app
from reports.perf import page
from tests.perf.duets import OFFERS, SIZES
from tests.perf.nights import line, night, noisy
from tests.perf.test_duet_command import Stage, flat, stage  # noqa: F401 - a fixture

NIGHTS = 30
STEP = 1.25
OTHERS = tuple(
    Series(operation="broadcast", dtype="float32", bytes=1024 << i, world=2, backend="gloo", device="cpu")
    for i in range(10)
)
MEASURED = [*OFFERS, *OTHERS]


def logs(step: float = 1.0, nights: int = NIGHTS) -> np.ndarray:
    """Nights on a noisy machine, in the last of which one series takes so many times as long."""
    found = noisy(np.random.default_rng(8), nights, len(MEASURED), own=0.1, outliers=0.0)
    found[-3:, 2] = np.median(found[:, 2]) + np.array([0.0, 0.0, np.log(step)])[-nights:]
    return found


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stores nights in a history by way of the variable."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "perf.sqlite"))

    def store(values: np.ndarray, first: int = 0) -> None:
        with History() as opened:
            for i, row in enumerate(values, first):
                opened.add(night(f"n{i}", started=86400.0 * (i + 1), values=np.exp(row).tolist(), of=MEASURED))

    return store


@pytest.fixture
def asked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:  # noqa: F811 - the fixture
    """The command lines of the duets that were asked for; they run in this process, with sides that are made up."""
    found: list[list[str]] = []

    def finished(command: list[str], limit: float, cwd: Path | None, say: object) -> tuple[int, str]:
        words = command[command.index("perf") :]
        found.append(words)
        result = CliRunner().invoke(app, words)
        if result.exit_code not in (0, 1, 2, 130):
            raise AssertionError(result.output) from result.exception
        say(result.output)  # type: ignore[operator]
        return result.exit_code, result.output.strip().rpartition("\n")[2]

    monkeypatch.setattr(asked_duets, "_finished", finished)
    return found


def concord(*words: str) -> Result:
    return CliRunner().invoke(app, ["perf", *words])


def test_a_step_is_told_in_the_night_in_which_it_appears(
    stage: Stage,  # noqa: F811 - the fixture
    history: Callable[..., None],
    asked: list[list[str]],
    tmp_path: Path,
) -> None:
    """History is silent about a step of 25 %; the duet tells it, the gate and the page repeat it, accepting ends it."""
    history(logs(STEP))
    silent = concord("gate", "--json", str(tmp_path / "gate.json"))
    assert silent.exit_code == 0, silent.output
    (first, *_) = json.loads((tmp_path / "gate.json").read_text())["suspicions"]
    assert (first["kind"], first["series"]["bytes"]) == ("step", SIZES[2])
    assert 1.05 < first["ratio"] < 1.7
    assert 0 < first["chance"] < 0.2
    assert concord("baseline", sys.prefix, "--reason", "released").exit_code == 0
    stage.steps = {SIZES[2]: STEP}
    told = concord("confirm", "--minutes", "30")
    assert told.exit_code == 1, told.output
    assert f"slower: {OFFERS[2].name} +" in told.output
    assert asked[0][asked[0].index("-k") + 1] == OFFERS[2].name
    assert asked[0][2] == sys.prefix
    again = concord("gate")
    assert again.exit_code == 1
    assert f"ALARM  {OFFERS[2].name} +" in again.output
    assert f"in a duet with {sys.prefix}, told since 1970-01-31 00:00 (commit commit-n29" in again.output
    assert f"note   duet with {sys.prefix}: slower: {OFFERS[2].name}" in again.output
    assert "duet +" in concord("show").output
    with History() as opened:
        assert f"in a duet with {sys.prefix}" in page(view(opened.line(), decide(opened.line())))
    history(logs(nights=NIGHTS + 1)[-1:], NIGHTS)  # in a later night, it stands, and is measured again first
    assert concord("gate").exit_code == 1
    stage.steps = {}
    assert concord("confirm", "--minutes", "60", "--margin", "15").exit_code == 0
    assert asked[1][asked[1].index("-k") + 1] == OFFERS[2].name
    assert "ALARM" not in concord("gate").output


def test_accepted(stage: Stage, history: Callable[..., None], asked: list[list[str]]) -> None:  # noqa: F811
    """A step that a duet told is no alarm once it is accepted, and a new baseline begins anew."""
    history(logs(STEP))
    concord("baseline", sys.prefix, "--reason", "released")
    stage.steps = {SIZES[2]: STEP}
    assert concord("confirm", "--minutes", "30").exit_code == 1
    assert concord("accept", "8 KiB", "--reason", "known").exit_code == 0
    assert concord("gate").exit_code == 0
    with History() as opened:
        one = opened.line().dueted[0]
        opened.add_dueted([Dueted(night="n29", series=OFFERS[4], verdict="slower", ratio=1.2, at=one.at + 1e-4)])
    assert concord("gate").exit_code == 1
    concord("baseline", sys.prefix, "--reason", "the new release")
    assert concord("gate").exit_code == 0


def test_nothing_is_there(stage: Stage, history: Callable[..., None], asked: list[list[str]]) -> None:  # noqa: F811
    """A night that was slow by chance: the duet says that both are equal, and nothing is an alarm."""
    history(logs(STEP))
    concord("baseline", sys.prefix, "--reason", "released")
    found = concord("confirm", "--minutes", "60", "--margin", "15", "--most", "1")
    assert found.exit_code == 0, found.output
    assert f"equal: {OFFERS[2].name}" in found.output
    assert "left out: " in found.output
    gate = concord("gate")
    assert gate.exit_code == 0
    assert f"note   duet with {sys.prefix}: equal within 15 %: {OFFERS[2].name}" in gate.output
    whole = concord("confirm", "--minutes", "0.1", "--all")
    assert (whole.exit_code, asked[1].count("-k")) == (0, len(MEASURED)), whole.output
    assert f"{OTHERS[0].name} (a duet does not measure it)" in whole.output


def test_a_short_history(stage: Stage, history: Callable[..., None], asked: list[list[str]]) -> None:  # noqa: F811
    """In the first night of an environment, history can say nothing, and the usual series are measured."""
    history(logs()[:1])
    concord("baseline", sys.prefix, "--reason", "released")
    stage.steps = {SIZES[0]: STEP}
    found = concord("confirm", "--minutes", "30")
    assert found.exit_code == 1, found.output
    assert "history is too short to judge it" in found.output
    assert asked[0].count("-k") == len(SIZES)
    assert f"ALARM  {OFFERS[0].name}" in concord("gate").output


def test_a_quiet_night(history: Callable[..., None], asked: list[list[str]]) -> None:
    """If nothing is suspected, nothing is measured."""
    history(np.log(np.full((NIGHTS, len(MEASURED)), 1e-3)) - 0.001 * np.arange(NIGHTS)[:, None])
    found = concord("confirm")
    assert (found.exit_code, "suspects no series" in found.output, asked) == (0, True, []), found.output


def test_no_environment(history: Callable[..., None], asked: list[list[str]]) -> None:
    """Without an accepted environment, a note says how to record one."""
    history(logs(STEP))
    found = concord("confirm")
    assert (found.exit_code, asked) == (0, [])
    assert "no accepted environment is recorded: concord perf baseline ENV --reason TEXT" in found.output
    assert "no environment is recorded" in concord("baseline").output


def test_an_environment_that_is_gone(history: Callable[..., None], asked: list[list[str]], tmp_path: Path) -> None:
    """It is named in one error, the gate's result stands, and gate says why there was no duet."""
    history(logs(STEP))
    link = tmp_path / "accepted"
    link.symlink_to(sys.prefix)
    assert concord("baseline", str(link), "--reason", "r").exit_code == 0
    link.unlink()
    found = concord("confirm")
    assert (found.exit_code, asked) == (2, [])
    assert "accepted: there is no such environment" in found.output
    assert "the gate's own result stands" in found.output
    gate = concord("gate")
    assert gate.exit_code == 0
    assert "note   no duet: " in gate.output


def test_an_environment_that_can_be_made(history: Callable[..., None], asked: list[list[str]], tmp_path: Path) -> None:
    """A command makes it, once; one that fails is told with its exit status, and its output is not lost."""
    history(logs(STEP))
    broken = concord("confirm", "--against", "2.13", "--make", "echo {candidate} is not there; exit 3; true {folder}")
    assert (broken.exit_code, asked) == (2, [])
    assert "2.13 is not there" in broken.output
    assert "exited with 3" in broken.output
    make = f"echo made >>{tmp_path}/made; ln -s {sys.prefix} {{folder}}"
    assert concord("baseline", "2.13", "--make", make, "--reason", "r").exit_code == 0
    for _ in range(2):
        assert concord("confirm", "--minutes", "0.1").exit_code == 0
    assert (tmp_path / "made").read_text() == "made\n"
    assert len(asked) == 2


def test_a_duet_that_breaks(history: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever becomes of the process, the error says it, exit code 2, and the gate's result is as it was."""
    monkeypatch.chdir(tmp_path)
    history(logs(STEP))
    concord("baseline", sys.prefix, "--reason", "released")
    before = concord("gate").output
    for script, says in (
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("print('boom'); raise SystemExit(2)", "exited with 2: boom"),
        ("pass", "left no result that can be read"),
    ):
        finished = asked_duets._finished
        monkeypatch.setattr(
            asked_duets,
            "_finished",
            lambda command, *more, script=script, to=finished: to([sys.executable, "-c", script], *more),
        )
        found = concord("confirm")
        assert (found.exit_code, says in found.output) == (2, True), found.output
        monkeypatch.setattr(asked_duets, "_finished", finished)
    assert before.splitlines()[0] in concord("gate").output


def test_a_duet_that_never_ends(tmp_path: Path) -> None:
    """It is killed when its time is over."""
    status, _ = asked_duets._finished(["sleep", "100"], 0.2, tmp_path, str)
    assert status == -9


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"series":[{"name":1}]}', "[" * 99_999, '{"series":[],"seconds":NaN}']
)
def test_a_result_that_is_none(text: str, tmp_path: Path) -> None:
    """A damaged result is an error in a line."""
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(NoDuet, match="left no result that can be read: .{1,300}$"):
        asked_duets.read(tmp_path / "r.json")


def test_baselines_that_are_refused(history: Callable[..., None]) -> None:
    """What is no environment, has no reason, or would keep a secret is refused in a line."""
    history(logs()[:1])
    for words, says in (
        ([sys.prefix], "no reason"),
        (["/nowhere", "--reason", "r"], "there is no such environment"),
        (["X=1", "--reason", "r"], "it names no environment"),
        (["2.13", "--make", "true", "--reason", "r"], "it must make the environment in {folder}"),
        ([f"{sys.prefix} MY_TOKEN=hunter2", "--reason", "r"], "MY_TOKEN: its value would be kept"),
    ):
        found = concord("baseline", *words)
        assert (found.exit_code, says in flat(found.output)) == (2, True), found.output
        assert "hunter2" not in found.output
    given = concord("baseline", f"{sys.prefix} GLOO_DEVICE_TRANSPORT=UV", "--reason", "r", "--who", "me")
    assert f"accepted: {sys.prefix} GLOO_DEVICE_TRANSPORT=UV (" in given.output
    assert given.output.split("(")[0] in concord("baseline").output


def test_a_baseline_is_that_of_its_machine(place: str) -> None:
    """Both databases keep it for the machine, profile and subject, whatever the software is."""
    from harness.bench.history.lines import Baseline
    from harness.bench.records import Fingerprint

    given = Baseline(environment="/env", reason="r", who="w", at=5.0)
    with History(place) as opened:
        opened.add(night("a"))
        opened.add(night("b", started=2.0, fingerprint=Fingerprint(machine=(("cores", "2"), ("cpu", "one")))))
        opened.add(night("c", started=3.0, profile="other"))
        opened.add(night("d", started=4.0, fingerprint=Fingerprint(machine=(("cores", "8"),))))
        opened.set_baseline(opened.line("a").nights[-1], opened.line("a").fingerprint, given)
        assert [opened.line(one).baseline for one in "abcd"] == [given, given, None, None]
        first = opened.line("a").figures["a"]
        said = [
            Dueted(night="a", series=one, verdict="equal", ratio=1.0, low=0.9, high=1.1, margin=0.05, at=at)
            for at, one in enumerate(first, 4)
        ]
        opened.add_dueted([*said, Dueted(night="a", series=None, verdict="unmeasured", why="x", at=9.0)])
        found = opened.line("a").dueted
        assert found[:-1] == said[1:]  # the first was before the baseline
        assert (found[-1].series, found[-1].why) == (None, "x")


def test_large_steps_are_suspected_and_small_ones_seldom() -> None:
    """On a machine with 10 % of noise, history suspects most steps of 50 % in the first night, and few of 5 %."""
    hits = {0.0: 0, 0.05: 0, 0.5: 0}
    for seed in range(12):
        nights = noisy(np.random.default_rng(seed), NIGHTS, len(MEASURED), own=0.1, outliers=0.0)
        noise = followed_of(line(nights, MEASURED), RATE, lambda done, of: None).newest.noise
        for j in range(0, len(MEASURED), 3):
            for step in hits:
                added = np.zeros_like(noise.residual)
                added[-1, j] = np.log1p(step)
                hits[step] += MEASURED[j] in [one.series for one in suspected(MEASURED, noise, (), added)]
    of = 12 * 6
    assert hits[0.0] < 0.3 * of
    assert hits[0.0] <= hits[0.05] < 0.5 * of
    assert hits[0.5] > 0.9 * of
