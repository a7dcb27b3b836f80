"""The record of the cases that a test executed, and their table in a results file."""

from __future__ import annotations

import pytest

from harness import executed
from harness.results import NOT_REACHED, PASSED, WRONG, Call, Setting, Table, Tried

SUM = Call("all_reduce", "SUM", "float32", "contiguous", "", "world", "sync")
MAX = Call("all_reduce", "MAX", "float32", "contiguous", "", "world", "sync")
STATIC = Setting("replicate", "static_graph", "yes")


def test_counts() -> None:
    """Equal cases are counted; other sizes and endings are apart."""
    with executed.recording() as found:
        executed.add([SUM, MAX, SUM], 2, PASSED)
        executed.add([SUM], 3, PASSED)
        executed.add([STATIC], 2, WRONG)
    plain = [["call", *words] for words in (("all_reduce", "SUM"), ("all_reduce", "MAX"))]
    rest = ["float32", "contiguous", "", "world", "sync"]
    assert found.plain() == [
        [2, "passed", [plain[0] + rest, plain[1] + rest], [2, 1]],
        [3, "passed", [plain[0] + rest], [1]],
        [2, "wrong", [["setting", "replicate", "static_graph", "yes"]], [1]],
    ]


def test_nobody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a test, nothing is kept, and a batch of no cases takes endings."""
    with monkeypatch.context() as outside:
        outside.setattr(executed, "_running", [])  # this test itself is one
        assert not executed.recorded()
        executed.add([SUM], 2, PASSED)
        with executed.recording() as found:
            assert executed.recorded()
        with executed.Batch([], 2, NOT_REACHED) as batch:
            batch.end([0, 1], PASSED)
    assert found.plain() == []


def test_innermost() -> None:
    """Of two records, the inner one has the cases while it lasts."""
    with executed.recording() as outer:
        with executed.recording() as inner:
            executed.add([SUM], 2, PASSED)
        executed.add([MAX], 2, PASSED)
    assert [each[2][0][2] for each in (*outer.plain(), *inner.plain())] == ["MAX", "SUM"]


def test_unknown_ending() -> None:
    """An ending that there is not is a mistake of the caller."""
    with executed.recording(), pytest.raises(AssertionError, match="fine"):
        executed.add([SUM], 2, "fine")


def test_batch() -> None:
    """Cases of a batch that was left early, even by an exception, were not reached unless they have an ending."""

    def left(batch: executed.Batch) -> None:
        with batch:
            batch.end([0], PASSED)
            batch.end([1], WRONG)
            raise ValueError("boom")

    with executed.recording() as found, pytest.raises(ValueError, match="boom"):
        left(executed.Batch([SUM, MAX, SUM], 2, NOT_REACHED))
    assert {(each[1], each[2][0][2]) for each in found.plain()} == {
        ("passed", "SUM"),
        ("wrong", "MAX"),
        ("not-reached", "SUM"),
    }


def test_table() -> None:
    """A case has one number in a file, and only tests that bring new cases add to the table."""
    table = Table()
    with executed.recording() as one:
        executed.add([MAX, SUM], 2, PASSED)
    with executed.recording() as other:
        executed.add([STATIC, SUM, SUM], 3, PASSED)
    assert table.refer(one.plain()) == ([Tried(2, "passed", [0, 1], [1, 1])], [MAX, SUM])
    assert table.refer(other.plain()) == ([Tried(3, "passed", [1, 2], [2, 1])], [STATIC])
    assert table.refer(one.plain())[1] == []
