"""Engines: what starts agents on hosts, and ends them with the session.

Concord brings ``ray`` and ``slurm``.  Packages add others (entry point ``concord.launchers``): a class, or a function,
that is called with the text after ``--launcher NAME=`` and returns an :class:`Engine`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from harness import entry_points
from harness.cluster.credentials import Key
from harness.entry_points import LAUNCHERS, PluginError

_OWN = {"ray": "harness.cluster.with_ray:Ray", "slurm": "harness.cluster.with_slurm:Slurm"}


class EngineError(RuntimeError):
    """The error for agents that an engine can't start; it says what to do."""


class Engine(Protocol):
    """Starts an agent on each of its hosts."""

    def start(self, key: Key) -> Sequence[tuple[str, int]]:
        """Start the agents; returns host and port of each, once it listens.  Errors: :class:`EngineError`.

        ``key``: of the session, in a text (:mod:`harness.cluster.credentials`).  It must not get into a command line,
        nor into a file that others can read.
        """
        ...

    def stop(self) -> None:
        """End the agents, and whatever else was started.  Also called after a start that failed."""
        ...


def names() -> list[str]:
    """Return the names of all engines."""
    return sorted({*_OWN, *entry_points.points(LAUNCHERS)[0]})


def engine(name: str, argument: str) -> Engine:
    """Return an engine.

    ``argument``: what the user wrote after its name; empty for nothing.

    Errors: :class:`EngineError` if there is none of that name, or if it can't be used.
    """
    with _told():
        made: Engine = _made_by(name)(argument)
        return made


def started(starting: Engine, key: Key) -> Sequence[tuple[str, int]]:
    """Start an engine's agents.  Errors: :class:`EngineError`, whatever the engine raises."""
    with _told():
        return starting.start(key)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Make an :class:`EngineError` of whatever an engine raises."""
    try:
        yield
    except EngineError:
        raise
    except (Exception, SystemExit) as e:
        raise EngineError(str(e) if isinstance(e, PluginError) else entry_points.said(e)) from e


def _made_by(name: str) -> Any:
    """Return what makes an engine.  Errors: :class:`EngineError`, PluginError."""
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    there, broken = entry_points.points(LAUNCHERS)
    if name in there:
        return entry_points.load(there[name])
    if name == "torchrun":
        started = "torchrun --nproc-per-node=1 ... -m harness.commands.agent --key FILE -- pytest ..."
        raise EngineError(f"torchrun starts agents and pytest with them: {started}")
    wrong = next((str(each) for each in broken if each.point.name == name), "")
    raise EngineError(wrong or f"it is not local, agents=HOST:PORT,..., or one of the engines {', '.join(names())}")
