"""Which stacks there are: a file of this folder each, and those that packages bring along.

A package names its stack by an entry point of the group ``concord.stacks``: ``NAME = module:attribute``, a
:class:`~harness.stacks.stack.Stack` of that name.  It is imported when a program on that stack is drawn, read or run.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from harness import entry_points
from harness.entry_points import Broken, PluginError, Point
from harness.specs.program import Layout, Option
from harness.stacks.stack import Stack

UNDER_COMPILED = "replicate"
"""The stack that is compiled where a layout names none."""


def stack(name: str) -> Stack:
    """The stack of a name.

    Errors: ValueError, which lists those that there are; :class:`~harness.entry_points.PluginError`, also a ValueError,
    where a package's can't be had.
    """
    found = _own(name) if name in _files() else None
    if found is not None:
        return found
    if (point := entry_points.points(entry_points.STACKS)[0].get(name)) is not None:
        return _brought(point)
    raise ValueError(f"there is no stack {name!r}; there are {', '.join(names())}")


def own_names() -> tuple[str, ...]:
    """The names of Concord's own stacks, those that are put over another last."""
    found = [each for name in _files() if (each := _own(name)) is not None]
    return tuple(each.name for each in sorted(found, key=lambda each: each.over is not None))


def names() -> tuple[str, ...]:
    """The names of all stacks."""
    return (*own_names(), *(n for n in entry_points.points(entry_points.STACKS)[0] if n not in own_names()))


def compilable() -> tuple[str, ...]:
    """The names of Concord's own stacks that are compiled by ``dynamo``."""
    return tuple(name for name in own_names() if stack(name).compilable)


def parted(layout: Layout) -> tuple[Stack, Stack | None, Mapping[str, Option]]:
    """The stack that puts a layout's model on ranks; the stack that is put over it, if any; and the first's options.

    Errors: ValueError where there is no such stack.
    """
    outer, options = stack(layout.stack), dict(layout.options)
    if outer.over is None:
        return outer, None, options
    inner = str(options.pop("inner", UNDER_COMPILED))
    try:
        under = stack(inner)
    except ValueError as e:
        raise ValueError(f"there is no stack {inner!r} to compile") from e
    if not under.compilable:
        raise ValueError(f"there is no stack {inner!r} to compile")
    return under, outer, options


def stack_of(layout: Layout) -> Stack:
    """The stack that puts a layout's model on ranks: of a compiled one, the stack that is compiled."""
    return parted(layout)[0]


def broken() -> list[Broken]:
    """Entry points that name no stack, or one of Concord's own; no package is imported."""
    there, found = entry_points.points(entry_points.STACKS)
    ours = own_names()
    return [
        *found,
        *(Broken(point, "Concord has a stack of that name") for point in there.values() if point.name in ours),
    ]


@functools.cache
def _files() -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def _own(name: str) -> Stack | None:
    found = getattr(importlib.import_module(f"{__package__}.{name}"), "STACK", None)
    return found if isinstance(found, Stack) else None


@functools.cache
def _brought(point: Point) -> Stack:
    found = entry_points.load(point)
    if not isinstance(found, Stack):
        raise PluginError(f"{point}: {point.value} is not a harness.stacks.stack.Stack")
    if found.name != point.name:
        raise PluginError(f"{point}: the stack is called {found.name!r}")
    return found
