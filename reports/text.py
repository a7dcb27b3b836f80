"""Text from tests, ranks and profiles, made fit to be shown: nothing invisible, nothing endless."""

from __future__ import annotations

import datetime

from harness.safe_io.shown import printable

visible = printable
"""As this package calls it."""


def shortened(text: str, longest: int) -> str:
    """The end of a long text, with a line that says how much is missing before it."""
    if len(text) <= longest:
        return text
    return f"[{len(text) - longest:,} characters before this are in the results]\n{text[-longest:]}"


def moment(seconds: float) -> str:
    """A time as people write it, in UTC; empty for 0, and the number for what is no date."""
    if not seconds:
        return ""
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def duration(seconds: float) -> str:
    """A time as people say it: ``0.42 s``, ``12 s``, ``5 min 02 s``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02} s"


def plural(count: int, word: str) -> str:
    """``1 waiver``, ``2 waivers``."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")
