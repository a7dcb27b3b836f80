"""Reproducers attached to exceptions: added where they are written, and read where failures are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ATTRIBUTE = "concord_reproducers"


@dataclass(frozen=True)
class Written:
    """A reproducer on disk."""

    file: Path
    """A Python file that needs only torch."""
    command: str
    """The command that runs it."""
    replay: str = ""
    """The command that runs the program beside it again with Concord."""


def attach(error: BaseException, written: Written) -> None:
    """Attach a reproducer to an exception, after those that it already carries."""
    setattr(error, _ATTRIBUTE, (*_own(error), written))


def carried(error: BaseException) -> Iterator[Written]:
    """Yield the reproducers that an exception carries, and those of all exceptions in a group."""
    yield from _own(error)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from carried(inner)


def _own(error: BaseException) -> tuple[Written, ...]:
    own = getattr(error, _ATTRIBUTE, ())
    return tuple(written for written in own if isinstance(written, Written)) if isinstance(own, tuple) else ()


__all__ = ["Written", "attach", "carried"]
