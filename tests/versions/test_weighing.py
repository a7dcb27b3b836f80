"""The search that survives wrong answers: how often it is right, how many questions it takes, and what it foretells."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from harness.versions.weighing import ERROR, SURE, Belief, foretold, search

RUNS = 1000
Answer = Callable[[int], tuple[bool, float] | None]


def answering(place: int, draw: random.Random, error: float, wrong: int = -1) -> tuple[Answer, list[int]]:
    """Answers that are wrong with a probability, and the ``wrong``-th in any case.  Returns the questions, too."""
    asked: list[int] = []

    def answer(candidate: int) -> tuple[bool, float]:
        asked.append(candidate)
        lie = len(asked) - 1 == wrong or draw.random() < error
        return (place <= candidate) != lie, ERROR

    return answer, asked


def runs(error: float, *, injected: bool = False, none: bool = False) -> tuple[float, float]:
    """The share of right results over seeded runs with 3 to 64 candidates, and the mean number of questions."""
    right = questions = 0
    for seed in range(RUNS):
        draw = random.Random(seed)
        count = draw.choice((3, 4, 5, 8, 16, 32, 64))
        place = count if none else draw.randrange(1, count)
        wrong = draw.randrange(max(2, (count - 1).bit_length() + 2)) if injected else -1
        answer, asked = answering(place, draw, error, wrong)
        belief = Belief(count)
        assert search(belief, answer, first=count - 1)
        right += belief.best()[0] == range(place, place + 1)
        questions += len(asked)
    return right / RUNS, questions / RUNS


@pytest.mark.parametrize("error", [0.0, 0.01, 0.05, ERROR])
def test_right(error: float) -> None:
    """In at least 95 % of 1,000 runs, up to the error rate that is assumed."""
    share, _ = runs(error)
    assert share >= SURE


@pytest.mark.parametrize("error", [0.0, 0.01, 0.03])
def test_right_in_spite_of_a_wrong_answer(error: float) -> None:
    """One more wrong answer in every run, early or late, does not make it wrong; binary search would always be."""
    share, questions = runs(error, injected=True)
    assert share >= SURE
    assert questions < 16


def test_no_candidate_is_bad() -> None:
    """If not even the last one is bad, that is the result."""
    share, questions = runs(0.01, none=True)
    assert share >= SURE
    assert questions < 5


def test_an_optimist_would_be_wrong() -> None:
    """A search that believes every answer ends at a wrong place after one wrong answer: the assumed error matters."""
    right = 0
    for seed in range(RUNS // 10):
        draw = random.Random(seed)
        place = draw.randrange(1, 16)
        answer, _ = answering(place, draw, 0.0, wrong=draw.randrange(1, 4))
        belief = Belief(16)
        search(belief, lambda candidate, answer=answer: (answer(candidate)[0], 1e-9))  # type: ignore[misc]
        right += belief.best()[0] == range(place, place + 1)
    assert right < 0.5 * RUNS / 10


def test_it_says_how_long_it_takes() -> None:
    """The number that is foretold is near the mean of real searches, and nine of ten end within the other."""
    belief = Belief(16)
    usual, most = foretold(belief)
    assert usual <= most
    counts = []
    for seed in range(200):
        draw = random.Random(seed)
        answer, asked = answering(draw.randrange(1, 16), draw, ERROR)
        search(Belief(16), answer)
        counts.append(len(asked))
    assert abs(sorted(counts)[100] - usual) <= 2
    assert 0.8 < sum(count <= most for count in counts) / 200 < 0.99
    assert foretold(belief) == (usual, most)
    for _ in range(3):
        belief.tell(8, True)
        belief.tell(7, False)
    assert foretold(belief) == (0, 0)


def test_candidates_that_cannot_be_asked_about() -> None:
    """They are left out, and the result names those that nothing can tell apart."""
    belief = Belief(8, skipped={4})
    answer, asked = answering(5, random.Random(0), 0.0)

    def skipping(candidate: int) -> tuple[bool, float] | None:
        if candidate == 3:
            belief.skipped.add(3)
            return None
        return answer(candidate)

    assert search(belief, skipping)
    assert belief.best()[0] == range(3, 6)
    assert not {3, 4} & set(asked)
    alone = Belief(3, skipped={1, 2})
    assert alone.question() is None
    assert alone.places == [range(1, 4)]


def test_giving_up() -> None:
    """If the time is used up, the suspects are the fewest places that are probable together."""
    belief = Belief(8)
    for _ in range(3):
        belief.tell(4, True)
    assert not search(belief, lambda candidate: None)
    assert belief.suspects() == [1, 2, 3, 4]
    assert sum(belief.chances) == pytest.approx(1)


def test_too_few() -> None:
    """There is nothing to search in one candidate."""
    with pytest.raises(ValueError, match="another one"):
        Belief(1)
