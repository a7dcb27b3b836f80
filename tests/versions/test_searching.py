"""The search for the first bad candidate finds it, in few steps, whatever is skipped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.versions.searching import BAD, GOOD, SKIPPED, most_steps, search


@given(st.data())
def test_first_bad_is_found(data: st.DataObject) -> None:
    """The suspects contain the first bad candidate; those before it among them were skipped, and it alone remains."""
    count = data.draw(st.integers(2, 40))
    first_bad = data.draw(st.integers(1, count - 1))
    skipped = data.draw(st.sets(st.integers(1, count - 2))) if count > 2 else set()
    asked: list[int] = []

    def state(number: int) -> str:
        asked.append(number)
        return SKIPPED if number in skipped else BAD if number >= first_bad else GOOD

    found = search(count, state)
    assert first_bad in found.suspects
    assert set(found.suspects[:-1]) <= skipped
    assert found.good not in skipped
    assert found.bad not in skipped
    assert len(asked) == len(set(asked))
    assert not {0, count - 1} & set(asked)
    if not skipped:
        assert len(asked) <= most_steps(count)


def test_two_candidates() -> None:
    """If nothing lies between the good and the bad one, nothing is tested."""
    assert list(search(2, lambda number: GOOD).suspects) == [1]
    assert most_steps(2) == 0
