"""Programs as JSON: stored beside a reproducer, and read again by anyone who has the file."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from harness.programs.validity import check
from harness.safe_io.shown import printable
from harness.specs import limits
from harness.specs.program import Data, Program

VERSION = 1
"""The version of the format, which is part of the JSON."""
_LONGEST = 500  # characters of an error's text


class _File(Data, frozen=True):
    program: Program
    version: int


def dumps(program: Program) -> str:
    """Return a program as JSON, with the version of the format."""
    return msgspec.json.format(msgspec.json.encode(_File(program, VERSION)), indent=1).decode()


def loads(text: str | bytes) -> Program:
    """Read a program from untrusted JSON.

    Every name must be known, and every value must have its type and be within :mod:`harness.specs.limits`.
    Errors: ValueError with one printable line that says what is wrong and where.
    """
    try:
        return _loaded(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(_line(str(e))) from e


def _loaded(text: str | bytes) -> Program:
    if len(text) > limits.FILE:
        raise ValueError(f"this is no program: more than {limits.FILE:,} bytes")
    try:
        file = msgspec.json.decode(text, type=_File)
        json.loads(text, object_pairs_hook=_require_unique)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"this is no program: {e}") from e
    if file.version != VERSION:
        raise ValueError(f"a program of version {file.version}; this Concord reads version {VERSION}")
    check(file.program)
    return file.program


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    """Reject duplicate keys, because readers differ in which of the two values counts."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the key {name!r} is there twice")
        seen.add(name)


def _line(text: str) -> str:
    """Return text as one line of about ``_LONGEST`` characters at most, without any that would control a terminal."""
    shown = printable(text).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST // 2]} … {shown[-_LONGEST // 2 :]}"
