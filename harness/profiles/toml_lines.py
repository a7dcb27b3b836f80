"""Line numbers of keys and tables in a TOML file, which :mod:`tomllib` does not keep."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

Where = tuple[Any, ...]
"""A path into a document, with an index for a table of a list: ``("waiver", 0, "reason")``."""

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'|#[^\n]*|[\[\]{}=\n]",
    re.DOTALL,
)


def lines_of(text: str) -> dict[Where, int]:
    """Return the line of each key and table of a TOML text, which must be well-formed.

    The keys of the result are paths, with the index of a table after the name of its list: ``("waiver", 0, "reason")``.
    """
    lines: dict[Where, int] = {}
    counts: dict[Where, int] = {}
    prefix: Where = ()

    def resolved(names: Sequence[str]) -> Where:
        where: Where = ()
        for name in names:
            where = (*where, name)
            if where in counts:
                where = (*where, counts[where])
        return where

    for line, statement, is_key in _statements(text):
        if is_key:
            where = prefix
            for name in _names(statement + " = 0")[0]:
                where = (*where, name)
                lines.setdefault(where, line)
            continue
        names, is_list = _names(statement)
        where = resolved(names[:-1]) + (names[-1],)
        if is_list:
            counts[where] = counts.get(where, -1) + 1
            lines.setdefault(where, line)
            where = (*where, counts[where])
        prefix = where
        lines.setdefault(where, line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the headers and keys of a TOML text: line, text, and whether it is a key."""
    start, line, depth, equals = 0, 1, 0, -1
    for token in _TOKEN.finditer(text + "\n"):
        kind = token[0]
        if kind in ("[", "{"):
            depth += 1
        elif kind in ("]", "}"):
            depth -= 1
        elif kind == "=" and depth == 0 and equals < 0:
            equals = token.start()
        elif kind == "\n" and depth == 0:
            statement = text[start : token.start()]
            if equals >= 0:
                yield line, text[start:equals].strip(), True
            elif statement.strip() and not statement.lstrip().startswith("#"):
                yield line, statement.strip(), False
            line += statement.count("\n") + 1
            start, equals = token.end(), -1


def _names(statement: str) -> tuple[list[str], bool]:
    """Return the names in a header or assignment, and whether the header begins a table of a list."""
    names: list[str] = []
    value: Any = tomllib.loads(statement)
    while isinstance(value, dict) and value:
        ((name, value),) = value.items()
        names.append(name)
    return names, isinstance(value, list)
