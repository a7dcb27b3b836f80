"""A property whose ranks hang is shrunk in a time that somebody waits for, and no healthy run is called a hang."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from harness import Rank, RanksFailed
from harness.programs import patience
from harness.programs.patience import LEAST, SURER, TIMES, Patience, patience_of
from tests.programs.test_shrinking import shrunk


def test_timeouts() -> None:
    """All the time there is until something fails; then ten times the slowest healthy run, and not too little."""
    waits = Patience()
    waits.passed(0.01)
    assert waits.timeout(60) == 60
    waits.failed("x")

    @settings(max_examples=1, database=None)
    @given(st.none())
    def shrinking(_: None) -> None:
        assert waits.timeout(60) == LEAST
        assert waits.timeout(2) == 2
        waits.passed(1.5)
        assert waits.timeout(60) == TIMES * 1.5
        waits.slowest = 0.01

    shrinking()
    assert waits.timeout(60) == LEAST * SURER


def test_one_of_each_property() -> None:
    """What failed in one property is not held against another."""
    one, two = SimpleNamespace, lambda size: None
    assert patience_of(one) is patience_of(one)
    assert patience_of(one) is not patience_of(two)
    assert patience_of([]) is not patience_of([])


def smallest(limit: int, monkeypatch: pytest.MonkeyPatch, *, seconds: float, healthy_at_last: bool = False) -> int:
    """What a property that fails from ``limit`` on is shrunk to, with so much time for it."""
    monkeypatch.setattr(patience, "SHRINKING", seconds)
    waits, ran = Patience(), []

    @settings(
        max_examples=100,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 10**9))
    def check(value: int) -> None:
        waits.begin(value)
        ran.append(value)
        if value >= limit:
            if healthy_at_last and patience._last_run():
                return
            time.sleep(0.01)
            waits.failed(value)
            raise AssertionError(value)

    with pytest.raises(Flaky if healthy_at_last else AssertionError):
        check()
    return ran[-1]


def test_shrinking_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With time it ends with the smallest example, without it with the best there was; which fails, still."""
    assert smallest(12_345, monkeypatch, seconds=60) == 12_345
    assert smallest(12_345, monkeypatch, seconds=0.0) > 12_345


def test_healthy_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fail when it is to be reported is not reported as a failure."""
    smallest(12_345, monkeypatch, seconds=60, healthy_at_last=True)


def computes_for_ever(rank: Rank) -> None:
    # A world lives on after a program that is healthy: begin from the real method each time.
    plain = torch.optim.SGD.__dict__.get("_undamaged", torch.optim.SGD.step)

    def step(self: Any, closure: Any = None) -> Any:
        while rank.index == 1:
            pass
        return plain(self, closure)

    torch.optim.SGD.step, torch.optim.SGD._undamaged = step, plain  # type: ignore[method-assign,attr-defined]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_ranks_that_never_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadlock that could be proven: each example costs a timeout, and there is a reproducer within a minute."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    failed: list[float] = []
    noted = Patience.failed

    def failing(self: Patience, what: object) -> None:
        failed.append(time.monotonic())
        noted(self, what)

    monkeypatch.setattr(Patience, "failed", failing)
    error, program = shrunk(computes_for_ever, tmp_path, sizes=(1, 2), most_steps=2)
    assert isinstance(error, RanksFailed)
    assert error.verdict == "hung"
    assert program.layout.world == 2
    assert time.monotonic() - failed[0] < 90  # on a machine with other things to do; 60 by itself
