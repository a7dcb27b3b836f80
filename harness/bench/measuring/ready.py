"""What can be timed or counted on a rank: a collective or a training step, ready to be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from harness.bench.measuring import collectives
from harness.bench.measuring.collectives import Timed
from harness.bench.measuring.steps import Step
from harness.worlds.rank import Rank

Timeable: TypeAlias = Timed | Step


class Ready(Protocol):
    """What is timed or counted, ready to be called on this rank.  Its values have been checked once."""

    call: Callable[[], Any]
    members: list[int]
    """The ranks that call it together."""
    takes_part: bool
    """Whether this rank is one of them."""
    in_flight: int
    """What one call does so many times."""
    problem: str
    """What is wrong with the values; empty: nothing."""

    def check(self, when: str) -> None:
        """Call it once more, and add to ``problem`` what is wrong with the values."""

    def copy(self) -> float:
        """Return the seconds in which the device copies what must have come from other ranks; 0: unknown."""

    def close(self) -> None:
        """Give back what was made for it."""


def prepared(rank: Rank, timed: Timeable) -> Ready:
    """Make a collective or a step ready to be called on this rank, and check its values."""
    if isinstance(timed, Timed):
        return collectives.Prepared(rank, timed)
    from harness.bench.measuring import stepping  # imports the stacks, which collectives do without

    return stepping.Prepared(rank, timed)
