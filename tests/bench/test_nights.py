"""Real nights through the gate: healthy ones raise nothing, a slow band, dtype, repetition or step is named.

Run with ``pytest tests/bench/test_nights.py --benchmark-enable`` on a machine that does nothing else; it takes some
fifteen minutes.  Nothing here fails for being slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.bench.detection.alarms import Decision
from harness.bench.detection.gate import decide
from harness.bench.history.nights import load
from harness.bench.history.store import History

ROOT = Path(__file__).parents[2]
HEALTHY = int(os.environ.get("CONCORD_NIGHTS", "20"))
SICK = 3
SELECTION = (
    "suites/perf/test_all_reduce.py::test_sizes",
    "suites/perf/test_all_reduce.py::test_dtypes_and_ops",
    "suites/perf/test_steps.py::test_steps[2ranks-replicate]",
    "suites/perf/test_steps.py::test_buckets",
    "suites/perf/test_steps.py::test_accumulation[2ranks-replicate-every]",
    "suites/perf/test_steps.py::test_accumulation[2ranks-replicate-last]",
)

FAULTS = {
    "a-millisecond-more-from-256-to-512-kib": ("all_reduce", "256 KiB"),
    "a-millisecond-more-for-float16-and-bfloat16": ("float16", "bfloat16"),
    "slow-from-the-third-repetition-on": ("series together",),
    "one-more-all-reduce-in-backward": ("step.replicate", "collectives"),
    "accumulation-saves-nothing": ("step.replicate", "collectives"),
    "buckets-waited-for-one-by-one[after five milliseconds]": ("step.replicate",),
}
"""Names of faults, and words that the gate must say."""


def night(folder: Path, name: str, *options: str) -> Path:
    """Measure one night; returns its file."""
    out = folder / name
    arguments = ["--benchmark-only", "--benchmark-quiet", "-q", "-p", "no:cacheprovider", "--concord-results", str(out)]
    arguments += ["-k", "2ranks", "--perf-seconds", "0.01"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *SELECTION, *arguments, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    (found,) = out.glob("*/perf.jsonl")
    return found


@pytest.fixture(scope="module")
def healthy(asked_for: None, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    kept = os.environ.get("CONCORD_KEEP_NIGHTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("nights")
    return [night(folder, f"healthy-{number}") for number in range(HEALTHY)]


def judged(files: list[Path], place: Path) -> Decision:
    """What the gate says of the last of these nights."""
    with History(place) as history:
        for file in files:
            history.add(load(file))
        return decide(history.line())


@pytest.mark.timeout(3600)
def test_healthy_nights(healthy: list[Path], tmp_path: Path, benchmark: Any, said: Any) -> None:
    """None of them raises an alarm, as the last of those up to it."""
    benchmark.pedantic(lambda: None)
    for count in range(1, len(healthy) + 1):
        decision = judged(healthy[:count], tmp_path / f"{count}.sqlite")
        said(f"healthy night {count}", [alarm.text for alarm in decision.alarms])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
def test_slow_nights(fault: str, healthy: list[Path], tmp_path: Path, benchmark: Any, said: Any) -> None:
    """What the gate says on each of the first nights with a defect."""
    benchmark.pedantic(lambda: None)
    sick: list[Path] = []
    for number in range(SICK):
        sick.append(night(tmp_path, f"sick-{number}", "--fault", fault))
        decision = judged([*healthy, *sick], tmp_path / f"{number}.sqlite")
        said(f"{fault}, night {number + 1}", [alarm.text for alarm in decision.alarms])
    texts = " ".join(alarm.text for alarm in decision.alarms)
    assert all(word in texts for word in FAULTS[fault]), texts
