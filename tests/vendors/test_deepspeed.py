"""DeepSpeed's ZeRO as a stack: programs and laws hold, and what is wrong in DeepSpeed is found, shrunk and reproduced.

The environment gets DeepSpeed from the package index, so all tests are nightly.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, Environment, made

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

PACKAGE = ROOT / "fixtures" / "vendors" / "deepspeed"
VERSION = "0.19.8"
"""The version in which the findings were seen."""
SUITE = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--suite", "zero")
WITHOUT_LIMIT = """
from concord_deepspeed import STACK
kept = tuple(limit for limit in STACK.limits if limit.finding != "findings/round_robin.py")
assert len(kept) == len(STACK.limits) - 1
object.__setattr__(STACK, "limits", kept)
"""


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with DeepSpeed and the sample package."""
    found = made(tmp_path_factory.mktemp("deepspeed") / "environment", PACKAGE)
    pip = [sys.executable, "-m", "pip", "--python", str(found.python), "install", "-q", f"deepspeed=={VERSION}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def test_sample_is_small() -> None:
    """A wrapper that also shards the optimizer takes less than 200 lines."""
    text = (PACKAGE / "concord_deepspeed" / "__init__.py").read_text()
    assert len(text.splitlines()) < 200


def test_healthy(deepspeed: Environment, tmp_path: Path) -> None:
    """Programs and laws of the package's own suite hold."""
    done = deepspeed.run(*SUITE, "--concord-results", str(tmp_path), timeout=850, CONCORD_EXAMPLES="smoke")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^zero +4 ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("script", "ranks"), [("round_robin", 2), ("no_elements", 1), ("memory", 1)])
def test_finding(deepspeed: Environment, script: str, ranks: int) -> None:
    """A finding's script shows its defect."""
    file = PACKAGE / "findings" / f"{script}.py"
    options = ("--standalone", f"--nproc-per-node={ranks}", str(file))
    done = deepspeed.run("-m", "torch.distributed.run", *options)
    assert "defect: present" in done.stdout, done.stdout + done.stderr
    assert done.returncode != 0


def test_known_defect(deepspeed: Environment, tmp_path: Path) -> None:
    """Without the limit that avoids it, a defect of DeepSpeed is found, and its reproducer and its program show it."""
    (tmp_path / "without_limit.py").write_text(WITHOUT_LIMIT)
    where = {"CONCORD_REPRODUCERS": str(tmp_path / "written"), "PYTHONPATH": str(tmp_path)}
    options = ("-p", "without_limit", "--concord-results", str(tmp_path / "out"), "-k", "test_same_as_alone")
    done = deepspeed.run(*SUITE, *options, timeout=600, **where)
    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-2000:]
    (file,) = (tmp_path / "written").glob("*.py")
    assert '"round_robin_gradients"' in file.with_suffix(".json").read_text()
    shown = deepspeed.run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file))
    assert shown.returncode != 0
    assert re.search(r"of linear|of conv|of norm|of embedding|size of tensor", shown.stdout + shown.stderr)
    replayed = deepspeed.run(
        "-m", "harness.commands.main", "replay", str(file.with_suffix(".json")), "--backend", "gloo"
    )
    assert replayed.returncode != 0
    assert "zero on " in replayed.stdout, replayed.stdout + replayed.stderr
    assert "the same: " not in replayed.stdout
