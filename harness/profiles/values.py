"""The values of keys in profiles: how they are checked and converted.

Errors: ValueError that says what the value should be; :class:`BadItem` for one entry of a table.
"""

from __future__ import annotations

import datetime
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.profiles.model import UNREPORTED
from harness.redaction import has_credentials
from harness.results import ENDED_BADLY

MOST_SECONDS = 86_400
MOST_RANKS = 100_000
MOST_BYTES = 1 << 40
MOST_FACTOR = 1_000
MOST_BANDWIDTH = 1_000_000


class BadItem(ValueError):
    """A mistake in one entry of a table."""

    def __init__(self, item: str, what: str) -> None:
        super().__init__(what)
        self.item = item


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word that was probably meant; empty if none is similar."""
    by_folded = {name.lower(): name for name in reversed(list(known))}
    matches = difflib.get_close_matches(word.lower(), by_folded, 1) if isinstance(word, str) else []
    return by_folded[matches[0]] if matches else ""


def shown(value: Any) -> str:
    """Format a value for a message, shortened."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):
        return "what is there"


def shown_key(name: str) -> str:
    """Format a key for a message, in quotes if it is not a plain word."""
    return name if re.fullmatch(r"[\w-]{1,60}", name) else shown(name)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a text in quotes, not {shown(value)}")
    if not value.strip():
        raise ValueError("is empty")
    for character in value:
        if not character.isprintable():
            raise ValueError(f"a text on one line, without {character!r}")
    return value


def word(value: Any) -> str:
    if " " in text(value):
        raise ValueError(f"a name without spaces, not {shown(value)}")
    return text(value)


def whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANKS:
        raise ValueError(f"a whole number from 1, not {shown(value)}")
    return value


def size_in_bytes(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= MOST_BYTES:
        raise ValueError(f"a whole number of bytes from 8, at most {MOST_BYTES}, not {shown(value)}")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"true or false, without quotes, not {shown(value)}")
    return value


def number_of(unit: str, most: int) -> Callable[[Any], float]:
    def converted(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            raise ValueError(f"a number of {unit} above 0, at most {most}, not {shown(value)}")
        return float(value)

    return converted


def factor(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= MOST_FACTOR:
        raise ValueError(f"a number from 1 to {MOST_FACTOR}, not {shown(value)}")
    return float(value)


def list_of(convert: Callable[[Any], Any], *, empty: bool = False) -> Callable[[Any], tuple[Any, ...]]:
    def converted(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"a list in brackets, not {shown(value)}")
        if not value and not empty:
            raise ValueError("is empty")
        items = tuple(convert(item) for item in value)
        seen = set()
        for item in items:
            if item in seen:
                raise ValueError(f"{shown(item)} is there twice")
            seen.add(item)
        return items

    return converted


def one_of(known: Sequence[str], what: str) -> Callable[[Any], str]:
    def converted(value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        near = nearest(value, known)
        hint = f"did you mean {near}?" if near else f"write some of {', '.join(known)}"
        raise ValueError(f"{shown(value)} is not {what}; {hint}")

    return converted


def environment(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"a table of names and values, begun with [env], not {shown(value)}")
    for name, content in value.items():
        if not name or "=" in name or not name.isprintable():
            raise BadItem(name, "not the name of an environment variable")
        if not isinstance(content, str) or "\0" in content:
            raise BadItem(name, f"a text in quotes, not {shown(content)}")
        if has_credentials(name, content):
            raise BadItem(name, "a credential, and profiles are published: set it where pytest runs, ranks inherit it")
    return tuple(sorted(value.items()))


def variable(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", text(value)):
        raise ValueError(f"the name of an environment variable, not {shown(value)}")
    return text(value)


def name(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,79}", text(value), re.ASCII):
        raise ValueError(f"a name of letters, digits, '_', '-' and '.', not {shown(value)}")
    return text(value)


def defect(value: Any) -> str:
    if not re.fullmatch(r"[^/ ]+(/[^/ ]+)?", text(value)):
        raise ValueError(f'an owner, or a single defect as "owner/id", not {shown(value)}')
    return text(value)


def some_or_others(value: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = list_of(word)(value)
    left_out = [name for name in names if name.startswith("!")]
    if "!" in names:
        raise ValueError("a name after every !")
    if left_out and len(left_out) < len(names):
        raise ValueError("either names, or names after a !, which are left out; not both")
    return names


def module(value: Any) -> str:
    if not all(part.isidentifier() for part in text(value).split(".")):
        raise ValueError(f"the name of a module, not {shown(value)}")
    return text(value)


def link(value: Any) -> str:
    if text(value) != UNREPORTED and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError(f'a URL, or "{UNREPORTED}", not {shown(value)}')
    if re.match(r"https?://[^/?#]*@", value):
        raise ValueError("it has a credential in it, and profiles are published")
    return text(value)


def date(value: Any) -> datetime.date:
    if type(value) is not datetime.date:
        raise ValueError(f"a date without quotes and without a time, as in 2027-06-30, not {shown(value)}")
    return value


def now_and_then(value: Any) -> tuple[str, ...]:
    verdicts: tuple[str, ...] = list_of(one_of(("passed", *ENDED_BADLY), "a verdict that it can cover"))(value)
    if "passed" not in verdicts:
        raise ValueError("without passed: a test that never passes has a [[waiver]]")
    if len(verdicts) == 1:
        raise ValueError(f"passed alone: name what it comes to now and then ({', '.join(ENDED_BADLY)})")
    return verdicts


def versions(value: Any) -> str:
    try:
        SpecifierSet(text(value))
    except InvalidSpecifier:
        raise ValueError(f'a condition on versions, as in ">=2.11,<2.14", not {shown(value)}') from None
    return text(value)


def globs(value: Any) -> tuple[str, ...]:
    return list_of(text)([value] if isinstance(value, str) else value)
