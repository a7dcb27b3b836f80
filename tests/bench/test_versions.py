"""What a run costs with another PyTorch, beside the same run with the pinned one.

``CONCORD_ENVS=ENV:ENV pytest tests/bench/test_versions.py --benchmark-enable``, with folders of virtual environments;
nothing here fails for being slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.versions.environments import environment, variables

ROOT = Path(__file__).parents[2]
ENVS = [Path(text) for text in os.environ.get("CONCORD_ENVS", "").split(os.pathsep) if text]
PART = "suites/collectives/test_all_reduce.py suites/replicate suites/replicate_fsdp -k 2ranks -q -p no:cacheprovider"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def run(python: Path, folder: Path) -> float:
    """Run a part of the suites with a Python, and return the seconds that it took."""
    env = {**variables(python, ROOT), "CONCORD_EXAMPLES": "smoke", "CONCORD_LEASES": str(folder)}
    command = [str(python), "-m", "pytest", *PART.split(), "--concord-results", str(folder / "out")]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return time.perf_counter() - began


@pytest.mark.skipif(not ENVS, reason="CONCORD_ENVS names no environment with another PyTorch")
@pytest.mark.parametrize("env", ENVS, ids=lambda path: path.name)
def test_run(env: Path, compare: Callable[..., Any], asked_for: None, tmp_path: Path) -> None:
    """A part of the suites, beside the same part with the PyTorch of this Python."""
    found = environment(env, ROOT)
    tmp_path.chmod(0o700)
    for python in (found.python, Path(sys.executable)):  # bytecode of both
        run(python, tmp_path)
    compare(
        f"a part of the suites with torch {found.torch}",
        lambda: run(found.python, tmp_path),
        lambda: run(Path(sys.executable), tmp_path),
        against="the PyTorch of this environment",
        wanted="1.1 at most",
        rounds=3,
    )
