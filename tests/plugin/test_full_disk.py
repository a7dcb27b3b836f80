"""Runs whose results can't be kept: they go on, keep their summary, say once what is lost and why, and fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import Folder

from harness import results

pytestmark = pytest.mark.slow

TESTS = """
    import pytest

    @pytest.mark.parametrize("number", range(60))
    def test_right(number, record_property):
        record_property("concord.requirements", "x" * 2000)  # so that a record takes its space

    def test_last():
        pass
"""

FULL_AT_THE_END = """
    import resource

    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(session):
        (file,) = session.config.rootpath.glob("out/*/results.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, resource.RLIM_INFINITY))
"""

ON_RANKS = """
    import torch.distributed as dist

    def test_ranks(world):
        world.run(lambda rank: dist.barrier())
"""

FILE = "suites/collectives/test_it.py"


def fill(folder: str) -> str:
    return f"dd if=/dev/zero of={folder}/filler bs=1k 2>/dev/null"


@pytest.fixture
def run_on(make_folder: Callable[[dict[str, str]], Folder]) -> Callable[..., tuple[int, str, Path]]:
    """Runs pytest where ``out`` and ``temporary`` are small disks; returns code, output, and a copy of ``out``."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel lets this user make no namespace, and so no file system")

    def run(files: dict[str, str], size: str, before: str = "true", *arguments: str) -> tuple[int, str, Path]:
        folder = make_folder(files)
        script = f"""
            mkdir out temporary kept
            mount -t tmpfs -o size={size} none out || exit 99
            mount -t tmpfs -o size={size} none temporary || exit 99
            {before}
            "$@" 2>&1
            code=$?
            cp -r out/. kept/
            exit $code
        """
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--concord-results", "out", *arguments]
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", script, "sh", *command],
            cwd=folder.path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 99, done.stderr
        return done.returncode, done.stdout + done.stderr, folder.path / "kept"

    return run


def check(code: int, said: str, reason: str, passed: int) -> None:
    assert (code, said.count("INTERNALERROR"), said.count("Traceback")) == (1, 0, 0), said
    assert said.count("not kept whole: out/") == said.count(reason) == 1, said
    assert f"{passed} passed" in said
    assert "verdicts by stack" in said


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_full_from_the_beginning(run_on: Callable[..., tuple[int, str, Path]], workers: tuple[str, ...]) -> None:
    """Where not even the first line can be written, there is no file, and the session says so once and fails."""
    code, said, kept = run_on({FILE: TESTS}, "64k", fill("out"), *workers)
    check(code, said, "No space left on device", 61)
    assert list(kept.rglob("*.jsonl")) == []


def test_full_in_the_middle(run_on: Callable[..., tuple[int, str, Path]]) -> None:
    """What fitted is there, in whole lines, and says that it is not all."""
    code, said, kept = run_on({FILE: TESTS}, "64k")
    check(code, said, "No space left on device", 61)
    (file,) = kept.rglob("results.jsonl")
    run = results.read(file)
    assert (run.complete, run.torn, run.counts()["passed"] in range(5, 40)) == (False, False, True)


def test_full_at_the_end(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A file that lacks its last line only is not complete, and the session fails."""
    folder = make_folder({FILE: TESTS, "conftest.py": FULL_AT_THE_END})
    session = folder.run("-p", "no:cacheprovider", "--concord-results", "out")
    check(session.code, session.out + session.err, "File too large", 61)
    run = session.results
    assert (run.complete, run.torn, run.counts()["passed"]) == (False, False, 61)


@pytest.mark.nightly
def test_disk_that_can_only_be_read(run_on: Callable[..., tuple[int, str, Path]]) -> None:
    """A folder that can't be made is no reason to run nothing."""
    code, said, _ = run_on({FILE: TESTS}, "64k", "mount -o remount,ro out")
    check(code, said, "Read-only file system", 61)


@pytest.mark.parametrize("given", ["out", "out/deeper"])
def test_folder_that_is_a_file(make_folder: Callable[[dict[str, str]], Folder], given: str) -> None:
    """Where a file is in the place of the folder, it stays, and the session says so and runs nothing."""
    folder = make_folder({FILE: TESTS, "out": "precious"})
    session = folder.run("-p", "no:cacheprovider", "--concord-results", given, "-k", "last")
    assert session.code == 4
    assert f"--concord-results {given}: {folder.path / 'out'} is not a folder" in session.out + session.err
    assert (folder.path / "out").read_text() == "precious"


@pytest.mark.nightly
def test_full_folder_of_temporary_files(run_on: Callable[..., tuple[int, str, Path]]) -> None:
    """Ranks, their leases and their black boxes need no space for temporary files."""
    before = f"{fill('temporary')}; export TMPDIR=$PWD/temporary"
    code, said, _ = run_on({FILE: ON_RANKS}, "64k", before)
    assert (code, "1 passed" in said) == (0, True), said


def test_full_for_junit(run_on: Callable[..., tuple[int, str, Path]]) -> None:
    """A JUnit file that does not fit is said once; results and summary stay, and the session fails."""
    code, said, kept = run_on({FILE: TESTS}, "1M", fill("temporary"), "--junitxml=temporary/junit.xml")
    assert (code, said.count("INTERNALERROR"), said.count("Traceback"), said.count("generated xml")) == (1, 0, 0, 0)
    assert said.count("not kept whole: temporary/junit.xml: No space left on device") == 1, said
    assert "61 passed" in said
    assert "verdicts by stack" in said
    (file,) = kept.rglob("results.jsonl")
    run = results.read(file)
    assert (run.complete, run.counts()["passed"], run.exit_status) == (True, 61, 1)
    assert run.end is not None
    assert run.end.lost == ["temporary/junit.xml: No space left on device"]


@pytest.mark.nightly
def test_links_in_a_shared_folder(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Results go through a link that the user has made for the folder, and through no other."""
    folder = make_folder({FILE: TESTS, "elsewhere/precious": "precious", "large-disk/here": ""})
    (folder.path / "out").symlink_to("large-disk")
    folder.write(
        "conftest.py",
        """
        import os
        import time

        def pytest_configure(config):  # whoever shares the folder guesses the name
            for ahead in range(60):
                when = time.strftime("%Y%m%d-%H%M%S", time.localtime(time.time() + ahead))
                name = f"{when}-{os.getpid()}"
                (config.rootpath / "large-disk" / name).symlink_to(config.rootpath / "elsewhere")
        """,
    )
    session = folder.run("-p", "no:cacheprovider", "--concord-results", "out", "-k", "last")
    assert session.code == 0, session.out
    assert [p.name for p in (folder.path / "elsewhere").iterdir()] == ["precious"]
    (file,) = (p for p in (folder.path / "large-disk").glob("*-2/results.jsonl"))
    assert results.read(file).complete
