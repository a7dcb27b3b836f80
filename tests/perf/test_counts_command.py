"""``concord perf counts`` as a person at a terminal sees it, with a side that is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harness.bench.duet import messages
from harness.bench.duet.messages import Begin, Count, Ranks, Servers
from harness.bench.duet.sides import Setting, SideFailed
from harness.commands import perf_counts as command
from harness.commands.main import app
from tests.perf.duets import OFFERS, STEPS, FakeSide, Machine


class Counting(FakeSide):
    """A side whose system calls vary by set of ranks, and whose copies do not."""

    def counted(self) -> messages.Counted:
        request = self.asked[-1]
        assert isinstance(request, Count)
        started = sum(isinstance(one, Ranks) for one in self.asked)
        counts = {"copies": 8.0 if self.offers[request.series].is_step else 2.0, "system calls": 200.0 + 10 * started}
        return messages.Counted(counts, 2, {"instructions": "no such counter"})


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Counting]:
    found: list[Counting] = []

    def side(setting: Setting, log: Path) -> Counting:
        found.append(Counting(setting.name, Machine()))
        found[-1].offers = (*OFFERS, *STEPS)
        return found[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(command, "Side", side)
    return found


def concord(*words: str) -> Result:
    return CliRunner().invoke(app, ["perf", "counts", *words])


def test_counts(made: list[Counting], tmp_path: Path) -> None:
    """For each count the values of one rank, the largest spread, and whether it is steady; what is missing, and why."""
    found = concord("-k", "8 B", "--sets", "3", "--json", str(tmp_path / "found.json"))
    assert found.exit_code == 0, found.output
    lines = [" ".join(line.split()) for line in found.output.splitlines()]
    assert "copies exact yes 1 4 4 4" in lines
    assert "system calls 9.1 % no 110 110 110 110" in lines
    assert "no instructions: no such counter" in lines
    (side,) = made
    assert sum(isinstance(one, Ranks) for one in side.asked) == 3
    rows = json.loads((tmp_path / "found.json").read_text())
    assert rows[0]["counts"]["copies"] == {"value": 1.0, "spread": 0.0}
    assert [row["name"] for row in rows[1:]] == [step.name for step in STEPS]
    assert [one.steps for one in side.asked if isinstance(one, Servers)] == [True]


def test_what_is_asked_of_the_side(made: list[Counting]) -> None:
    """Ranks, more series and the number of calls go to the side; steps can be left out."""
    assert concord("--ranks", "2,8", "--more", "models", "--no-steps", "--sets", "2", "--times", "3").exit_code == 0
    (side,) = made
    assert side.begun == Begin(ranks=(2, 8), more=("models",))
    assert {one.times for one in side.asked if isinstance(one, Count)} == {3}
    assert not any(side.offers[one.series].is_step for one in side.asked if isinstance(one, Count))
    assert [one.steps for one in side.asked if isinstance(one, Servers)] == [False]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "x"], "numbers of ranks from 1"),
        (["--more", "colors"], "colors is none of"),
        (["-k", "9 PiB"], "no series that both sides offer has '9 PiB' in its name"),
    ],
)
def test_bad_input(made: list[Counting], words: list[str], says: str) -> None:
    """One line, and exit code 2."""
    found = concord(*words)
    assert (found.exit_code, "Traceback" in found.output) == (2, False)
    assert says in " ".join(found.output.split())


def test_a_side_that_fails(made: list[Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    """What its ranks said is shown."""

    def fails(self: Counting) -> messages.Counted:
        raise SideFailed("A", "ranks", "rank 1 died")

    monkeypatch.setattr(Counting, "counted", fails)
    found = concord("-k", "8 B")
    assert (found.exit_code, "rank 1 died" in found.output) == (2, True)
