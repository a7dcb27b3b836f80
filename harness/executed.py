"""What the running test has executed: its cases, as the code says that checks them, and how many collectives.

The plug-in records them around a test, in the process that runs the test.  Ranks do not have the record.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from harness.results import ENDINGS, CaseOf, Issued


class Executed:
    """The cases of one test so far."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str, CaseOf]] = Counter()
        self.issued: Issued | None = None
        """The collectives of runs in which every rank returned; None if no run was counted."""

    def add(self, cases: Iterable[CaseOf], size: int, ended: str) -> None:
        """Add cases that ended in one way (:data:`~harness.results.ENDINGS`) in a world of a size; 0 if unknown."""
        assert ended in ENDINGS, ended
        self._counts.update((size, ended, case) for case in cases)

    def add_issued(self, by_name: Mapping[str, int], on_groups: int) -> None:
        """Add the collectives that all ranks together issued in a run."""
        before = self.issued or Issued()
        total = Counter(before.by_name)
        total.update(by_name)
        self.issued = Issued(dict(sorted(total.items())), before.on_groups + on_groups)

    def plain(self) -> list[Any]:
        """Return the cases as plain data: for each size and ending, the cases and their counts."""
        found: dict[tuple[int, str], tuple[list[Any], list[int]]] = {}
        for (size, ended, case), count in self._counts.items():
            cases, counts = found.setdefault((size, ended), ([], []))
            cases.append(list(msgspec.to_builtins(case)))
            counts.append(count)
        return [[size, ended, *columns] for (size, ended), columns in found.items()]


_running: list[Executed] = []


@contextlib.contextmanager
def recording() -> Iterator[Executed]:
    """Record what is executed inside the context."""
    executed = Executed()
    _running.append(executed)
    try:
        yield executed
    finally:
        _running.remove(executed)


def recorded() -> bool:
    """Return whether anything records cases now."""
    return bool(_running)


def add(cases: Iterable[CaseOf], size: int, ended: str) -> None:
    """Add cases to the running test's, like :meth:`Executed.add`; nothing happens if nobody records them."""
    if _running:
        _running[-1].add(cases, size, ended)


def add_issued(by_name: Mapping[str, int], on_groups: int) -> None:
    """Add collectives to the running test's, like :meth:`Executed.add_issued`; nothing happens if nobody records."""
    if _running:
        _running[-1].add_issued(by_name, on_groups)


class Batch:
    """Cases that a test is about to execute in one world, in order; each has one ending in the end.

    Leaving the context adds them to the running test's.  Those without an ending were not reached.
    """

    def __init__(self, cases: Sequence[CaseOf], size: int, unreached: str) -> None:
        """``unreached``: the ending of cases that get no other."""
        self._cases, self._size = cases, size
        self._endings = [unreached] * len(cases)

    def __enter__(self) -> Batch:
        return self

    def end(self, numbers: Iterable[int], ended: str) -> None:
        """Say how cases ended, by their positions."""
        if self._cases:  # which are none if nobody records them
            for number in numbers:
                self._endings[number] = ended

    def __exit__(self, *_: object) -> None:
        for ended in dict.fromkeys(self._endings):
            add([case for case, its in zip(self._cases, self._endings, strict=True) if its == ended], self._size, ended)
