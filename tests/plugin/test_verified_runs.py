"""``concord verify`` of bundles of real runs: sessions of their own, with real ranks, of a small suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from sessions import Folder

from harness.results import read
from reports.bundle import MANIFEST, manifest_of, packed, unpacked

pytestmark = pytest.mark.slow

SUITE = """
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
    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=["int64", "float32"])
    @pytest.mark.world(2)
    @settings(max_examples=3)
    @given(number=st.integers(0, 100))
    def test_sum(world, dtype, number):
        def body(rank):
            tensor = torch.full((3,), number, dtype=dtype)
            dist.all_reduce(tensor)
            return tensor.tolist()
        assert world.run(body) == [[2 * number] * 3] * 2

    @requirement("COLL-REDUCE-01", "reduce gives the root the sum.", source="torch.distributed.reduce")
    @pytest.mark.world(2)
    def test_reduce(world):
        world.run(lambda rank: dist.barrier())

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

[[collectives.except]]
collectives = ["reduce"]
reason = "not there yet"

[[waiver]]
tests = ["suites/collectives/test_small.py::test_waived*"]
reason = "known to be wrong"
link = "unreported"
expires = 2999-01-01
verdicts = ["failed"]
"""


@dataclass(frozen=True)
class Made:
    """A checkout of a small suite, and a bundle of runs of it."""

    folder: Path
    bundle: Path

    def concord(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the command, with variables set that would change what pytest collects."""
        hostile = {"PYTEST_ADDOPTS": "-k nothing", "PYTEST_PLUGINS": "no_such_plugin", "CONCORD_EXAMPLES": "smoke"}
        command = [sys.executable, "-m", "harness.commands.main", *arguments]
        where = cwd or self.folder
        return subprocess.run(
            command, cwd=where, env={**os.environ, **hostile}, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module")
def made(make_folder: Callable[[dict[str, str]], Folder]) -> Made:
    files = {"suites/collectives/test_small.py": SUITE, "small.toml": PROFILE}
    folder = make_folder(files)
    whole = folder.run("suites", "-p", "no:rerunfailures", "--profile", "./small.toml", "--concord-results", "default")
    drawn = folder.run(
        *("suites", "-n", "2", "--profile", "./small.toml", "--concord-seed", "random", "-m", "property_based"),
        *("--concord-results", "random", "-p", "no:rerunfailures"),
    )
    assert (whole.code, drawn.code) == (0, 0), whole.out + drawn.out
    found = Made(whole.folder, whole.folder / "x.zip")
    runs = [str(path.parent) for path in whole.folder.glob("*/*/results.jsonl")]
    assert found.concord("bundle", *runs, "-o", "x.zip").returncode == 0
    return found


def test_genuine(made: Made) -> None:
    """Runs that nobody has touched are shown to be what they say, whatever variables the one who checks has set."""
    done = made.concord("verify", "x.zip")
    assert (done.returncode, "x.zip: is what it says it is" in done.stdout) == (0, True), done.stdout + done.stderr
    assert not any(line.startswith(("WRONG", "unchecked")) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def challenged(made: Made) -> list[str]:
    """Runs of which the second answers a challenge, in the order in which they were made."""
    assert made.concord("challenge", "-o", "mine.challenge", "--for", "a test").returncode == 0
    session = Folder(made.folder).run(
        *("suites", "-n", "2", "--profile", "./small.toml", "--concord-challenge", "mine.challenge"),
        *("-m", "property_based", "--concord-results", "answered", "-p", "no:rerunfailures"),
    )
    assert session.code == 0, session.out
    assert "from the challenge for a test" in session.out
    return [
        str(path.parent) for kind in ("default", "answered") for path in made.folder.glob(f"{kind}/*/results.jsonl")
    ]


def test_challenge(made: Made, challenged: list[str]) -> None:
    """Workers use the seed of the challenge, and the results say which challenge it is, as it was."""
    assert made.concord("bundle", *challenged, "-o", "answered.zip").returncode == 0
    done = made.concord("verify", "answered.zip", "--challenge", "mine.challenge")
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("challenge runs/2.jsonl: answers it"))
    assert " s after the challenge was made, and ended " in line
    done = made.concord("verify", "x.zip", "--challenge", "mine.challenge")
    assert (done.returncode, "WRONG     no run answers the challenge" in done.stdout) == (1, True)
    first, second = (read(made.folder / run / "results.jsonl") for run in challenged)
    assert (second.header.seed_drawn, second.header.challenge is not None, first.header.challenge) == (True, True, None)


def test_required(made: Made) -> None:
    """What the profile leaves out keeps a mandatory requirement from being shown, so L1 is not reached."""
    done = made.concord("verify", "x.zip", "--require", "L1")
    assert done.returncode == 1
    assert "COLL-REDUCE-01 was not run: the profile claims nothing that it is about." in done.stdout


def test_without_its_suite(made: Made, tmp_path: Path) -> None:
    """Where the suite is not at hand, or another one is, the bundle shows nothing: exit code 3."""
    bundle = str(made.bundle)
    assert made.concord("verify", bundle, cwd=tmp_path).returncode == 3
    shutil.copytree(made.folder / "suites", tmp_path / "suites")
    (tmp_path / "suites" / "collectives" / "more.py").write_text("MORE = 1\n")
    done = made.concord("verify", bundle, cwd=tmp_path)
    assert (done.returncode, "differs from the local one" in done.stdout) == (3, True)


def test_other_requirement_in_a_genuine_run(made: Made, tmp_path: Path) -> None:
    """A mandatory requirement that is made optional, with all else that follows from it, is disproved by the suite."""
    from hashlib import sha256

    from harness import __version__
    from reports import bundle

    files = {name: data for name, data in unpacked(made.bundle).items() if name != MANIFEST}
    forged = []
    for name in ("runs/1.jsonl", "runs/2.jsonl"):
        lines = files[name].splitlines(keepends=True)
        for number, line in enumerate(lines):
            if b'"id":"COLL-REDUCE-01"' in line and b'"record":"requirement"' in line:
                lines[number] = line.replace(b"}\n", b',"mandatory":false}\n')
        before = b"".join(lines[:-1])
        old = sha256(b"".join(files[name].splitlines(keepends=True)[:-1])).hexdigest()
        forged.append((name, before + lines[-1].replace(old.encode(), sha256(before).hexdigest().encode())))
    found = bundle.made(forged).files
    path = tmp_path / "forged.zip"
    path.write_bytes(packed({**found, MANIFEST: manifest_of(found, __version__)}))
    done = made.concord("verify", str(path), "--require", "L1")
    assert done.returncode == 1
    assert "WRONG     runs/1.jsonl: the mandatory of requirement COLL-REDUCE-01 is False" in done.stdout
    assert "    missing: COLL-REDUCE-01 was not run: the profile claims nothing that it is about." in done.stdout


def test_page(made: Made) -> None:
    """The page made anew is that of the bundle, where nothing is wrong with it."""
    assert made.concord("verify", "x.zip", "--html", "here.html").returncode == 0
    assert (made.folder / "here.html").read_bytes() == unpacked(made.bundle)["report.html"]
