"""The reproducers that an exception carries: attached where they are written, read where failures are reported."""

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
    """Runs it."""
    replay: str = ""
    """Runs the program beside it again with Concord."""


def attach(error: BaseException, written: Written) -> None:
    """Let an exception carry a reproducer, after those that it carries already."""
    setattr(error, _ATTRIBUTE, (*_own(error), written))


def carried(error: BaseException) -> Iterator[Written]:
    """The reproducers that an exception carries; of a group, also those of the exceptions in it."""
    yield from _own(error)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from carried(inner)


def _own(error: BaseException) -> tuple[Written, ...]:
    own = getattr(error, _ATTRIBUTE, ())
    return tuple(written for written in own if isinstance(written, Written)) if isinstance(own, tuple) else ()


__all__ = ["Written", "attach", "carried"]
