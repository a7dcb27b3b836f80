"""Waiting for devices that another session holds: it is shown, and it is not the test's time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import Folder, Running, Session

from harness.devices import cores

pytestmark = pytest.mark.slow

HOLDER = Path(__file__).parents[1] / "unit" / "lease_holder.py"
CORES = cores()

CONFTEST = f"""
    import os
    import subprocess
    import sys

    import pytest

    from harness.devices import host_inventory
    from harness.placement import Need

    @pytest.fixture
    def lease(request):
        # As the world fixture takes it, without ranks, which cost seconds.
        slots = request.config.pluginmanager.get_plugin("concord-slots")
        inventory = host_inventory()
        with slots.leased(request.node, inventory, Need(1, whole=True)) as devices:
            yield devices

    @pytest.fixture(scope="session")
    def holds():
        started = []

        def hold(file):
            folder = os.environ["CONCORD_LEASES"]
            command = [sys.executable, {str(HOLDER)!r}, folder, "1", "until", file]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            started[-1].stdout.readline()

        yield hold
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
"""

TESTS = """
    import time

    import pytest

    def test_starts_another_session(holds):
        holds("go-on")

    @pytest.mark.timeout(2)
    @pytest.mark.parametrize("size", [1], ids=["1rank"])
    def test_waits_for_longer_than_its_timeout(lease, size):
        pass

    def test_starts_one_more(holds):
        holds("go-on-once-more")

    @pytest.mark.timeout(2)
    @pytest.mark.parametrize("size", [1], ids=["1rank"])
    def test_waits_and_takes_too_long(lease, size):
        time.sleep(600)
"""


def let_go(session: Running, folder: Folder) -> Session:
    """Let a session wait until it has said so, then let it go on, and wait no more."""
    session.until("waiting for")
    session.until("\n")
    (folder.path / "go-on").touch()
    (folder.path / "go-on-once-more").touch()
    return session.end()


@pytest.fixture(scope="module", params=["signal", "thread"])
def waited(request: pytest.FixtureRequest, make_folder: Callable[[dict[str, str]], Folder]) -> tuple[str, Session]:
    method = request.param
    folder = make_folder({"conftest.py": CONFTEST, "test_it.py": TESTS})
    arguments = ("-q", "-p", "no:cacheprovider", "--durations=0", "--junitxml=junit.xml", "--concord-results", "out")
    session = folder.start(*arguments, "-o", f"timeout_method={method}", terminal=True)
    return method, let_go(session, folder)


def test_timeout_stands_still(waited: tuple[str, Session]) -> None:
    """A test that waits for longer than its timeout passes; one that waits and then takes too long does not."""
    method, session = waited
    assert "Timeout (>2.0s) from pytest-timeout" in session.out or (method == "thread" and "Timeout" in session.out)
    verdicts = {name.split("::")[1]: test.verdict for name, test in session.results.tests.items()}
    assert verdicts["test_waits_for_longer_than_its_timeout[1rank]"] == "passed"
    assert verdicts["test_waits_and_takes_too_long[1rank]"] == ("failed" if method == "signal" else "not-run")


def test_wait_is_not_the_test_s_time(waited: tuple[str, Session]) -> None:
    """Results have the wait beside the test's seconds, and pytest's durations and JUnit XML do not have it."""
    method, session = waited
    test = session.results.tests["test_it.py::test_waits_for_longer_than_its_timeout[1rank]"]
    assert test.waited >= 2
    assert test.seconds < 2
    if method == "signal":
        assert float(session.junit("test_waits_for_longer_than_its_timeout[1rank]").get("time", "9")) < 2
        shown = [line.split("s ")[0] for line in session.out.split("\n") if "s setup" in line and "longer" in line]
        assert all(float(seconds) < 2 for seconds in shown)


def test_wait_is_shown(waited: tuple[str, Session]) -> None:
    """One line says for what a test waits, and who holds it: program, folder, process, test, since when."""
    method, session = waited
    test = "test_it.py::test_waits_for_longer_than_its_timeout[[]1rank]"
    waits = f"waiting for {CORES} of {CORES} slots, ? s so far ({test})"
    holds = f"lease_holder.py in {session.folder} (pid *: {CORES} for * s, a test)"
    session.lines.fnmatch_lines([f"concord: {waits}; held by {holds}"])
    assert session.out.count("concord: waiting for") == 1
    if method == "signal":
        session.lines.fnmatch_lines(["concord: waited * s for devices held by lease_holder.py in *"])


WORLDS = """
    import pytest

    @pytest.mark.parametrize("number", range(4))
    def test_world(world, number):
        assert world.run(lambda rank: rank.index) == [0, 1]
"""


def test_workers(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Under -n, too, one line says that tests wait, while they do, whichever worker they are on."""
    folder = make_folder({"test_it.py": WORLDS})
    leases = folder.path / ".leases"
    leases.mkdir(mode=0o700)
    command = [sys.executable, str(HOLDER), str(leases), "1", "until", str(folder.path / "go-on")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            session = let_go(folder.start("-n", "2", "--concord-results", "out", terminal=True), folder)
        finally:
            holder.kill()
    assert session.counts == {"passed": 4}
    assert session.out.count("concord: waiting for") == 1
    assert "held by lease_holder.py in " in session.out
    session.lines.fnmatch_lines(["concord: waited * s for devices held by lease_holder.py in *"])
    assert max(test.waited for test in session.results.tests.values()) >= 2


PLACES = """
    from pathlib import Path

    import harness.leases.places as where

    where._SHARED = (Path(__file__).parent / "taken", Path(__file__).parent / "free")
    where._RUNTIME = Path("/nonexistent")
"""


@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["header", "quiet"])
def test_place_that_is_taken(make_folder: Callable[[dict[str, str]], Folder], quiet: bool) -> None:
    """A name that is taken stops no test; terminal and results say which, and why."""
    folder = make_folder({"conftest.py": CONFTEST + PLACES, "test_it.py": "def test_it(lease): pass"})
    name = f"concord-leases-{os.geteuid()}"
    for parent in ("taken", "free"):
        (folder.path / parent).mkdir()
    (folder.path / "taken" / name).write_text("")
    options = ("--concord-results", "out", *(["-q"] if quiet else []))
    session = folder.run(*options, env={"CONCORD_LEASES": ""})
    assert session.counts == {"passed": 1}
    why = f"{folder.path / 'taken' / name}: it is not a folder"
    assert session.out.count(f"concord: leases on devices are not kept in {why}") == 1
    assert session.results.header.environment["leases not kept in"] == why


def test_folder_that_cannot_be_used(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A folder for leases that the user names and that can't be used is an error of usage, not of every test."""
    session = make_folder({"test_it.py": WORLDS}).run(env={"CONCORD_LEASES": "/dev/null"})
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert session.err.strip() == "ERROR: CONCORD_LEASES=/dev/null: it is not a folder"
