"""``concord bisect``: the first bad environment or candidate, with flaky ones and those that cannot be tested."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from harness.commands.main import app
from tests.versions.fakes import BY_VERSION, ROOT, fake_checkout, ran

Fake = Callable[[str], Path]

pytestmark = pytest.mark.slow

OLD = "suites/test_by_version.py::test_old"
FLAKY = """
    from importlib.metadata import version
    from pathlib import Path

    def test_flaky():
        count = Path(f"count-{version('torch')}")
        count.open("a").write(".")
        bad = {"2.11.0": (), "2.12.0": (2,), "2.13.0": (1, 2, 3)}[version("torch")]
        assert len(count.read_text()) not in bad
"""
"""A test that fails always with 2.13.0, and in its second try with 2.12.0."""
SCRIPT = """
    # Run:  python script.py
    import sys
    from importlib.metadata import version

    print("a defect of", version("torch"))
    sys.exit({"2.11.0": 0, "2.12.0": 3, "2.13.0": 1}[version("torch")])
"""
MAKE = f"{sys.executable} {ROOT / 'tests' / 'versions' / 'fakes.py'} {{candidate}} {{folder}}"


def bisect(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bisect", *map(str, arguments)])


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    checkout = fake_checkout(tmp_path / "checkout", by_version=BY_VERSION, flaky=FLAKY, script=SCRIPT)
    monkeypatch.chdir(checkout)
    return checkout


def test_first_bad_environment(fake: Fake, root: Path) -> None:
    """Only the ends and the middles are tested, the headline is shown, and a second call tests nothing again."""
    between = [word for v in ("2.13.0", "2.12.0", "2.14.0", "2.15.0", "2.16.0") for word in ("--env", fake(v))]
    given = ["--good", fake("2.11.0"), "--bad", fake("2.17.0"), *between, OLD]
    done = bisect(*given, "--json", "found.json")
    assert done.exit_code == 0, done.output
    found = json.loads(Path("found.json").read_text())
    assert found["good"].startswith("2.13.0 ")
    assert found["first_bad"].startswith("2.14.0 ")
    assert done.output.splitlines()[-1].startswith("first bad: 2.14.0 ")
    assert "newer than 2.13" in done.output.splitlines()[-1]
    assert ran(root) == ["2.11.0", "2.17.0", "2.14.0", "2.12.0", "2.13.0"]
    assert bisect(*given).exit_code == 0
    assert len(ran(root)) == 5


@pytest.mark.nightly
def test_the_older_one_may_be_bad(fake: Fake, root: Path) -> None:
    """With a bad version that is older, the search finds the last one that had the defect."""
    done = bisect("--good", fake("2.14.0"), "--bad", fake("2.11.0"), "--env", fake("2.13.0"), f"{OLD[:-3]}later")
    assert done.exit_code == 1  # at 2.11.0 the test is unsupported, which is neither good nor bad
    assert "unsupported: not before 2.13" in done.output
    (root / "suites/test_mended.py").write_text(
        "from importlib.metadata import version\n\ndef test_mended():\n    assert version('torch') > '2.12'\n"
    )
    done = bisect(
        *("--good", fake("2.14.0"), "--bad", fake("2.11.0"), "--env", fake("2.12.0"), "--env", fake("2.13.0")),
        "suites/test_mended.py",
    )
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("first bad: 2.11.0 ")


@pytest.mark.nightly
def test_flaky_candidates_are_bad(fake: Fake, root: Path) -> None:
    """A candidate that fails in some of its tries is bad, and the outcome says how often it failed."""
    given = ["--good", fake("2.11.0"), "--bad", fake("2.13.0"), "--env", fake("2.12.0"), "suites/test_flaky.py"]
    once = bisect(*given)
    assert once.output.splitlines()[-1].startswith("first bad: 2.13.0 "), once.output
    thrice = bisect(*given, "--tries", "3")
    assert thrice.exit_code == 0, thrice.output
    last = thrice.output.splitlines()[-1]
    assert last.startswith("first bad: 2.12.0 ")
    assert "flaky (1 of 3 tries failed)" in last
    assert Path("count-2.12.0").read_text() == "..."  # the first try was kept


def test_ends_are_tested(fake: Fake, root: Path) -> None:
    """A good end that is bad ends the search, which would otherwise blame any candidate."""
    done = bisect("--good", fake("2.14.0"), "--bad", fake("2.16.0"), "--env", fake("2.15.0"), OLD)
    assert done.exit_code == 1
    assert "--good 2.14.0" in done.output.splitlines()[-1]
    assert "is bad" in done.output.splitlines()[-1]
    assert ran(root) == ["2.14.0"]


def test_candidates_are_made(root: Path) -> None:
    """Candidates get environments of their own; one that cannot be made is skipped with a reason, and tried again."""
    make = f"test {{candidate}} != 2.13.0 -o -e fixed && {MAKE}"
    given = ["--candidates", "2.11.0 2.12.0 2.13.0 2.14.0 2.15.0", "--make", make, OLD]
    done = bisect(*given)
    assert done.exit_code == 1, done.output
    assert "2.13.0: skipped: the command that makes it exited with 1" in done.output
    assert done.output.splitlines()[-2:] == [
        "last good: 2.12.0",
        "first bad: one of 2.13.0, 2.14.0; the others could not be tested",
    ]
    Path("fixed").touch()
    before = ran(root)
    done = bisect(*given, "--discard")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("first bad: 2.14.0: bad: ")
    assert ran(root)[len(before) :] == ["2.13.0"]
    made = {path.name for path in root.glob("reports/out/bisect/*/environments/*") if path.is_dir()}
    assert made == {"0", "1", "3", "4"}  # the one that was made in the call with --discard is gone


def test_scripts_are_tested_by_their_exit_status(fake: Fake, root: Path) -> None:
    """A script with a line on how to run it is bad with exit status 1, and cannot be tested with others but 0."""
    script = "suites/test_script.py"
    done = bisect("--good", fake("2.11.0"), "--bad", fake("2.13.0"), script)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith(": bad: a defect of 2.13.0")
    done = bisect("--good", fake("2.11.0"), "--bad", fake("2.13.0"), "--env", fake("2.12.0"), script)
    assert done.exit_code == 1
    assert "skipped: the script exited with 3" in done.output


def test_bad_input(fake: Fake, root: Path) -> None:
    """Options that do not go together are refused before anything runs."""
    for arguments, says in (
        (["--good", fake("2.11.0"), OLD], "--good and --bad are needed"),
        (["--candidates", "a b", OLD], "--candidates and --make go together"),
        (["--candidates", "a b", "--make", "true", "--env", fake("2.11.0"), OLD], "give one of them"),
        (["--candidates", "a", "--make", "true", OLD], "a good candidate and a bad one"),
    ):
        done = bisect(*arguments)
        assert (done.exit_code, says in done.output) == (2, True), done.output
    assert ran(root) == []
