"""Literals and calls in a program's source: values and names get into it only through this module."""

from __future__ import annotations

import keyword
import math
import re
from typing import Any

_WORD = re.compile(r"[A-Za-z0-9_.]{0,100}", re.ASCII)
_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_DEEPEST = 4


class Code(str):
    """Python code that this module wrote. Any other string is a value."""

    __slots__ = ()


def literal(value: object) -> Code:
    """Return the Python literal of a plain value.

    Plain values are None, booleans, integers below 2**64, finite floats, strings of letters, digits, ``_`` and ``.``,
    and tuples, lists and dicts of those. Subclasses of these types are not plain, because they define their own repr.
    Errors: ValueError for anything else.
    """
    _require_plain(value, _DEEPEST)
    return Code(repr(value))


def name(text: str) -> Code:
    """Return a name, such as an argument's, as code. Errors: ValueError for a string that is not an allowed name."""
    if type(text) not in (str, Code) or not _NAME.fullmatch(text) or keyword.iskeyword(text):
        raise ValueError(f"no name: {str(text)[:100]!r}")
    return Code(text)


def call(function: str, /, *arguments: object, **keywords: object) -> Code:
    """Return a function call as code. Arguments that are not :class:`Code` are written by :func:`literal`.

    ``function``: a name, or names joined by dots.
    Errors: ValueError for a name or a value that can't be written.
    """
    path = ".".join(map(name, function.split(".")))
    words: list[str] = [written(value) for value in arguments]
    words += [f"{name(key)}={written(value)}" for key, value in keywords.items()]
    return Code(f"{path}({', '.join(words)})")


def written(value: object) -> Code:
    """Return code unchanged, and anything else as a :func:`literal`."""
    return value if type(value) is Code else literal(value)


def _require_plain(value: Any, depth: int) -> None:
    kind = type(value)
    if kind in (tuple, list, dict) and depth:
        for part in [*value, *value.values()] if kind is dict else value:
            _require_plain(part, depth - 1)
        return
    plain = (
        value is None
        or kind is bool
        or (kind is int and abs(value) < 1 << 64)
        or (kind is float and math.isfinite(value))
        or (kind is str and _WORD.fullmatch(value))
    )
    if not plain:
        shown = f": {value[:100]!r}" if kind is str else ""
        raise ValueError(f"a value of type {kind.__name__} that can't be written into a program's source{shown}")
