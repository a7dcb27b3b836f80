"""Programs as JSON: what is stored beside a reproducer, and read again by whoever has got the file."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from harness.programs.validity import check
from harness.safe_io.shown import printable
from harness.specs import limits
from harness.specs.program import Data, Program

VERSION = 1
"""Of the format; goes into the JSON."""
_LONGEST = 500  # characters of an error's text


class _File(Data, frozen=True):
    program: Program
    version: int


def dumps(program: Program) -> str:
    """A program as JSON, with the version of the format."""
    return msgspec.json.format(msgspec.json.encode(_File(program, VERSION)), indent=1).decode()


def loads(text: str | bytes) -> Program:
    """A program from JSON, of which nothing is believed.

    Every name is one of those that there are, every value of its type and within :mod:`harness.specs.limits`.
    Errors: ValueError in one line that says what is wrong where, fit to be shown.
    """
    try:
        return _loaded(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(_line(str(e))) from e


def _loaded(text: str | bytes) -> Program:
    if len(text) > limits.FILE:
        raise ValueError(f"this is no program: more than {limits.FILE:,} bytes")
    try:
        found = msgspec.json.decode(text, type=_File)
        json.loads(text, object_pairs_hook=_require_unique)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"this is no program: {e}") from e
    if found.version != VERSION:
        raise ValueError(f"a program of version {found.version}; this Concord reads version {VERSION}")
    check(found.program)
    return found.program


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    """Readers differ in which of two values of one name counts."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the key {name!r} is there twice")
        seen.add(name)


def _line(text: str) -> str:
    """One line of at most so many characters, none of which drives a terminal."""
    shown = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST // 2]} … {shown[-_LONGEST // 2 :]}"
