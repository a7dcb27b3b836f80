"""Formatting of untrusted text, times and counts: without invisible characters, and of limited length."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from harness.safe_io.shown import printable

visible = printable
"""Replace invisible characters of a text by escapes."""


def shortened(text: str, longest: int) -> str:
    """Return the end of a long text, after a line that says how much is missing before it."""
    if len(text) <= longest:
        return text
    return f"[{len(text) - longest:,} characters before this are in the results]\n{text[-longest:]}"


def moment(seconds: float) -> str:
    """Format a time in UTC, such as ``2026-11-21 14:05 UTC``.

    ``seconds``: seconds since the epoch.  The result is empty for 0, and the plain number if it is not a date.
    """
    if not seconds:
        return ""
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def duration(seconds: float) -> str:
    """Format a duration, as in ``0.42 s``, ``12 s`` or ``5 min 02 s``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02} s"


def plural(count: int, word: str) -> str:
    """Format a count with its noun, as in ``1 waiver`` or ``2 waivers``."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def listed(words: Iterable[str], *, more: int = 0) -> str:
    """Join words as in ``a``, ``a and b`` or ``a, b and c``; ``more``: how many others are not among them."""
    parts = [*words, *([f"{more:,} more"] if more > 0 else [])]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
