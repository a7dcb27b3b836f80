"""The page of memory that says what a rank was doing, whatever became of the rank."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds.blackbox import PHASES, SIZE, BlackBox

SLOTS = 128
RING_AT = 128
SLOT = 320


@dataclass
class Page:
    """A page, seen by the rank, by the controller, and raw."""

    rank: BlackBox
    controller: BlackBox
    raw: mmap.mmap

    def close(self) -> None:
        self.rank.close()
        self.controller.close()
        self.raw.close()


def new_page() -> Page:
    fd = BlackBox.create("test")
    try:
        return Page(BlackBox(fd), BlackBox(fd), mmap.mmap(fd, SIZE))
    finally:
        os.close(fd)


@pytest.fixture
def page() -> Iterator[Page]:
    found = new_page()
    yield found
    found.close()


def test_new_page(page: Page) -> None:
    """A rank that has done nothing is starting and has issued nothing."""
    assert (page.controller.phase, page.controller.count, page.controller.recent()) == ("starting", 0, [])


def test_progress(page: Page) -> None:
    """The controller sees how far a function has come; at first it has not begun."""
    assert page.controller.reached == (0, 0)
    page.rank.progress(3, 5)
    assert page.controller.reached == (3, 5)
    page.rank.issued("all_reduce", "float32[4]", "0", "x.py:1")
    page.rank.enter("running", job=3)
    assert page.controller.reached == (3, 5)


@pytest.mark.parametrize("phase", PHASES)
def test_phase(page: Page, phase: str) -> None:
    """The controller sees the phase that the rank entered."""
    page.rank.enter(phase, job=3)
    assert phase == page.controller.phase


def test_unknown_phase_is_refused(page: Page) -> None:
    """A phase that nobody knows is a mistake of the rank's code."""
    with pytest.raises(ValueError):
        page.rank.enter("dancing")


def test_issued(page: Page) -> None:
    """A collective is read back as it was noted."""
    page.rank.issued("all_reduce", "float32[4]", "0", "test.py:12")
    (found,) = page.controller.recent()
    expected = (1, "all_reduce", "float32[4]", "0", "test.py:12")
    assert expected == (found.number, found.op, found.tensors, found.group, found.where)


def test_oldest_first(page: Page) -> None:
    """recent() gives the last few, oldest first."""
    for i in range(20):
        page.rank.issued(f"op{i}", "", "0", "")
    assert [i.op for i in page.controller.recent(3)] == ["op17", "op18", "op19"]


def test_ring_wraps(page: Page) -> None:
    """The ring keeps the last entries; the count goes on."""
    for i in range(3 * SLOTS + 5):
        page.rank.issued(f"op{i}", "", "0", "")
    last = 3 * SLOTS + 5
    assert last == page.controller.count
    assert [f"op{i}" for i in range(last - SLOTS, last)] == [i.op for i in page.controller.recent(1000)]


def test_survives_its_writer(page: Page) -> None:
    """What was noted can be read after the rank's side is gone."""
    page.rank.issued("barrier", "", "0", "x.py:1")
    page.rank.close()
    assert [i.op for i in page.controller.recent()] == ["barrier"]
    page.rank = page.controller


def test_long_texts_are_cut(page: Page) -> None:
    """A long path keeps its end, where file and line are."""
    page.rank.issued("all_reduce", "float32[" + "1, " * 500 + "]", "g" * 500, "/long" * 500 + "/test.py:12")
    (found,) = page.controller.recent()
    assert (found.op, found.where.endswith("/test.py:12")) == ("all_reduce", True)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(*[st.text(max_size=400)] * 4), min_size=1, max_size=4), st.integers(0, SLOTS))
def test_any_text(entries: list[tuple[str, str, str, str]], before: int) -> None:
    """Whatever the texts are, each entry is kept, in its own slot, with the end of its place."""
    page = new_page()
    try:
        for i in range(before):
            page.rank.issued(f"op{i}", "", "", "")
        for entry in entries:
            page.rank.issued(*entry)
        found = page.controller.recent(SLOTS)
        assert list(range(max(1, before + len(entries) - SLOTS + 1), before + len(entries) + 1)) == [
            i.number for i in found
        ]
        for entry, issued in zip(entries, found[-len(entries) :], strict=True):
            assert entry[3].encode(errors="replace").decode().endswith(issued.where)
    finally:
        page.close()


@pytest.mark.parametrize("letter", ["\N{SNOWMAN}", "\U0001f525", "\x01", "\ud800", '"'], ids=ascii)
def test_entry_stays_in_its_slot(page: Page, letter: str) -> None:
    """Letters that take many bytes don't spill into the next entry, nor over the end of the page."""
    for _ in range(SLOTS):
        page.rank.issued("op", "", "", "where")
    for _ in range(SLOTS):
        page.rank.issued(*[letter * 500] * 4)
    assert len(page.controller.recent(SLOTS)) == SLOTS


def test_torn_entry(page: Page) -> None:
    """An entry that was being written is left out; its neighbours are not."""
    for i in range(5):
        page.rank.issued(f"op{i}", "", "0", "")
    page.raw[RING_AT + 2 * SLOT + 18 : RING_AT + 2 * SLOT + 22] = b"\xff\xff\xff\xff"
    assert [i.op for i in page.controller.recent()] == ["op0", "op1", "op3", "op4"]


def test_entry_of_an_earlier_round(page: Page) -> None:
    """A slot that still has the entry of 128 collectives ago is left out."""
    for i in range(SLOTS + 3):
        page.rank.issued(f"op{i}", "", "0", "")
    page.raw[RING_AT + SLOT : RING_AT + SLOT + 8] = (2).to_bytes(8, "little")
    assert [i.op for i in page.controller.recent(3)] == ["op128", "op130"]


@pytest.mark.parametrize(
    "text",
    [
        b"1",
        b"null",
        b"[1,2,3]",
        b"[1,2,3,4,5]",
        b"{}",
        b'{"a":1,"b":2,"c":3,"d":4}',
        b"[" * 300,
        b"\xff\xfe",
        b"",
        b"NaN",
    ],
    ids=ascii,
)
def test_garbage_entry(page: Page, text: bytes) -> None:
    """An entry whose text is not what we write never raises."""
    page.rank.issued("op", "", "0", "")
    at = RING_AT
    page.raw[at + 16 : at + 18] = len(text).to_bytes(2, "little")
    page.raw[at + 18 : at + 18 + len(text)] = text
    assert len(page.controller.recent()) <= 1


@settings(deadline=None, max_examples=200)
@given(
    state=st.binary(min_size=RING_AT, max_size=RING_AT),
    slots=st.dictionaries(st.integers(0, SLOTS - 1), st.binary(min_size=SLOT, max_size=SLOT), max_size=6),
    count=st.one_of(st.integers(0, 2 * SLOTS), st.integers(0, 2**64 - 1)),
)
def test_garbage_page(state: bytes, slots: dict[int, bytes], count: int) -> None:
    """A page that a rank has scribbled over never raises, and names a phase."""
    page = new_page()
    try:
        page.raw[:RING_AT] = state
        page.raw[64:72] = count.to_bytes(8, "little")
        for slot, data in slots.items():
            page.raw[RING_AT + slot * SLOT : RING_AT + (slot + 1) * SLOT] = data
        page.controller.recent(SLOTS)
        assert page.controller.phase in (*PHASES, "unknown")
    finally:
        page.close()
