"""The ``perf`` fixture under pytest-benchmark: what users of its options see, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions import Folder, Session

from harness.bench.history.nights import load
from harness.bench.records import Night

pytestmark = pytest.mark.slow

TESTS = """
    import os

    import pytest

    from harness.bench.measuring.collectives import Timed, timed_on
    from harness.bench.records import Measurement

    @pytest.mark.parametrize("size", [8, 1024])
    @pytest.mark.world(2, record=False, exclusive="measured")
    def test_all_reduce(world, size, perf):
        perf.keep(timed_on(world, Timed("all_reduce", size), perf.effort))

    @pytest.mark.world(2)
    def test_no_benchmark(world):
        world.run(lambda rank: None)
"""
ARTEFACT = """
    import pytest
    from harness.bench.records import Measurement, Series

    def test_too_fast(perf):
        series = Series(operation="all_reduce", bytes=8, world=2, device="cpu")
        perf.keep(Measurement(series=series, samples=[[[1e-9, 1e-9]]], refused="faster than light"))
"""
KILLED = """
    import os

    def test_killed():
        os._exit(9)
"""
QUICK = ("--perf-rounds", "2", "--perf-visits", "1", "--perf-seconds", "0.001", "--concord-results", "out")


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    return make_folder({"test_it.py": TESTS})


@pytest.fixture(scope="module")
def measured(folder: Folder) -> Session:
    return folder.run("--benchmark-only", "--benchmark-json", "b.json", "--benchmark-autosave", *QUICK)


@pytest.fixture(scope="module")
def benchmarks(measured: Session) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((measured.folder / "b.json").read_text())["benchmarks"]
    return found


@pytest.fixture(scope="module")
def night(measured: Session) -> Night:
    return load(next(measured.folder.glob("out/*/perf.jsonl")))


def test_once_for_values_where_nobody_asks_for_time(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """With concord_benchmarks = asked, and with xdist, benchmarks run once and are not measured."""
    folder = make_folder({"test_it.py": TESTS, "pytest.ini": "[pytest]\nconcord_benchmarks = asked\n"})
    for arguments in ([], ["-n", "2"]):
        session = folder.run(*QUICK, *arguments)
        assert session.counts == {"passed": 3}
        assert list(folder.path.glob("out/*/perf.jsonl")) == []


def test_benchmark_only(measured: Session) -> None:
    """Benchmarks run and others do not; the tables are pytest-benchmark's and ours."""
    assert measured.counts == {"passed": 2, "skipped": 1}
    measured.lines.fnmatch_lines(["*benchmark 'all_reduce sum float32': 2 tests*"])
    measured.lines.fnmatch_lines(["*figures*", "collective*algbw*busbw*", "all_reduce sum*float32*8 B*"])


def test_pytest_benchmark_has_the_ranks_samples(benchmarks: list[dict[str, Any]], night: Night) -> None:
    """Its data are the slowest rank's seconds of every iteration, and none of the controller's."""
    for benchmark, measurement in zip(benchmarks, night.measurements, strict=True):
        assert benchmark["stats"]["data"] == pytest.approx(measurement.iterations(), rel=1e-9)
        assert benchmark["extra_info"]["series"] == measurement.series.name


def test_extra_info(benchmarks: list[dict[str, Any]]) -> None:
    """Bandwidths and percentiles travel with pytest-benchmark's JSON."""
    info = benchmarks[1]["extra_info"]
    assert info["algbw"] == pytest.approx(1024 / info["time"] / 1e9)
    assert {"busbw", "p50", "p95", "p99", "first", "ranks"} <= set(info)


def test_the_night_is_kept(night: Night) -> None:
    """With what it ran on, and that it came to its end."""
    assert night.complete
    assert [m.series.bytes for m in night.measurements] == [8, 1024]
    assert all(len(m.samples) == 2 for m in night.measurements)
    assert dict(night.fingerprint.software)["torch"]
    assert night.commit


def test_compare_with_what_was_saved(folder: Folder, measured: Session) -> None:
    """pytest-benchmark's storage and --benchmark-compare work on figures of ranks."""
    session = folder.run("--benchmark-only", "--benchmark-compare", *QUICK)
    assert session.counts == {"passed": 2, "skipped": 1}
    assert "Comparing against benchmarks from: " in session.out + session.err
    session.lines.fnmatch_lines(["*(NOW)*"])


def test_an_artefact_fails(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A figure that can't be one is red, says why, and is kept with that."""
    folder = make_folder({"test_it.py": ARTEFACT})
    session = folder.run("--benchmark-only", *QUICK)
    assert session.counts == {"failed": 1}
    session.lines.fnmatch_lines(["an artefact, not a figure: *faster than light"])
    assert load(next(folder.path.glob("out/*/perf.jsonl"))).measurements[0].refused == "faster than light"


def test_a_crash_keeps_what_was_measured(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """pytest itself dies after two figures: both are there, and the night is not complete."""
    folder = make_folder({"test_it.py": TESTS, "test_killed.py": KILLED})
    session = folder.run("--benchmark-enable", *QUICK)
    assert session.code == 9
    night = load(next(folder.path.glob("out/*/perf.jsonl")))
    assert not night.complete
    assert len(night.measurements) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--perf-largest", "big"], "--perf-largest: 'big' is no size: write for example 64KiB or 1MiB"),
        (["--perf-rounds", "0"], "--perf-rounds 0: at least 1"),
        (["--perf-seconds", "-1"], "--perf-seconds -1: a number of seconds, 0 or more"),
        (["--perf-ranks", "2,x"], "--perf-ranks: '2,x': numbers of ranks from 1 with commas between them"),
        (["--perf-more", "colors"], "--perf-more: colors is none of dtypes, models, overlap, groups, levels, all"),
        (["-o", "concord_benchmarks=never"], "concord_benchmarks = never: asked, or nothing"),
    ],
)
def test_bad_options(folder: Folder, arguments: list[str], says: str) -> None:
    """One line, before anything runs."""
    session = folder.run(*arguments)
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert says in session.err


def test_nothing_changes_for_other_benchmarks(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A benchmark that does not use the fixture has pytest-benchmark's own clock, and is measured as it decides."""
    folder = make_folder({"test_it.py": "def test_it(benchmark):\n    benchmark(sum, [1, 2])\n"})
    session = folder.run("--benchmark-json", "b.json", "--benchmark-max-time", "0.01")
    assert session.counts == {"passed": 1}
    (found,) = json.loads((folder.path / "b.json").read_text())["benchmarks"]
    assert found["stats"]["median"] > 0


WITH_SUITES = ("-o", f"pythonpath={Path(__file__).parents[2]}")
"""Options of a session that imports the suites, whatever ran before in this process."""
MODELS = """
    import pytest

    from harness.bench import fingerprint
    from harness.bench.measuring.payloads import SMALLEST
    from harness.plugin.perf import largest_of, ranks_of

    from suites.perf.test_models import test_models

    @pytest.fixture
    def payload(monkeypatch):
        monkeypatch.setattr(fingerprint, "available", lambda: 24 << 20)
        return SMALLEST

    def test_options(pytestconfig, payload):
        print("on", ranks_of(pytestconfig), "up to", largest_of(pytestconfig, 2))
"""


def test_a_message_that_does_not_fit(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """It is unsupported, with its size and with what fits."""
    folder = make_folder({"test_it.py": MODELS})
    session = folder.run("-rs", "-k", "test_models", "--benchmark-disable", *WITH_SUITES)
    assert session.counts == {"skipped": 2}
    session.lines.fnmatch_lines(
        [
            "*unsupported: gpt-125m ddp first, 1 of 13 is a message of 9.0 MiB, and at most 1.0 MiB fit*",
            "*unsupported: gpt-125m ddp first, 1 of 13 is a message of 9.0 MiB, and at most 0.5 MiB fit*",
        ],
        consecutive=False,
    )


def test_ranks_and_sizes_that_are_asked_for(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """By options, by the profile, or all that the profile claims; a size may be as much as memory allows."""
    sized = 'name = "sized"\nbackend = "gloo"\ndevice = "cpu"\nworld_sizes = [1, 3, 5]\n'
    folder = make_folder(
        {"test_it.py": MODELS, "sized.toml": sized, "mine.toml": sized + "benchmark_world_sizes = [3, 1]\n"}
    )
    for arguments, says in (
        ([], "on () up to 1048576"),
        (["--perf-ranks", "8,2", "--perf-largest", "64KiB"], "on (2, 8) up to 65536"),
        (
            ["--profile", "./sized.toml", "--perf-ranks", "all", "--perf-largest", "device"],
            "on (1, 3, 5) up to 1048576",
        ),
        (["--profile", "./mine.toml"], "on (1, 3) up to 1048576"),
        (["--profile", "./mine.toml", "--perf-ranks", "4"], "on (4,) up to 1048576"),
    ):
        session = folder.run("-s", "-k", "test_options", *WITH_SUITES, *arguments)
        session.lines.fnmatch_lines([f"*{says}*"])
