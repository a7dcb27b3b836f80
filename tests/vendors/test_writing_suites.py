"""The examples of docs/writing-suites.md are suites that pass; the first one notices a wrong sum."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT
from walkthrough import blocks_of


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a suite with the example's text."""
    (folder / "test_example.py").write_text(text)
    (folder / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\naddopts = --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--concord-results", "out", "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def examples() -> list[str]:
    return [block.text for block in blocks_of((ROOT / "docs" / "writing-suites.md").read_text())]


def test_the_example_passes_and_notices_a_wrong_sum(tmp_path: Path) -> None:
    """As it is on the page; then with MAX in place of the sum, which only three ranks show."""
    example, _ = examples()
    done = run(tmp_path, example)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert "dist.all_reduce(tensor)" in example
    done = run(tmp_path, example.replace("dist.all_reduce(tensor)", "dist.all_reduce(tensor, dist.ReduceOp.MAX)"))
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_example_that_draws(tmp_path: Path) -> None:
    """Training runs are drawn, and are on ranks what they are on one device."""
    _, example = examples()
    done = run(tmp_path, example)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
