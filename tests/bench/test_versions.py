"""What a run costs with another PyTorch, beside the same run with the pinned one.

``CONCORD_ENVS=ENV:ENV pytest tests/bench/test_versions.py --benchmark-enable``, with folders of virtual environments;
nothing here fails for being slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.results import read
from harness.versions.environments import environment, variables

ROOT = Path(__file__).parents[2]
ENVS = [Path(text) for text in os.environ.get("CONCORD_ENVS", "").split(os.pathsep) if text]
PART = ["suites/collectives/operations/test_all_reduce.py", "suites/replicate", "suites/replicate_fsdp", "-k", "2ranks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def run(python: Path, folder: Path, tests: Sequence[str]) -> tuple[float, set[str]]:
    """Run tests with a Python; returns the seconds that it took, and the tests that its PyTorch supports."""
    env = {**variables(python, ROOT), "CONCORD_EXAMPLES": "smoke", "CONCORD_LEASES": str(folder)}
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [str(python), "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", "--concord-results", str(out)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    assert done.returncode == 0, done.stdout[-4000:]
    (results,) = out.glob("**/results.jsonl")
    return took, {name for name, test in read(results).tests.items() if test.verdict != "unsupported"}


@pytest.mark.skipif(not ENVS, reason="CONCORD_ENVS names no environment with another PyTorch")
@pytest.mark.parametrize("env", ENVS, ids=lambda path: path.name)
def test_run(env: Path, compare: Callable[..., Any], asked_for: None, tmp_path: Path) -> None:
    """A part of the suites, beside the same tests with the PyTorch of this Python.

    Newer versions have more to test, so only what both support is timed.
    """
    found = environment(env, ROOT)
    tmp_path.chmod(0o700)
    here = Path(sys.executable)
    both = sorted(run(found.python, tmp_path, PART)[1] & run(here, tmp_path, PART)[1])  # and bytecode is written
    assert both
    chosen = tmp_path / "tests.txt"
    chosen.write_text("\n".join(both))
    compare(
        f"{len(both)} tests with torch {found.torch}",
        lambda: run(found.python, tmp_path, [f"@{chosen}"])[0],
        lambda: run(here, tmp_path, [f"@{chosen}"])[0],
        against="the PyTorch of this environment",
        wanted="1.1 at most",
        rounds=3,
    )
