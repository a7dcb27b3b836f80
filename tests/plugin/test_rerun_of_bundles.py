"""``concord verify --rerun`` of bundles of real runs: sessions of their own, with real ranks, of a small suite."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from sessions import Folder

pytestmark = pytest.mark.slow

SUITE = """
    import os

    import pytest
    import torch
    import torch.distributed as dist
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from harness import requirement

    @requirement("COLL-BARRIER-01", "A barrier returns on every rank.", source="torch.distributed.barrier")
    @pytest.mark.world(1, 2)
    def test_barrier(world):
        world.run(lambda rank: dist.barrier())

    @requirement("COLL-SUM-01", "all_reduce gives every rank the sum.", source="torch.distributed.all_reduce")
    @settings(max_examples=4)
    @given(number=st.integers(0, 100))
    def test_sum(world, number):
        def body(rank):
            tensor = torch.full((3,), number)
            dist.all_reduce(tensor)
            return tensor.tolist()
        assert world.run(body) == [[2 * number] * 3] * 2

    @requirement("COLL-WRONG-01", "reduce gives the root the sum.", source="torch.distributed.reduce")
    @pytest.mark.world(2)
    def test_wrong(world):
        def body(rank):
            tensor = torch.ones(1)
            dist.reduce(tensor, 0)
            return tensor.item()
        right = bool(os.environ.get("PATCHED_HARNESS"))
        assert world.run(body)[0] == (2.0 if right else 3.0)

    @requirement("COLL-LIMIT-01", "Nobody waits for ever.", source="torch.distributed.barrier", mandatory=False)
    @pytest.mark.world(2)
    def test_waived(world):
        def body(rank):
            assert rank.index == 0, "known to be wrong"
        world.run(body)
"""
PROFILE = """\
name = "small"
backend = "gloo"
device = "cpu"
about = "for a test"

[[waiver]]
tests = ["suites/collectives/test_small.py::test_waived*"]
reason = "known to be wrong"
link = "unreported"
expires = 2999-01-01
verdicts = ["failed"]
"""
TEST = "suites/collectives/test_small.py::test_"


@dataclass(frozen=True)
class Made:
    """A checkout of a small suite, and a bundle in which a test passed because something was patched."""

    folder: Path

    def verify(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the command, with variables set that would change what pytest does."""
        hostile = {"PYTEST_ADDOPTS": "-k nothing", "CONCORD_EXAMPLES": "smoke", "HYPOTHESIS_PROFILE": "ci"}
        return self._run("verify", "x.zip", *arguments, **hostile)

    def _run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "harness.commands.main", *arguments]
        environment = {**os.environ, "CONCORD_LEASES": str(self.folder / ".leases"), **variables}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(make_folder: Callable[[dict[str, str]], Folder]) -> Made:
    folder = make_folder({"suites/collectives/test_small.py": SUITE, "small.toml": PROFILE})
    options = ("suites", "-p", "no:rerunfailures", "--profile", "./small.toml")
    patched = {"PATCHED_HARNESS": "1"}
    whole = folder.run(*options, "--concord-results", "default", env=patched)
    more = ("--concord-seed", "random", "-m", "property_based", "--concord-results", "random")
    seeded = folder.run(*options, *more, env=patched)
    assert (whole.code, seeded.code) == (0, 0), whole.out + seeded.out
    found = Made(whole.folder)
    runs = [str(path.parent) for path in found.folder.glob("*/*/results.jsonl")]
    assert found._run("bundle", *runs, "-o", "x.zip").returncode == 0
    return found


def test_lie(made: Made) -> None:
    """What no check of a file finds, a second run does; everything else is the same, cases and all."""
    before = made.verify()
    assert (before.returncode, "L1 collectives: partial" in before.stdout) == (0, True), before.stdout
    done = made.verify("--rerun", "99", "--rerun-profile", "small.toml")
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = wrong
    assert f"--rerun: runs/1.jsonl, {TEST}wrong[2ranks]: passed in the bundle, failed here" in line
    assert "L1 collectives: not shown" in done.stdout
    assert re.search(r"^rerun +6 of 6 results, drawn by --rerun-seed \w+: 5 same, 1 worse here$", done.stdout, re.M)
    assert "chance that 6 compared results find so many false ones of 6: 1: 100.0%, 2: 100.0%" in done.stdout


def test_draw(made: Made) -> None:
    """A draw that leaves the lie out finds nothing, says how likely that was, and can be repeated."""
    ask = ("--rerun", "1", "--rerun-profile", "small.toml", "--rerun-seed")
    seeds = (str(number) for number in range(100))
    fine = next(seed for seed in seeds if "wrong" not in _first(seed))
    one, two = made.verify(*ask, fine), made.verify(*ask, fine)
    assert one.returncode == two.returncode == 0, one.stdout
    assert "1 of 6 results" in one.stdout
    assert "so many false ones of 6: 1: 16.7%, 2: 33.3%, 5: 83.3%" in one.stdout
    lines = [[line for line in done.stdout.splitlines() if line.startswith("rerun")] for done in (one, two)]
    assert lines[0][1:] == lines[1][1:]


def _first(seed: str) -> str:
    """The result that a seed draws first, of those of the bundle, whose runs are in the order of time."""
    from reports.rerun import Place, drawn

    names = ("barrier[1ranks]", "barrier[2ranks]", "sum[2ranks]", "waived[2ranks]", "wrong[2ranks]")
    places = [*(Place(0, f"{TEST}{name}") for name in names), Place(1, f"{TEST}sum[2ranks]")]
    return drawn(places, 1, seed)[0].nodeid


def test_forged_count(made: Made) -> None:
    """Fewer collectives than the test's ranks issue are found, and nothing else of that test differs."""
    (path,) = made.folder.glob("default/*/results.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    honest, forged = b'"issued":[{"barrier":2},2]', b'"issued":[{"barrier":1},1]'
    assert sum(honest in line for line in lines) == 1
    lines = [line.replace(honest, forged) for line in lines]
    end = json.loads(lines[-1])
    end["digest"] = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    folder = made.folder / "forged"
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(b"".join(lines[:-1]) + json.dumps(end).encode() + b"\n")
    assert made._run("bundle", "forged", "-o", "forged.zip").returncode == 0
    hostile = {"PYTEST_ADDOPTS": "-k nothing"}
    done = made._run("verify", "forged.zip", "--rerun", "99", "--rerun-profile", "small.toml", **hostile)
    said = [line for line in done.stdout.splitlines() if line.startswith("unchecked")]
    (line,) = [line for line in said if "other collectives (" in line]
    assert f"{TEST}barrier[2ranks]: passed in the bundle, passed here" in line
    assert "(barrier: 1 there, 2 here; on groups: 1 there, 2 here)" in line
    assert "3 same, 1 worse here, 1 other collectives here" in done.stdout


def test_without_its_profile(made: Made) -> None:
    """Nobody's profile is obeyed because it is in a bundle."""
    done = made.verify("--rerun", "1")
    assert (done.returncode, "a profile is code: read the one in the bundle" in done.stderr) == (2, True)
