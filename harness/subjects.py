"""Subjects: whose implementation of the stacks the suites run on.

- ``torch``: PyTorch's own, the default;
- ``reference``: Concord's (:mod:`harness.reference`);
- those of installed packages: entry points of the group ``concord.subjects`` that name a function, one for each stack
  that the subject implements, called ``subject.stack``.

Every rank calls the function, without arguments, before anything else. It puts the implementation in the place of
PyTorch's. The process in which pytest runs never sees it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from harness.entry_points import SUBJECTS, Broken, points
from harness.results import NoStack

TORCH = "torch"
STACKS = ("collectives", "replicate", "replicate_fsdp", "tp_extension", "dynamo")


class SubjectError(ValueError):
    """An unknown subject, or one that its package has registered incorrectly."""


@dataclass(frozen=True)
class Subject:
    """An implementation of some stacks."""

    name: str
    puts: dict[str, str] = field(default_factory=dict)
    """By stack, the function that puts the implementation into a process, as ``module:function``."""

    @property
    def first(self) -> tuple[tuple[str, str], ...]:
        """The functions that ranks call before anything else (:attr:`harness.worlds.world.WorldSpec.first`)."""
        return tuple(("harness.subjects:put", where) for where in self.puts.values())

    def lacks(self, stack: str) -> NoStack | None:
        """Return why tests of a stack can't run on it; None if they can."""
        if self.name == TORCH or not stack or stack in self.puts:
            return None
        return NoStack(self.name, stack, tuple(self.puts))


def known() -> tuple[dict[str, Subject], list[Broken]]:
    """Return every subject by name, and the entry points that do not name a valid subject."""
    ours = {stack: f"harness.reference:put_{stack}" for stack in ("replicate", "replicate_fsdp", "tp_extension")}
    subjects = {TORCH: Subject(TORCH), "reference": Subject("reference", ours)}
    registered, broken = points(SUBJECTS)
    for point in registered.values():
        name, _, stack = point.name.partition(".")
        if name in (TORCH, "reference"):
            broken.append(Broken(point, f"{name} is Concord's own; take another name"))
        elif not name or stack not in STACKS:
            broken.append(Broken(point, f"call it {name or 'subject'}.STACK, with a stack of {', '.join(STACKS)}"))
        else:
            subjects.setdefault(name, Subject(name)).puts[stack] = point.value
    return subjects, broken


def find(name: str) -> Subject:
    """Return the subject with a name.

    Errors: :class:`SubjectError`, which lists the broken entry points of that name or else the subjects that exist.
    """
    subjects, broken = known()
    if name not in subjects:
        meant = [str(each) for each in broken if each.point.name.partition(".")[0] == name]
        raise SubjectError("; ".join(meant) or f"no such subject; there are {', '.join(subjects)}")
    return subjects[name]


def put(where: str) -> None:
    """Call a function that puts an implementation into this process. ``where``: ``module:function``."""
    module, _, name = where.partition(":")
    getattr(importlib.import_module(module), name)()
