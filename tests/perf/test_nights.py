"""Files that hold nights: Concord's, pytest-benchmark's, and what is neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bench.history.nights import BadNight, dumps, load, loads
from tests.perf.nights import night


def test_reads_its_own(tmp_path: Path) -> None:
    """A night that was written is read as it was, one that is not complete as well."""
    (tmp_path / "perf.jsonl").write_bytes(dumps(night("a")))
    assert load(tmp_path / "perf.jsonl") == night("a")
    cut_off = msgspec.structs.replace(night("a"), complete=False)
    assert loads(dumps(cut_off), "x") == cut_off


@pytest.mark.slow
def test_reads_what_pytest_benchmark_wrote(tmp_path: Path) -> None:
    """The JSON of a real run is a night: all timings, a fingerprint that the clock rate is not part of."""
    (tmp_path / "test_x.py").write_text("def test_sum(benchmark):\n    benchmark(sum, [1, 2])\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-json=out.json"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run([*command, "--benchmark-max-time=0.01"], cwd=tmp_path, check=True, capture_output=True, env=alone)
    raw = json.loads((tmp_path / "out.json").read_text())
    read = load(tmp_path / "out.json")
    (one,) = read.measurements
    assert one.series.operation == "test_x.py::test_sum"
    assert one.samples == [[[figure] for figure in raw["benchmarks"][0]["stats"]["data"]]]
    raw["machine_info"]["cpu"]["hz_actual_friendly"] = "something else"
    again = loads(json.dumps(raw).encode(), "again")
    assert (again.fingerprint, again.id) == (read.fingerprint, read.id)


def report(**stats: Any) -> bytes:
    return json.dumps({"datetime": "2026-01-01", "benchmarks": [{"fullname": "t", "stats": stats}]}).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"{}", "neither a night of Concord's"),
        (report(), "t: no stats.data: save timings with --benchmark-save-data"),
        (report(data=[-1.0]), "t: a figure that is negative"),
        (report(data="x"), "Expected `array"),
        (b'{"datetime": "yesterday", "benchmarks": []}', "datetime: "),
    ],
)
def test_what_is_no_night(data: bytes, says: str) -> None:
    """What is no night gets an error that names the file and says why."""
    with pytest.raises(BadNight, match=says) as raised:
        loads(data, "some.json")
    assert str(raised.value).startswith("some.json: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A file that cannot be read is named."""
    with pytest.raises(BadNight, match=r"x.json: No such file"):
        load(tmp_path / "x.json")


def test_nights_that_contradict_themselves() -> None:
    """A series twice, an iteration without ranks, no samples, no id, no time: each is named."""
    twice = night("a")
    twice.measurements.append(twice.measurements[0])
    empty, without = night("a"), night("a")
    empty.measurements[0].samples = [[[]]]
    without.measurements[0].samples = []
    cases = [(twice, "twice"), (empty, "without a figure"), (without, "no samples"), (night(""), "no id")]
    for bad, says in [*cases, (night("a", started=0.0), "no time")]:
        with pytest.raises(BadNight, match=says):
            loads(dumps(bad), "x")


@given(st.binary(max_size=60) | st.recursive(st.none() | st.text(), st.lists).map(lambda x: json.dumps(x).encode()))
def test_garbage_is_refused_in_words(data: bytes) -> None:
    """Whatever is in a file, the only error is ours."""
    with pytest.raises(BadNight):
        loads(data, "x")
