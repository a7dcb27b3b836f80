"""What a run is asked to measure: on which numbers of ranks, and what besides the usual.  Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Collection

RANKS = (2, 4)
"""Numbers of ranks if nobody asks for others."""
DTYPES_MORE, MODELS, OVERLAP, GROUPS, LEVELS = MORE = ("dtypes", "models", "overlap", "groups", "levels")
"""What is measured only if it is asked for: every dtype at more sizes and with every collective, the messages of real
models, steps with more compute to hide communication behind, groups of neighbors, HSDP's reductions at more sizes."""


def asked_of(words: str) -> tuple[str, ...]:
    """Return which of :data:`MORE` a list with commas names; ``all`` is all.  Errors: ValueError."""
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if "all" in names:
        return MORE
    unknown = [name for name in names if name not in MORE]
    if unknown or not names:
        raise ValueError(f"{', '.join(unknown) or 'nothing'} is none of {', '.join(MORE)}, all")
    return names


def ranks_asked(words: str) -> tuple[int, ...]:
    """Return the numbers of ranks that a list with commas names, ascending.  Errors: ValueError."""
    try:
        found = sorted({int(word) for word in words.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise ValueError(f"{words!r}: numbers of ranks from 1 with commas between them, as in 2,4,8, or all")
    return tuple(found)


def at_least(least: int, asked: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of ranks that were asked for, or are usual, from ``least`` on."""
    return tuple(sorted(ranks for ranks in asked if ranks >= least))
