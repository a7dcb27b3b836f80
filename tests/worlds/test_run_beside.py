"""Something is done here while ranks are at work."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch

from harness import Rank, RanksFailed, World
from harness.oracles.proof import Exactness, NotExact
from harness.programs import execute


def waits_for(rank: Rank, name: str) -> int:
    deadline = time.monotonic() + 20
    while not os.path.exists(name):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return rank.index


def test_at_once(world: World, tmp_path: os.PathLike[str]) -> None:
    """Ranks have begun before it ends, and it has ended before they are waited for."""
    name = os.path.join(tmp_path, "begun")
    assert world.run_beside(lambda: open(name, "w").close(), waits_for, name) == [0, 1]
    assert world.runs == 1


def test_ranks_fail(world: World) -> None:
    """Their failure comes after it was done."""
    done: list[int] = []

    def fails(rank: Rank) -> None:
        raise KeyError(rank.index)

    with pytest.raises(RanksFailed, match="KeyError"):
        world.run_beside(lambda: done.append(1), fails)
    assert done == [1]


def test_it_fails(world: World) -> None:
    """Its own failure ends the ranks; the next run has fresh ones."""

    def wrong() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        world.run_beside(wrong, lambda rank: time.sleep(60))
    assert not world.live
    assert world.run(lambda rank: rank.index) == [0, 1]


def test_timeout(world: World) -> None:
    """Ranks have had the time that it took."""
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="not finished after 1 s"):
        world.run_beside(lambda: time.sleep(0.9), lambda rank: time.sleep(60), timeout=1)
    assert time.monotonic() - began < 15


def test_for_small_tensors() -> None:
    """As many threads as before afterwards, and garbage is looked for again, whatever happens in between."""
    before = torch.get_num_threads()
    within = []

    @execute.for_small_tensors()
    def fails() -> None:
        within.append((torch.get_num_threads(), gc.isenabled()))
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert within == [(1, False)]
    assert torch.get_num_threads() == before
    assert gc.isenabled()


def test_for_small_tensors_where_nobody_looks_for_garbage() -> None:
    """It stays as it was."""
    gc.disable()
    try:
        with execute.for_small_tensors():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("backward", [False, True])
def test_proof_that_stops(backward: bool) -> None:
    """The first operation that is not exact ends the run, in a backward as well, and is the reason given."""
    x = torch.full((4,), 3.0, dtype=torch.float64, requires_grad=True)
    went_on = []

    class Third(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if backward else x / 3

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad / 3

    def run() -> None:
        Third.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        went_on.append(1)

    seen = Exactness(torch.float32, stop=True)
    with pytest.raises(NotExact, match="divides by 3"), seen:
        run()
    assert went_on == []
    assert len(seen.unproven) == 1
    seen = Exactness(torch.float32)
    with seen:
        run()
    assert went_on == [1]
    assert "divides by 3" in " ".join(seen.unproven)
