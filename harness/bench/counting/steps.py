"""Count on ranks what a training step needs.  It imports all stacks, which collectives do without."""

from __future__ import annotations

from harness.bench.counting.on_ranks import TIMES, Counted, counted
from harness.bench.measuring.steps import Step, on_stack, stepping
from harness.worlds.rank import Rank


def on_rank(rank: Rank, step: Step, times: int = TIMES) -> Counted:
    """Count what a training step needs on this rank."""
    once = stepping(rank, step, on_stack(rank, step), distributed=True)
    return counted(rank, once, list(range(rank.size)), times)


def of_stack(rank: Rank, stack: str, times: int = TIMES) -> Counted:
    """Count what the usual step of a stack needs."""
    return on_rank(rank, Step(stack), times)
