"""What ranks returned against what was expected of each."""

from __future__ import annotations

import pytest

import harness
from harness import assert_on_ranks


def test_equal() -> None:
    """Equal results pass, in a list or a tuple."""
    assert_on_ranks([[1.5], [2.5]], [[1.5], [2.5]])
    assert_on_ranks(([1.5],), [[1.5]])


def test_alternative() -> None:
    """What all ranks may return instead passes, too."""
    assert_on_ranks([1.5, 1.5], ["an error"] * 2, or_all=["an error"] * 2)


def test_message() -> None:
    """The message names each wrong rank, with what was expected, what was found, and where they differ."""
    with pytest.raises(AssertionError) as caught:
        assert_on_ranks([{"w": [1.5, 1.5]}] * 3, [{"w": [1.5, 1.5]}, {"w": [1.5, 1.0]}, "an error"])
    assert str(caught.value) == (
        "2 of 3 ranks returned another result than expected:\n"
        "rank 1: expected {'w': [1.5, 1.5]}\n"
        "        found    {'w': [1.5, 1.0]}\n"
        "        first difference at ['w'][1]: expected 1.5, found 1.0\n"
        "rank 2: expected {'w': [1.5, 1.5]}\n"
        "        found    'an error'"
    )


def test_ranks_that_disagree() -> None:
    """If only some ranks take the alternative, the message says which."""
    with pytest.raises(AssertionError) as caught:
        assert_on_ranks([1.5, 1.5], [1.5, "an error"], or_all=["an error"] * 2)
    assert str(caught.value) == (
        "1 of 2 ranks returned another result than expected:\n"
        "rank 1: expected 1.5\n"
        "        found    'an error'\n"
        "        or, on all ranks, 'an error'\n"
        "only ranks [1] returned what all ranks may return instead"
    )


@pytest.mark.parametrize(
    ("expected", "actual", "place"),
    [
        ([1, 2], [1, 2, 3], ""),
        ({"a": 1}, {"b": 1}, ""),
        ([1, (2, 3)], [1, (2, 4)], "[1][1]: expected 3, found 4"),
        ([1, 2], (1, 2), ""),
        (1, 2, ""),
    ],
    ids=["longer", "other-key", "nested", "other-type", "plain"],
)
def test_place(expected: object, actual: object, place: str) -> None:
    """The place of a difference is shown where it is inside of containers of equal kinds."""
    with pytest.raises(AssertionError) as caught:
        assert_on_ranks([expected], [actual])
    assert (place and f"first difference at {place}") in str(caught.value)
    assert ("first difference" in str(caught.value)) == bool(place)


def test_number_of_ranks() -> None:
    """Results of too few ranks fail."""
    with pytest.raises(AssertionError, match="results of 2 ranks were expected, and 1 ranks returned one"):
        assert_on_ranks([1, 1], [1])


def test_long_values() -> None:
    """A long value is cut, and its length is said."""
    with pytest.raises(AssertionError, match=r"found +'x+\.\.\. \(5002 characters\)") as caught:
        assert_on_ranks([""], ["x" * 5000])
    assert len(str(caught.value)) < 1000


def test_public() -> None:
    """It is part of the public face."""
    assert "assert_on_ranks" in harness.__all__
