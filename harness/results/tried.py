"""The cases that a test has executed and checked: a table of cases for each file, and what each test says of them.

Most tests try many cases, and many tests try the same ones.  So a file has each case once (:class:`Cases`), and a test
refers to a case by its number in the file, from 0 (:class:`Tried`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from harness.safe_io.untrusted import Count, Ranks

PASSED, WRONG, STOPPED, NOT_REACHED, UNDECLARED = "passed", "wrong", "stopped", "not-reached", "undeclared"
ENDINGS = (WRONG, STOPPED, NOT_REACHED, PASSED, UNDECLARED)
"""How cases end, worst first.  ``passed``: executed, and every rank found it right.  ``wrong``: executed, and a rank
found something wrong.  ``stopped``: ranks died, hung or failed while it ran.  ``not-reached``: the test ended before
it.  ``undeclared``: left out, because the profile does not claim it."""

WHOLE, EVERYONE, SOME, ONE = GROUPS = ("world", "everyone", "some", "one")
"""Groups of a collective: the default group, a group of all ranks, of some of them, of a single one."""

Name = Annotated[str, msgspec.Meta(max_length=100)]


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A call of a collective; shapes, roots and repeats are left out."""

    collective: Name
    op: Name
    """Empty for a collective that does not reduce."""
    dtype: Name
    layout: Name
    """The layout in memory of inputs, and of tensors that are input and output."""
    out_layout: Name
    group: Name
    """One of :data:`GROUPS`."""
    form: Name
    """How it is called, such as ``sync`` or ``functional``."""


class Setting(msgspec.Struct, frozen=True, array_like=True, tag="setting"):
    """An option of a stack with its value, in a training run that was compared with its expected results."""

    stack: Name
    option: Name
    """Also ``dtype`` and what else a layout has beside the stack's own options."""
    value: Name


CaseOf = Call | Setting


class Cases(msgspec.Struct, tag="cases", tag_field="record"):
    """Cases that tests refer to by their numbers, which go on from one of these records to the next."""

    cases: list[CaseOf]


class Tried(msgspec.Struct, frozen=True, array_like=True):
    """The cases of a test in worlds of one size that ended in one way."""

    size: Ranks
    ended: Name
    """One of :data:`ENDINGS`."""
    cases: list[Count]
    """Numbers of cases, ascending."""
    counts: list[Count]
    """For each of them, how often; with other shapes, roots or data each time."""


class Issued(msgspec.Struct, frozen=True, array_like=True):
    """The collectives that all ranks of a test together issued, in the runs of its functions that ended well."""

    by_name: Annotated[dict[Name, Count], msgspec.Meta(max_length=100)] = {}
    """How often Python called each on a process group, by its name in torch.distributed's public API."""
    on_groups: Count = 0
    """How many process groups counted, whoever issued them; without groups that were destroyed in the same run."""


class Table:
    """The cases of a file while it is written, with their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[CaseOf, int] = {}

    def refer(self, plain: Iterable[Any]) -> tuple[list[Tried], list[CaseOf]]:
        """Return a test's cases by their numbers, and the cases that are new in the file, in their order.

        ``plain``: what the test's process reported (:meth:`harness.executed.Executed.plain`).
        """
        before, tried = len(self._numbers), []
        for size, ended, cases, counts in plain:
            read: list[CaseOf] = msgspec.convert(cases, list[CaseOf])
            numbers = [self._numbers.setdefault(case, len(self._numbers)) for case in read]
            ordered = sorted(zip(numbers, counts, strict=True))
            tried.append(Tried(size, ended, [number for number, _ in ordered], [count for _, count in ordered]))
        return tried, list(self._numbers)[before:]
