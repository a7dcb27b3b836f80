"""Requirements, and the mark that says which test proves which."""

from __future__ import annotations

import dataclasses

import pytest

from harness.requirements import Requirement, requirement

SENTENCE = "The sum is the same on every rank."
SOURCE = "torch.distributed.all_reduce"


@pytest.mark.parametrize("good", ["COLL-ALLREDUCE-01", "REPL-SYNC-02", "P-1-00", "L5-DYN-X-123"])
def test_good_ids(good: str) -> None:
    """An id is STACK-TOPIC-NN, in capitals."""
    assert Requirement(good, SENTENCE, SOURCE).id == good


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "COLL",
        "COLL-01",
        "coll-x-01",
        "COLL-X-1",
        "COLL-X-01 ",
        "COLL-X-01\n",
        "COLL--01",
        "1COLL-X-01",
        "COLL_X_01",
        "COLL-X,Y-01",
    ],
    ids=ascii,
)
def test_bad_ids(bad: str) -> None:
    """Anything else is refused, with an example of what to write."""
    with pytest.raises(ValueError, match="COLL-ALLREDUCE-01"):
        Requirement(bad, SENTENCE, SOURCE)


@pytest.mark.parametrize("bad", ["", " ", "no full stop", "Is it?", "."[:0]], ids=ascii)
def test_sentence(bad: str) -> None:
    """A sentence ends with a full stop."""
    with pytest.raises(ValueError, match="full stop"):
        Requirement("COLL-X-01", bad, SOURCE)


@pytest.mark.parametrize("bad", ["", "  "], ids=ascii)
def test_source(bad: str) -> None:
    """A requirement says where it comes from."""
    with pytest.raises(ValueError, match="source="):
        Requirement("COLL-X-01", SENTENCE, bad)


def test_error_names_the_requirement() -> None:
    """A mistake in a requirement is told with its id."""
    with pytest.raises(ValueError, match="COLL-X-01"):
        Requirement("COLL-X-01", "no", SOURCE)


def test_frozen() -> None:
    """A requirement does not change."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Requirement("COLL-X-01", SENTENCE, SOURCE).id = "COLL-X-02"  # type: ignore[misc]


def test_mark() -> None:
    """A test carries every requirement that it proves, the closest decorator first."""

    @requirement("COLL-X-01", SENTENCE, source=SOURCE)
    @requirement("COLL-X-02", SENTENCE, source=SOURCE)
    def test() -> None: ...

    assert [mark.args[0].id for mark in test.pytestmark] == ["COLL-X-02", "COLL-X-01"]  # type: ignore[attr-defined]


def test_mark_keeps_the_test() -> None:
    """A marked test is the function that it was."""

    def test() -> None: ...

    assert requirement("COLL-X-01", SENTENCE, source=SOURCE)(test) is test


def test_bad_requirement_fails_at_the_decorator() -> None:
    """A malformed requirement is told where it is written, before any test."""
    with pytest.raises(ValueError, match="requirement id"):
        requirement("x", SENTENCE, source=SOURCE)


def test_one_sentence() -> None:
    """An id says one thing: the same sentence again is fine, another one is refused, and both are in the error."""
    mark = requirement("UNIT-ONE-01", SENTENCE, source=SOURCE)
    assert requirement("UNIT-ONE-01", SENTENCE, source=SOURCE) is not mark
    with pytest.raises(
        ValueError, match=rf"UNIT-ONE-01 already has the sentence '{SENTENCE}'; give another id to: 'Another\.'"
    ):
        requirement("UNIT-ONE-01", "Another.", source=SOURCE)


def test_one_source() -> None:
    """An id has one source, whichever of its tests runs first."""
    requirement("UNIT-TWO-01", SENTENCE, source=SOURCE)
    with pytest.raises(ValueError, match=r"UNIT-TWO-01 already has the source '.*'; it can't also have 'another'"):
        requirement("UNIT-TWO-01", SENTENCE, source="another")
