"""Text that came from elsewhere (a rank, a test, a file, a package), made fit to be shown to people."""

from __future__ import annotations

import re

_MAYBE = re.compile("[^\n\t -~]+")
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Letters and marks without a shape, which Unicode counts as printable."""


def printable(text: str) -> str:
    """Write every character that is not seen as its escape: ``\\x1b``, ``\\u202e``.

    What stays as it is: what Unicode calls printable, spaces of any width, tab and newline.  What does not: control
    characters, so that nothing drives a terminal; what turns or hides text; halves of surrogate pairs, so that the
    result can be encoded in UTF-8; what XML forbids.  ``\\r\\n`` becomes a newline.
    """
    return _MAYBE.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    return "".join(c if _is_seen(c) else ascii(c)[1:-1] for c in found[0])


def _is_seen(character: str) -> bool:
    if character.isprintable():
        return character not in _BLANK
    # str.isprintable leaves out every space but one; lines and paragraphs are separated by what is no space.
    return character.isspace() and character > "\x9f" and character not in "\u2028\u2029"
