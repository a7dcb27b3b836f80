"""Subjects: whose implementation of the stacks the suites run on.

- ``torch``: what PyTorch ships, the default;
- ``reference``: ours (:mod:`harness.reference`);
- those of installed packages: entry points of the group ``concord.subjects``, one for each stack that the subject
  implements, called ``subject.stack``, which name a function.

The function is called without arguments in every rank, before anything else, and puts the implementation into the place
of PyTorch's.  The process that pytest runs in never sees it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from harness.entry_points import SUBJECTS, Broken, points

TORCH = "torch"
STACKS = ("collectives", "replicate", "replicate_fsdp", "tp_extension", "dynamo")


class SubjectError(ValueError):
    """A subject that there is not, or whose package has registered it wrongly."""


@dataclass(frozen=True)
class Subject:
    """An implementation of some stacks."""

    name: str
    puts: dict[str, str] = field(default_factory=dict)
    """By stack: the function that puts the implementation into a process, as ``module:function``."""

    @property
    def first(self) -> tuple[tuple[str, str], ...]:
        """What ranks call before anything else (:attr:`harness.worlds.world.WorldSpec.first`)."""
        return tuple(("harness.subjects:put", where) for where in self.puts.values())

    def lacks(self, stack: str) -> str:
        """Why tests of a stack can't be run on it; empty if they can."""
        if self.name == TORCH or not stack or stack in self.puts:
            return ""
        return f"subject {self.name} has no {stack}; it implements {', '.join(self.puts)}"


def known() -> tuple[dict[str, Subject], list[Broken]]:
    """Every subject, by name; and entry points that are none of a subject."""
    ours = {stack: f"harness.reference:put_{stack}" for stack in ("replicate", "replicate_fsdp", "tp_extension")}
    found = {TORCH: Subject(TORCH), "reference": Subject("reference", ours)}
    there, broken = points(SUBJECTS)
    for point in there.values():
        name, _, stack = point.name.partition(".")
        if name in (TORCH, "reference"):
            broken.append(Broken(point, f"{name} is Concord's own; take another name"))
        elif not name or stack not in STACKS:
            broken.append(Broken(point, f"call it {name or 'subject'}.STACK, with a stack of {', '.join(STACKS)}"))
        else:
            found.setdefault(name, Subject(name)).puts[stack] = point.value
    return found, broken


def find(name: str) -> Subject:
    """The subject of a name.  Errors: :class:`SubjectError`, which lists those that there are, and those that are
    broken and may be meant."""
    there, broken = known()
    if name not in there:
        meant = [str(each) for each in broken if each.point.name.partition(".")[0] == name]
        raise SubjectError("; ".join(meant) or f"no such subject; there are {', '.join(there)}")
    return there[name]


def put(where: str) -> None:
    """Call a function that puts an implementation into this process; ``where``: ``module:function``."""
    module, _, name = where.partition(":")
    getattr(importlib.import_module(module), name)()
