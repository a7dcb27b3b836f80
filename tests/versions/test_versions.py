"""``concord versions``: the checkout's own harness in every environment, resumed, compared."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from harness.commands.main import app
from harness.results import read
from tests.cluster.conftest import Agent, key_file, launcher_options, start
from tests.versions.fakes import BY_VERSION, fake_checkout, ran

Fake = Callable[[str], Path]

__all__ = ["key_file", "start"]
pytestmark = pytest.mark.slow

SLEEPS = """
    import time
    from pathlib import Path

    def test_it():
        Path("asleep").touch()
        while not Path("awake").exists():
            time.sleep(0.05)
"""
"""A session that lasts until there is a file ``awake``."""

CUT_OFF = """
    import os
    from pathlib import Path
    import pytest

    @pytest.mark.parametrize("number", [1, 2, 3, 10])
    def test_it(number):
        with Path("done.txt").open("a") as file:
            file.write(f"{number}\\n")
        if number == 2 and not Path("again").exists():
            os._exit(9)
"""
"""A session that dies in its second test, unless there is a file ``again``."""


def versions(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["versions", *map(str, arguments)])


def test_changes_between_versions(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version runs the same suites, and each change of a verdict is listed with its cause; nothing runs twice."""
    root = fake_checkout(tmp_path / "checkout", by_version=BY_VERSION)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the current folder alone makes no harness importable
    given = [word for version in ("2.14.0", "2.12.0", "2.13.0") for word in ("--env", fake(version))]
    done = versions("suites/", "-k", "old or later", *given, "--json", "found.json", "--markdown", "found.md")
    assert done.exit_code == 1, done.output
    found = json.loads(Path("found.json").read_text())
    assert [(each["torch"], each["counts"]) for each in found["versions"]] == [
        ("2.12.0", {"passed": 1, "unsupported": 1}),
        ("2.13.0", {"passed": 2}),
        ("2.14.0", {"failed": 1, "passed": 1}),
    ]
    suite = "suites/test_by_version.py"
    first, second = found["steps"]
    assert first["changes"] == [
        {
            "before": "unsupported",
            "after": "passed",
            "count": 1,
            "causes": [{"headline": "unsupported: not before 2.13", "tests": [f"{suite}::test_later"]}],
        }
    ]
    (change,) = second["changes"]
    assert (change["before"], change["after"]) == ("passed", "failed")
    assert "newer than 2.13" in change["causes"][0]["headline"]
    assert change["causes"][0]["tests"] == [f"{suite}::test_old"]
    assert "| 2.14.0 | 1 | 1 | 0 |" in Path("found.md").read_text()
    assert "2.13.0 → 2.14.0: 1 test changed, 1 unchanged" in done.output

    again = versions("suites/", "-k", "old or later", *given)
    assert again.exit_code == 1
    assert again.output.count("whole already") == 3
    assert ran(root) == ["2.12.0", "2.13.0", "2.14.0"]

    Path("suites/test_by_version.py").open("a").write("# changed\n")
    other = versions("suites/", "-k", "old or later", "--env", fake("2.13.0"))
    assert other.exit_code == 0, other.output
    assert ran(root)[3:] == ["2.13.0"]


def test_a_session_that_was_cut_off_goes_on(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What died in the middle is reported as not whole; the next call runs what is missing, and no more."""
    monkeypatch.chdir(fake_checkout(tmp_path / "checkout", cut_off=CUT_OFF))
    first = versions("--env", fake("2.13.0"))
    assert first.exit_code == 1
    assert "2.13.0: not whole: it was cut off" in first.output
    assert Path("done.txt").read_text().split() == ["1", "2"]
    Path("again").touch()
    second = versions("--env", fake("2.13.0"), "--json", "found.json")
    assert second.exit_code == 0, second.output
    # The first runs once more: pytest deselects by the beginning of a name, and test_it[1] is none of test_it[10].
    assert Path("done.txt").read_text().split() == ["1", "2", "2", "3", "10"]
    (found,) = json.loads(Path("found.json").read_text())["versions"]
    assert (found["counts"], found["problem"]) == ({"passed": 4}, "")


def test_results_say_which_harness_ran(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have the environment's torch, and the plug-in is this Concord's, not the one that is installed there."""
    root = fake_checkout(tmp_path / "checkout", by_version=BY_VERSION)
    monkeypatch.chdir(root)
    assert versions("-k", "fine", "--env", fake("2.13.0")).exit_code == 0
    (file,) = root.glob("reports/out/versions/*/run*/*/results.jsonl")
    run = read(file)
    assert run.header.environment["torch"] == "2.13.0"
    assert run.end is not None
    assert run.end.plugins["harness.plugin"].startswith("concord-harness ")
    assert "harness/plugin/summary.py" in run.end.files


def test_a_session_that_cannot_begin(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usage error of pytest is not taken for a session without failures."""
    monkeypatch.chdir(fake_checkout(tmp_path / "checkout", by_version=BY_VERSION))
    done = versions("suites/", "--no-such-option", "--env", fake("2.13.0"))
    assert done.exit_code == 1
    assert "not whole: there are no results (pytest exited with 4" in done.output
    nothing = versions("suites/", "-k", "nothing", "--env", fake("2.13.0"))
    assert nothing.exit_code == 1
    assert "2.13.0: not whole: " in nothing.output
    assert "(pytest exited with 5, see " in nothing.output


def test_bad_input(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment, one that is none, and one that is given twice are refused before anything runs."""
    monkeypatch.chdir(fake_checkout(tmp_path / "checkout", by_version=BY_VERSION))
    for arguments, says in (
        ([], "no environment was given"),
        (["--env", "nowhere"], "there is no such environment"),
        (["--env", fake("2.13.0"), "--env", fake("2.13.0")], "it is given twice"),
    ):
        done = versions(*arguments)
        assert (done.exit_code, says in done.output) == (2, True), done.output
    assert ran(tmp_path / "checkout") == []


def test_on_hosts(
    fake: Fake, start: Callable[..., Agent], key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts run the sessions, each one at a time, and the comparison is the same."""
    root = fake_checkout(tmp_path / "checkout", by_version=BY_VERSION)
    agents = [start(), start()]
    monkeypatch.chdir(root)
    given = [word for version in ("2.12.0", "2.13.0", "2.14.0") for word in ("--env", fake(version))]
    done = versions(*given, *launcher_options(agents, key_file), "--json", "found.json")
    assert done.exit_code == 1, done.output
    assert sorted(ran(root)) == ["2.12.0", "2.13.0", "2.14.0"]
    found = json.loads(Path("found.json").read_text())
    assert [each["counts"] for each in found["versions"]] == [
        {"passed": 2, "unsupported": 1},
        {"passed": 3},
        {"failed": 1, "passed": 2},
    ]
    for host, port in (agent.address for agent in agents):
        assert f"on the host of the agent at {host} port {port}: " in done.output
    assert "[2.13.0] " in done.output


def test_host_goes(
    fake: Fake, start: Callable[..., Agent], key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of a host that goes is done on another; without another, the same command continues later."""
    root = fake_checkout(tmp_path / "checkout", sleeps=SLEEPS)
    agents = [start(), start()]
    monkeypatch.chdir(root)
    given = ["--env", fake("2.13.0"), "--json", "found.json"]

    def kill(*those: Agent) -> None:
        while not Path("asleep").exists():
            time.sleep(0.05)
        for agent in those:
            agent.end(signal.SIGKILL)
        if len(those) == 1:
            Path("awake").touch()

    with ThreadPoolExecutor() as threads:
        killing = threads.submit(kill, agents[0])
        done = versions(*given, *launcher_options(agents, key_file))
        killing.result()
    assert done.exit_code == 0, done.output
    host, port = agents[0].address
    assert f"the host of the agent at {host} port {port} has gone" in done.output
    (found,) = json.loads(Path("found.json").read_text())["versions"]
    assert (found["counts"], found["problem"]) == ({"passed": 1}, "")

    for name in ("asleep", "awake"):
        Path(name).unlink()
    Path("suites/test_sleeps.py").open("a").write("# changed\n")
    with ThreadPoolExecutor() as threads:
        threads.submit(kill, agents[1], agents[1])
        done = versions(*given, *launcher_options(agents[1:], key_file))
    assert (done.exit_code, "no host is left" in done.output) == (2, True), done.output
