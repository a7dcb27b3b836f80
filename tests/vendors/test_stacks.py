"""Stacks of packages, installed as others would: programs, laws, shrinking, reproducers and ``concord replay``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from environments import ROOT, Environment, made

pytestmark = pytest.mark.slow

VENDORS = ROOT / "fixtures" / "vendors"
SUITE = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--suite", "ddp")
UNSYNCHRONISED = """
import torch
from torch.nn.parallel import DistributedDataParallel
forward = DistributedDataParallel.forward
def damaged(self, *inputs, **others):
    if not self.static_graph:  # which would be an internal assertion, on any number of ranks
        self.require_backward_grad_sync = False
    return forward(self, *inputs, **others)
DistributedDataParallel.forward = damaged
"""


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with the sample package."""
    return made(tmp_path_factory.mktemp("ddp") / "environment", VENDORS / "ddp")


def test_sample_is_small() -> None:
    """A stack of one's own takes less than 150 lines."""
    text = (VENDORS / "ddp" / "concord_ddp" / "__init__.py").read_text()
    assert len(text.splitlines()) < 150


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_healthy(ddp: Environment, tmp_path: Path) -> None:
    """Programs and laws of the package's own suite hold."""
    done = ddp.run(*SUITE, "--concord-results", str(tmp_path), timeout=800, CONCORD_EXAMPLES="smoke")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"^ddp +6 ", done.stdout, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_defect(ddp: Environment, tmp_path: Path) -> None:
    """A defect of the wrapper is found and shrunk; its reproducer and its program show it, and nothing without it."""
    (tmp_path / "sitecustomize.py").write_text(UNSYNCHRONISED)
    where = {"CONCORD_REPRODUCERS": str(tmp_path / "written"), "CONCORD_EXAMPLES": "smoke"}
    options = ("--concord-results", str(tmp_path / "out"), "-k", "test_same_as_alone")
    done = ddp.run(*SUITE, *options, timeout=800, PYTHONPATH=str(tmp_path), **where)
    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-2000:]
    assert "gradient of linear0.weight: 4 of 4 elements differ" in done.stdout
    (file,) = (tmp_path / "written").glob("*.py")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", str(file))
    shown = ddp.run(*torchrun, PYTHONPATH=str(tmp_path))
    assert "gradient of linear0.weight" in shown.stdout, shown.stdout + shown.stderr
    assert shown.returncode != 0
    healthy = ddp.run(*torchrun)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    replayed = ddp.run("-m", "harness.commands.main", "replay", str(file.with_suffix(".json")), "--backend", "gloo")
    assert "the same: " in replayed.stdout, replayed.stdout + replayed.stderr
