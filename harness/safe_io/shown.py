"""Text that came from elsewhere (a rank, a test, a file, a package), made fit to be shown to people."""

from __future__ import annotations

import re

_MAYBE = re.compile("[^\n\t -~]")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks without a shape, which Unicode counts as printable."""


class _Escapes(dict[int, str]):
    """What to write for each character, by its code; found out once for each."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if _is_seen(character) else ascii(character)[1:-1]
        return self[code]


_ESCAPES = _Escapes({ord("\n"): "\n", ord("\t"): "\t"})


def printable(text: str) -> str:
    """Write every character that is not seen as its escape: ``\\x1b``, ``\\u202e``.

    What stays as it is: what Unicode calls printable, spaces of any width, tab and newline.  What does not: control
    characters, so that nothing drives a terminal; what turns or hides text; halves of surrogate pairs, so that the
    result can be encoded in UTF-8; what XML forbids.  ``\\r\\n`` becomes a newline.
    """
    return text.replace("\r\n", "\n").translate(_ESCAPES) if _MAYBE.search(text) else text


def one_line(text: str) -> str:
    """As :func:`printable`, with line breaks and tabs as escapes, too: what is shown in a line stays in it."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _is_seen(character: str) -> bool:
    if character.isprintable():
        return character not in _BLANK
    # str.isprintable leaves out every space but one; lines and paragraphs are separated by what is no space.
    return character.isspace() and character > "\x9f" and character not in "\u2028\u2029"
