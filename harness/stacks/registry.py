"""The registry of stacks: a file of this folder for each, and those of installed packages.

A package registers a stack with an entry point of the group ``concord.stacks``: ``NAME = module:attribute``, which is a
:class:`~harness.stacks.stack.Stack` of that name. It is imported when a program on that stack is drawn, read or run.
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
"""The stack that is compiled if a layout names none."""


def stack(name: str) -> Stack:
    """Return a stack by its name.

    Errors: ValueError, which lists the known stacks; :class:`~harness.entry_points.PluginError`, also a ValueError, if
    a package's stack can't be loaded.
    """
    own = _own(name) if name in _files() else None
    if own is not None:
        return own
    if (point := entry_points.points(entry_points.STACKS)[0].get(name)) is not None:
        return _brought(point)
    raise ValueError(f"there is no stack {name!r}; there are {', '.join(names())}")


def own_names() -> tuple[str, ...]:
    """Return the names of Concord's own stacks. Those that are put over another come last."""
    stacks = [each for name in _files() if (each := _own(name)) is not None]
    return tuple(each.name for each in sorted(stacks, key=lambda each: each.over is not None))


def names() -> tuple[str, ...]:
    """Return the names of all stacks."""
    return (*own_names(), *(n for n in entry_points.points(entry_points.STACKS)[0] if n not in own_names()))


def compilable() -> tuple[str, ...]:
    """Return the names of those of Concord's own stacks that ``dynamo`` compiles."""
    return tuple(name for name in own_names() if stack(name).compilable)


def parted(layout: Layout) -> tuple[Stack, Stack | None, Mapping[str, Option]]:
    """Return the stack that puts a layout's model on ranks, the stack over it, if any, and the first's options.

    Errors: ValueError if there is no such stack.
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
    """Return the stack that puts a layout's model on ranks.

    For a compiled layout, this is the stack under ``dynamo``.
    """
    return parted(layout)[0]


def broken() -> list[Broken]:
    """Return entry points that name no stack, or one of Concord's own, without importing any package."""
    there, invalid = entry_points.points(entry_points.STACKS)
    ours = own_names()
    return [
        *invalid,
        *(Broken(point, "Concord has a stack of that name") for point in there.values() if point.name in ours),
    ]


@functools.cache
def _files() -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def _own(name: str) -> Stack | None:
    attribute = getattr(importlib.import_module(f"{__package__}.{name}"), "STACK", None)
    return attribute if isinstance(attribute, Stack) else None


@functools.cache
def _brought(point: Point) -> Stack:
    loaded = entry_points.load(point)
    if not isinstance(loaded, Stack):
        raise PluginError(f"{point}: {point.value} is not a harness.stacks.stack.Stack")
    if loaded.name != point.name:
        raise PluginError(f"{point}: the stack is called {loaded.name!r}")
    return loaded
