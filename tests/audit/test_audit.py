"""The audit from end to end: a small suite, a small catalog, real pytest processes and real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.audit.records import digest
from harness.audit.worker import Job
from harness.audit.workers import Place, Workers

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import requirement

@requirement("TOY-SUM-01", "Tensors are summed.", source="a toy")
@pytest.mark.world(2)
def test_sum(world):
    def body(rank):
        tensor = torch.full((2,), rank.index + 1.0)
        dist.all_reduce(tensor)
        return tensor.tolist()
    assert world.run(body) == [[3.0, 3.0]] * 2

@pytest.mark.world(2)
def test_functional(world):
    def body(rank):
        return functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist()
    assert world.run(body) == [[2.0, 2.0]] * 2
"""

OTHER = """
import pytest, torch
import torch.distributed as dist

@pytest.mark.world(2)
def test_barrier(world):
    world.run(lambda rank: dist.barrier())
"""
"""A second file: what is left of one file's tests must not be there when the other's begin."""

FAULTS = '''
import os, time
import torch.distributed as dist
from harness.faults import fault

right = dist.all_reduce

@fault("collectives", "SW", needs="a sum", issue="nobody/nothing#1")
def not_summed():
    """Nothing is summed."""
    dist.all_reduce = lambda tensor, *args, **kwargs: None

@fault("collectives", "SW", needs="many elements", each={"above 10": 10, "above 100": 100})
def not_summed_if_large(most):
    """Large tensors are not summed."""
    dist.all_reduce = lambda tensor, *args, **kwargs: tensor.numel() > most or right(tensor, *args, **kwargs)

@fault("collectives", "HG", needs="two ranks")
def waits():
    """Rank 1 never comes."""
    dist.all_reduce = lambda *args, **kwargs: dist.get_rank() == 1 or right(*args, **kwargs)

@fault("collectives", "CR", needs="a sum")
def dies():
    """Rank 1 is gone."""
    dist.all_reduce = lambda *args, **kwargs: os._exit(3) if dist.get_rank() else right(*args, **kwargs)

@fault("collectives", "SW", needs="what is not there")
def another_torch():
    """What it replaces is not there."""
    dist.no_such_function.__name__
'''


@dataclass
class Ended:
    code: int
    out: str
    saved: dict[str, Any]

    def states(self) -> dict[str, str]:
        return {r["defect"]["name"]: r["state"] for r in self.saved["results"]}

    def of(self, name: str) -> dict[str, Any]:
        (found,) = [r for r in self.saved["results"] if r["defect"]["name"] == name]
        return dict(found)


def tree(folder: Path, suite: str = SUITE) -> Path:
    for name, text in (
        ("suites/collectives/test_toy.py", suite),
        ("suites/collectives/test_a_other.py", OTHER),
        ("fixtures/__init__.py", ""),
        ("fixtures/faults/__init__.py", ""),
        ("fixtures/faults/toy.py", FAULTS),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from harness.commands.main import main; main()", "audit", *arguments]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "150",
        "CONCORD_PRELOAD": "torch",
        "PYTEST_PLUGINS": "harness.plugin",
    }


def audit(folder: Path, *arguments: str) -> Ended:
    saved = folder / "saved.json"
    saved.unlink(missing_ok=True)
    ended = subprocess.run(
        command("collectives", "--workers", "1", "--save", str(saved), *arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    found = json.loads(saved.read_text()) if saved.exists() else {}
    return Ended(ended.returncode, ended.stdout + ended.stderr, found)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A tree, and an audit of it with every fault and some mutants."""
    folder = tree(tmp_path_factory.mktemp("audited"))
    return folder, audit(folder, "--mutants", "source", *NAMES)


NAMES = [x for n in ("not-", "s all_reduce: ", "waits", "dies", "another") for x in ("--name", n)]


def test_states(first: tuple[Path, Ended]) -> None:
    """Each defect becomes what it deserves."""
    _, ended = first
    found = ended.states()
    assert {name: state for name, state in found.items() if "torch" not in name[:6]} == {
        "not-summed": "killed",
        "not-summed-if-large[above 10]": "survived",
        "not-summed-if-large[above 100]": "survived",
        "waits": "killed",
        "dies": "killed",
        "another-torch": "not injected",
    }
    mutants = {name: state for name, state in found.items() if name.startswith("torch.")}
    assert "killed" in mutants.values()
    assert ended.code == 0


def test_evidence(first: tuple[Path, Ended]) -> None:
    """Which test noticed, how, and what it requires."""
    _, ended = first
    found = ended.of("not-summed")
    assert found["test"] == "suites/collectives/test_toy.py::test_sum[2ranks]"
    assert found["requirements"] == ["TOY-SUM-01"]
    assert found["verdict"] == "failed"
    assert found["defect"]["about"] == "SW nobody/nothing#1"
    assert ended.of("waits")["verdict"] == "hung"
    assert ended.of("dies")["verdict"] == "crashed"
    assert ended.of("dies")["ranks"] == [1]
    assert ended.of("not-summed-if-large[above 10]")["tests"] == 3
    assert "torn down" not in ended.out + str(ended.saved)


def test_said(first: tuple[Path, Ended]) -> None:
    """The terminal has a table, and what nobody noticed."""
    _, ended = first
    assert re.search(r"collectives +faults +5 +3 +2 +0 +0 +60 %", ended.out)
    assert re.search(r"survived +not-summed-if-large\[above 10\]", ended.out)
    assert "not injected another-torch" in ended.out


def test_only_tests_that_reach(first: tuple[Path, Ended]) -> None:
    """For a mutant, only tests are run whose ranks execute the line."""
    _, ended = first
    found = [r for r in ended.saved["results"] if r["defect"]["sort"] == "mutant" and r["state"] == "killed"]
    assert {r["test"].split("::")[1] for r in found} == {"test_functional[2ranks]"}


@pytest.mark.nightly
def test_again_nothing_is_done(first: tuple[Path, Ended]) -> None:
    """An audit that is complete is only shown; survivors can be chosen."""
    folder, before = first
    chosen = folder / "before.json"
    chosen.write_text(json.dumps(before.saved))
    ended = audit(folder, "--survivors", str(chosen), "--compare", str(chosen))
    assert "healthy: 0 to do" in ended.out
    assert "defects: 0 to do" in ended.out
    unnoticed = [name for name, state in before.states().items() if state != "killed"]
    assert sorted(ended.states()) == sorted(unnoticed)
    assert ended.code == 0


@pytest.mark.nightly
def test_again(first: tuple[Path, Ended]) -> None:
    """What was noticed is noticed again by the same tests, and nothing else is looked at."""
    folder, before = first
    brief = folder / "brief.json"
    audit(folder, "--mutants", "source", *NAMES, "--brief", "--save", str(brief))
    assert "healthy" not in {k for k, v in json.loads(brief.read_text()).items() if v}
    ended = audit(folder, "--again", str(brief), "--compare", str(brief))
    killed = {name for name, state in before.states().items() if state == "killed"}
    assert set(ended.states()) == killed
    assert set(ended.states().values()) == {"killed"}
    assert f"defects: {len(killed)} to do" in ended.out
    assert [r.get("tests") for r in ended.saved["results"]] == [1] * len(killed)
    assert ended.code == 0


def test_reach(first: tuple[Path, Ended]) -> None:
    """Lines and branches of the source that ranks reached; of what the audit has seen, nothing is run again."""
    folder, _ = first
    arguments = [*command()[:-1], "reach", "collectives", "--workers", "1"]
    ended = subprocess.run(arguments, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "healthy: 0 to do" in ended.stdout
    (row,) = [line for line in ended.stdout.split("\n") if "_functional_collectives.py" in line]
    assert 0 < int(row.split()[5].rstrip("%")) < 100


@pytest.mark.nightly
def test_lost_power(first: tuple[Path, Ended], tmp_path: Path) -> None:
    """A suite that notices less than before is red, and says what it lost; what is red by itself notices nothing."""
    _, before = first
    weak = (
        SUITE.replace("== [[3.0, 3.0]] * 2", "!= 0")
        + "\n\n@pytest.mark.world(1)\ndef test_red(world):\n    world.run(1)\n"
    )
    folder = tree(tmp_path, weak)
    chosen = folder / "before.json"
    chosen.write_text(json.dumps(before.saved))
    ended = audit(folder, "--name", "not-summed", "--mutants", "none", "--compare", str(chosen))
    assert ended.code == 1
    assert re.search(r"lost: not-summed survived; before, \S+::test_sum\[2ranks\] noticed it", ended.out)
    assert ended.saved["red"] == ["suites/collectives/test_toy.py::test_red[1rank]"]
    assert "say nothing here until they pass" in ended.out


@pytest.mark.nightly
def test_killed_and_continued(tmp_path: Path) -> None:
    """What was done when an audit was killed is not done again.  An audit of faults alone traces no code."""
    folder = tree(tmp_path)
    arguments = command("collectives", "--workers", "1", "--mutants", "none")
    process = subprocess.Popen(arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("killed", "survived", "not injected")):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (journal,) = (folder / "reports/out/audit").glob("*.jsonl")
    time.sleep(0.2)
    with journal.open("a") as file:
        file.write('{"record":"resu')  # as if it had been cut off in a line
    done = journal.read_text().count('"record":"result"')
    ended = audit(folder, "--mutants", "none")
    assert f"defects: {6 - done} to do" in ended.out
    assert 0 < done < 6
    assert '"record":"healthy"' in journal.read_text()
    assert '"steps"' not in journal.read_text()
    assert len(ended.states()) == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "no component nothing; there are collectives"),
        (["--mutants", "some"], "--mutants some: source, all, wide or none"),
        (["--compare", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--compare", "garbage.json"], "garbage.json: not a file of `concord audit --save`"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], says: str) -> None:
    """One error that says what and where."""
    tree(tmp_path)
    (tmp_path / "garbage.json").write_text("{]")
    ended = subprocess.run(command(*arguments), cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("concord: ")
    assert says in ended.stderr


def test_jobs_begin_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends at a failure, with another test of the file to follow, leaves nothing for the next to fail by."""
    for name in ("PYTHONPATH", "PYTEST_PLUGINS"):
        monkeypatch.setenv(name, environment()[name])
    names = ("toy.py::test_sum", "toy.py::test_functional", "a_other.py::test_barrier")
    summed, following, other = (f"suites/collectives/test_{name}[2ranks]" for name in names)
    jobs = [
        Job(tests=[summed, following], first=[("harness.faults:put", "not-summed")]),
        Job(tests=[other, summed]),
    ]
    root = tree(tmp_path)
    with Workers(root, digest(root), ["suites/collectives"], "torch", [Place()]) as workers:
        found = [[o.verdict for o in outcomes] for _, outcomes, _ in workers.do(iter(jobs), limit=100)]
    assert found == [["failed"], ["passed", "passed"]]


@pytest.mark.nightly
def test_suites_that_are_broken(tmp_path: Path) -> None:
    """Suites that can't be collected are said to be so, with pytest's words."""
    ended = audit(tree(tmp_path, "import no_such_module"), "--mutants", "none")
    assert ended.code == 2
    assert "the suites can't be collected" in ended.out
    assert "no_such_module" in ended.out


def test_no_suites(tmp_path: Path) -> None:
    """A folder without suites is named."""
    ended = audit(tmp_path)
    assert ended.code == 2
    assert f"{tmp_path} has no folder suites" in ended.out
