"""A defect on the ranks is found by the property, shrunk, and written down, whatever it does to the ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, RanksFailed
from harness.programs import patience
from harness.programs.assertion import assert_same_as_alone
from harness.programs.problem import Different
from harness.programs.stored import loads
from harness.programs.strategies import programs
from harness.reproducers import carried
from harness.specs.program import Linear, Program, children
from harness.specs.shapes import walk
from tests.programs.damaged import Damaged, unreduced

SIZES = (1, 2, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    return tmp_path


def shrunk(
    damage: Callable[[Rank], None], folder: Path, sizes: tuple[int, ...] = SIZES, most_steps: int = 3
) -> tuple[Exception, Program]:
    """Let the property find a defect; the error, and the program that is left."""
    worlds = Damaged(damage)

    @settings(
        max_examples=60,
        derandomize=True,  # how small it gets depends on where it begins
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        print_blob=False,
    )
    @given(programs("replicate", sizes, smooth=False, most_steps=most_steps))
    def check(program: Program) -> None:
        assert_same_as_alone(worlds, program)

    try:
        with pytest.raises((Different, RanksFailed)) as caught:
            check()
    finally:
        worlds.close()
    (file,) = folder.glob("*.json")
    (written,) = carried(caught.value)
    assert written.file == file.with_suffix(".py")
    assert written.command.startswith("torchrun --nproc-per-node=")
    assert re.fullmatch(r"concord replay \S+\.json --backend gloo --device cpu", written.replay)
    notes = "\n".join(caught.value.__notes__)
    assert written.command in notes
    assert written.replay in notes
    assert file.with_suffix(".py").exists()
    return caught.value, loads(file.read_text())


def test_wrong_values(folder: Path) -> None:
    """Gradients that are not averaged: two ranks, one layer, one step are left."""
    error, program = shrunk(unreduced, folder)
    assert isinstance(error, Different)
    assert program.layout.world == 2
    assert len(program.steps) == 1
    assert len(program.model.layers) == 1


def killed_where_biases_are(rank: Rank) -> None:
    plain = DistributedDataParallel.__init__

    def init(self: Any, parameters: Any, **options: Any) -> None:
        if rank.index == 1 and any(p.dim() == 1 for p in parameters):
            os.abort()
        plain(self, parameters, **options)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def test_crash(folder: Path) -> None:
    """A rank that dies shrinks as well: what it needs stays, and little else."""
    error, program = shrunk(killed_where_biases_are, folder)
    assert isinstance(error, RanksFailed)
    assert "SIGABRT" in str(error)
    assert program.layout.world == 2
    biased = [n for n in walk(program.model) if getattr(n.layer, "bias", False)]
    assert len(biased) == 1
    assert len(list(walk(program.model))) <= 2


def hangs_in_second_step(rank: Rank) -> None:
    # A world lives on after a program that is healthy: begin from the real method, and from none, each time.
    plain = torch.optim.SGD.__dict__.get("_undamaged", torch.optim.SGD.step)
    count = 0

    def step(self: Any, closure: Any = None) -> Any:
        nonlocal count
        count += 1
        if rank.index == 1 and count == 2:
            torch.distributed.barrier()
        return plain(self, closure)

    torch.optim.SGD.step, torch.optim.SGD._undamaged = step, plain  # type: ignore[method-assign,attr-defined]


@pytest.mark.nightly
def test_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock shrinks as well, in less than the ranks' timeout would cost for a few examples."""
    monkeypatch.setattr(patience, "SHRINKING", 500.0)  # to the end, however busy the machine is
    began = time.monotonic()
    error, program = shrunk(hangs_in_second_step, folder, sizes=(1, 2), most_steps=2)
    assert isinstance(error, RanksFailed)
    assert error.verdict == "hung"
    assert len(program.steps) == 2
    assert sum(isinstance(n.layer, Linear) or bool(children(n.layer)) for n in walk(program.model)) <= 2
    assert time.monotonic() - began < 600
