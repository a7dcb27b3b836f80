"""Seconds for a mutant: the audit, beside a suite that spawns processes for every test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from harness.audit import mutants
from harness.audit.records import KILLED
from harness.audit.run import Audit, Plan, Progress

ROOT = Path(__file__).parents[2]
COUNT = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def spawned(mutant: mutants.Mutant) -> float:
    """Seconds until a session of MultiProcessTestCase has noticed a mutant, or has come to its end."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + ["-o", "python_files=*.py", "-o", "concord_results=", "tests/bench/spawned/replicate.py"],
        cwd=ROOT,
        env={**os.environ, "BENCH_MUTANT": mutants.prepared(mutant)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return time.monotonic() - began


@pytest.mark.usefixtures("asked_for")
def test_seconds_for_a_mutant(compare: Callable[..., Any], benchmark: Any, tmp_path: Path) -> None:
    """Mutants of composable DDP, all of which are noticed; collecting and looking at healthy ranks left out."""
    plan = Plan(components=("replicate",), faults=False, names=("_collect_params", "_ReplicateState.init:"))
    found = Audit(ROOT, tmp_path, plan, workers=1, progress=Progress()).run().results
    killed = {r.defect.name: r.seconds for r in found if r.state == KILLED}
    chosen = [m for m in mutants.mutants("torch.distributed._composable.replicate") if m.name in killed][:COUNT]
    compare(
        f"a mutant that is noticed, mean of {len(chosen)}",
        lambda: None,
        lambda: mean(spawned(mutant) for mutant in chosen),
        against="a suite on MultiProcessTestCase that stops at its first failure",
        wanted="0.1 at most",
        rounds=1,
        ours=lambda: mean(killed[mutant.name] for mutant in chosen),
    )
