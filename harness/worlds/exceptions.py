"""Short descriptions of exceptions of any size: of long chains, groups and tracebacks, only a part is shown.

pytest shows an exception better, but its time and memory grow with the exception: thousands of causes take minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from harness.worlds.places import source_line

Item = TypeVar("Item")

MOST_MESSAGE = 2000
_SHORT_FRAMES = 500  # in all tracebacks together
_SHORT_ERRORS = 40  # causes, contexts and members of groups, recursively
_SHORT_NOTES = 50
_SHORT_MESSAGE = 2_000_000  # characters, of one message or note
_MOST_LINKS = 100_000  # of a chain that is followed
_SHOWN_FRAMES = 40
_SHOWN_LINKS = 8
_SHOWN_MEMBERS = 5
_SHOWN_NOTES = 5


def text_of(error: BaseException) -> str:
    """Return the beginning of an exception's message, or why it could not be read.

    Errors: MemoryError.
    """
    try:
        return str(error)[:MOST_MESSAGE]
    except MemoryError:
        raise
    except BaseException as e:
        return f"(its message could not be read: {type(e).__name__})"


def frames_of(tb: TracebackType | None) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of each frame of a traceback, outermost first."""
    frames = []
    while tb is not None:
        code = tb.tb_frame.f_code
        frames.append((code.co_filename, tb.tb_lineno or 0, code.co_name))
        tb = tb.tb_next
    return frames


def both_ends(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most ``most`` items: all, or a third from the beginning and two thirds from the end."""
    first = most // 3
    return list(items) if len(items) <= most else [*items[:first], *items[first - most :]]


def is_short(error: BaseException) -> bool:
    """Return whether an exception, with everything that belongs to it, is small enough for pytest to show."""
    seen: set[int] = set()
    left, frames = [error], 0
    while left:
        current = left.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        frames += len(list(itertools.islice(_links_of(current.__traceback__), _SHORT_FRAMES)))
        notes = _notes(current)
        if len(seen) > _SHORT_ERRORS or frames >= _SHORT_FRAMES or len(notes) > _SHORT_NOTES:
            return False
        if sum(map(len, notes)) > _SHORT_MESSAGE or _length(current) > _SHORT_MESSAGE:
            return False
        left += [other for other in (current.__cause__, current.__context__) if other is not None]
        left += _members(current)[: _SHORT_ERRORS + 1]
    return True


def _links_of(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _length(error: BaseException) -> int:
    try:
        return len(str(error))
    except MemoryError:
        raise
    except BaseException:
        return 0


def _members(error: BaseException) -> Sequence[BaseException]:
    return error.exceptions if isinstance(error, BaseExceptionGroup) else ()


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def shortly(error: BaseException, tb: TracebackType | None, *, messages: bool = True) -> str:
    """Describe an exception, its causes and its members; where there are many, only some are shown.

    ``tb``: its traceback, from the first frame to show; ``messages``: whether its own code may be called for messages.
    The root cause comes first, as in Python's own tracebacks.
    """
    chain, whole = _chain(error)
    blocks = []
    for position, each in enumerate(chain):
        if each is None:
            blocks.append(f"[{whole - len(chain) + 1:,} exceptions between these are left out]")
            continue
        block = [*_frame_lines(each.__traceback__ if position else tb), *_error_lines(each, messages)]
        blocks.append("\n".join(block))
    return "\n\nThe above exception was the cause of the following exception:\n".join(reversed(blocks))


def _chain(error: BaseException) -> tuple[list[BaseException | None], int]:
    """Return an exception and its causes, with None in place of those left out, and how many there are."""
    chain: list[BaseException] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(chain) < _MOST_LINKS:
        seen.add(id(current))
        chain.append(current)
        suppressed = current.__suppress_context__ and current.__cause__ is None
        current = current.__cause__ or (None if suppressed else current.__context__)
    if len(chain) <= _SHOWN_LINKS:
        return list(chain), len(chain)
    return [*chain[: _SHOWN_LINKS // 2], None, *chain[-(_SHOWN_LINKS // 2) :]], len(chain)


def _frame_lines(tb: TracebackType | None) -> Iterator[str]:
    frames = frames_of(tb)
    shown = both_ends(frames, _SHOWN_FRAMES)
    for i, (file, line, function) in enumerate(shown):
        if i == _SHOWN_FRAMES // 3 and len(shown) < len(frames):
            yield f"[{len(frames) - len(shown):,} frames are left out]"
        yield f"{file}:{line}: in {function}"
        source = source_line(file, line)
        if source:
            yield f"    {source}"


def _error_lines(error: BaseException, messages: bool, depth: int = 0) -> Iterator[str]:
    margin = "E   " + "  " * depth
    message = text_of(error) if messages else ""
    for line in f"{type(error).__name__}: {message}".rstrip(": ").split("\n"):
        yield f"{margin}{line}"
    notes = _notes(error) if messages else []
    yield from (f"{margin}{note[:MOST_MESSAGE]}" for note in notes[:_SHOWN_NOTES])
    if len(notes) > _SHOWN_NOTES:
        yield f"{margin}[{len(notes) - _SHOWN_NOTES:,} more notes]"
    members = _members(error)
    for member in members[:_SHOWN_MEMBERS] if depth < 2 else ():
        yield from _error_lines(member, messages, depth + 1)
    if len(members) > _SHOWN_MEMBERS or (members and depth == 2):
        yield f"{margin}  [{len(members):,} members{'' if depth == 2 else ', of which some are left out'}]"
