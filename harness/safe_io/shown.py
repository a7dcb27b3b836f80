"""Safe display of text that comes from elsewhere: a rank, a test, a file, a package."""

from __future__ import annotations

import re

_MAYBE = re.compile("[^\n\t -~]")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Invisible letters and marks that Unicode counts as printable."""


class _Escapes(dict[int, str]):
    """A cache of the text to write for each character, by its code."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if _is_seen(character) else ascii(character)[1:-1]
        return self[code]


_ESCAPES = _Escapes({ord("\n"): "\n", ord("\t"): "\t"})


def printable(text: str) -> str:
    """Replace every invisible character with its escape: ``\\x1b``, ``\\u202e``.

    Characters that Unicode calls printable, spaces of any width, tab and newline are kept.  Control characters are
    replaced, so that nothing drives a terminal.  So are characters that turn or hide text, halves of surrogate pairs
    (so that the result can be encoded in UTF-8), and characters that XML forbids.  ``\\r\\n`` becomes a newline.
    """
    return text.replace("\r\n", "\n").translate(_ESCAPES) if _MAYBE.search(text) else text


def one_line(text: str) -> str:
    """Apply :func:`printable`, and also escape newlines and tabs, so that the text stays on one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_seen(character: str) -> bool:
    if character.isprintable():
        return character not in _BLANK
    # str.isprintable is false for every space but one; separators of lines and paragraphs are not kept.
    return character.isspace() and character > "\x9f" and character not in "\u2028\u2029"
