"""Search for the first bad of some candidates in order when an answer may be wrong.  Pure.

Each candidate is asked about as often as it takes.  An answer does not exclude anything: it multiplies the probability
of every place at which the first bad candidate may be by how likely that answer is there (Horstein, 1963; Burnashev and
Zigangirov, 1974).  The next question is the one whose answer is least certain.  The search ends when one place has the
probability that was asked for, so a wrong answer costs further questions and not the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

SURE = 0.95
"""Probability of a place at which a search ends."""
ERROR = 0.08
"""Assumed probability that an answer is wrong.  A duet is wrong with at most 1 % by its own account.  The rest is for
what its account does not cover, such as a difference of two environments that has nothing to do with the series."""
UNSURE = 0.25
"""The same for a duet that could not decide, and whose estimate is taken for an answer."""
_NONE = 0.1
"""Probability, before any question, that no candidate is bad, not even the last."""
_MOST = 1000
"""Questions after which a simulated search is given up."""


@dataclass
class Belief:
    """What is believed about candidates ``0 … count - 1``, of which the first is good."""

    count: int
    skipped: set[int] = field(default_factory=set)
    """Candidates that can't be asked about."""
    asked: dict[int, int] = field(default_factory=dict)
    """How often each candidate was asked about."""

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError("there must be a good candidate and another one")
        each = (1 - _NONE) / (self.count - 1)
        self.chances = [0.0, *[each] * (self.count - 1), _NONE]
        """For each candidate, the probability that it is the first bad one; the last is for none of them."""

    def tell(self, candidate: int, bad: bool, error: float = ERROR) -> None:
        """Count an answer.  ``error``: the probability that it is wrong."""
        self.asked[candidate] = self.asked.get(candidate, 0) + 1
        likely = [(place <= candidate) == bad for place in range(self.count + 1)]
        told = [p * (1 - error if fits else error) for p, fits in zip(self.chances, likely, strict=True)]
        total = sum(told)
        self.chances = [p / total for p in told]

    def question(self) -> int | None:
        """Return the candidate whose answer is least certain; None if there is none to ask about.

        Of those that are alike, it is the one that was asked about least.
        """
        best, below = None, 0.0
        for candidate in range(1, self.count):
            below += self.chances[candidate]
            if candidate in self.skipped:
                continue
            rank = (round(abs(below - 0.5), 9), self.asked.get(candidate, 0), candidate)
            best = rank if best is None or rank < best else best
        return best[2] if best is not None else None

    @property
    def places(self) -> list[range]:
        """The groups of places that no question can tell apart: those between two that can be asked about."""
        found, start = [], 1
        for candidate in range(1, self.count):
            if candidate not in self.skipped:
                found.append(range(start, candidate + 1))
                start = candidate + 1
        return [*found, range(start, self.count + 1)]

    def best(self) -> tuple[range, float]:
        """Return the likeliest group of places, and its probability.  The place ``count`` stands for no candidate."""
        return max(((each, self.chance(each)) for each in self.places), key=lambda found: found[1])

    def chance(self, places: range) -> float:
        """Return the probability of some places."""
        return sum(self.chances[place] for place in places)

    def suspects(self, sure: float = SURE) -> list[int]:
        """Return the fewest places that have this probability together, in order."""
        found: list[int] = []
        total = 0.0
        for place in sorted(range(1, self.count + 1), key=lambda place: -self.chances[place]):
            if total >= sure:
                break
            found.append(place)
            total += self.chances[place]
        return sorted(found)

    def copy(self) -> Belief:
        """Return a belief of its own."""
        found = Belief(self.count, set(self.skipped), dict(self.asked))
        found.chances = list(self.chances)
        return found


def search(belief: Belief, answer: Callable[[int], tuple[bool, float] | None], *, first: int | None = None) -> bool:
    """Ask until one place is sure.  Returns False if ``answer`` gave up before, or nothing is left to ask about.

    ``answer``: says for a candidate whether it is bad, and with which probability that is wrong.  It may add the
    candidate to ``belief.skipped``, and then says None; None for another candidate gives up.  ``first``: the candidate
    to begin with.
    """
    following = first
    while belief.best()[1] < SURE:
        candidate = following if following is not None else belief.question()
        following = None
        if candidate is None:
            return False
        said = answer(candidate)
        if said is not None:
            belief.tell(candidate, *said)
        elif candidate not in belief.skipped:
            return False
    return True


def foretold(belief: Belief, *, error: float = ERROR, searches: int = 100, seed: int = 0) -> tuple[int, int]:
    """Return how many more questions it takes: the median of simulated searches, and what nine of ten do not exceed."""
    draw = random.Random(seed)  # noqa: S311 - simulations
    counts = []
    for _ in range(searches):
        place = draw.choices(range(belief.count + 1), belief.chances)[0]
        count = 0

        def answer(candidate: int, place: int = place) -> tuple[bool, float] | None:
            nonlocal count
            count += 1
            return ((place <= candidate) != (draw.random() < error), error) if count < _MOST else None

        search(belief.copy(), answer)
        counts.append(count)
    counts.sort()
    return counts[searches // 2], counts[searches * 9 // 10]
