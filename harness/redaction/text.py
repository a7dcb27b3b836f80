"""Texts without credentials: those of this process's environment, of URLs, and those that are assigned to a name."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from harness.redaction.shapes import HIDDEN, is_path, looks_random, says_secret
from harness.redaction.urls import urls_in, without_credentials
from harness.redaction.variables import is_plain

_LEAST = 6
"""Characters of a credential that is looked for in texts: shorter ones are parts of everything."""
_OF_THE_TEST = "PYTEST_CURRENT_TEST"
"""Environment variable: the name of the test that runs, which pytest changes all the time."""
_ANYWHERE = 12
"""Characters from which on it is looked for within words, too."""
_PIECES = re.compile(r"[^\s\"',;()<>\[\]{}|&]+")
_ASSIGNED_PIECE = re.compile(
    r"(?<![\w.-])([A-Za-z_][\w.-]{0,60})[\"']?\s{0,3}[=:]\s{0,3}[\"']?(?=(\S{1,400}))([^\s;,\"'}]+)"
)
"""In the value of a variable, up to a blank, and up to what may be a separator."""
_ASSIGNED = re.compile(
    r"(\b(?:[\w-]{0,40}[_-])?(?:passw(?:or)?d|passphrase|pwd|secret(?:[_-]?key)?|api[_-]?key|private[_-]?key"
    r"|access[_-]?key(?:[_-]?id)?|(?:access|api|auth|bearer|id|refresh)[_-]?token|credentials?)"
    r"(?:[\"']\]?)?\s{0,3}[=:]\s{0,3})([\"']?)((?!\*\*\*|None\b|str\b|bytes\b|/)[^\s\"'&;,)\]}]+)"
    r"|(\bauthorization[\"']?\s{0,3}[=:]\s{0,3}[\"']?(?:basic|bearer|token)\s{1,3})([^\s\"',;]+)",
    re.IGNORECASE,
)
"""``password=...``, ``"api_key": "..."``, ``Authorization: Bearer ...``."""
_BOUND = frozenset(("digest", "environment", "files", "plugins", "profile_hash", "suite_hash"))
"""Fields of records that have no text of anybody's: hashes, versions, and variables that were checked one by one."""


class Redactor:
    """Takes credentials out of texts.

    Credentials are in variables of the environment that are not known to be harmless
    (:func:`~harness.redaction.variables.is_plain`): the whole value, from 6 characters on, where the variable's name
    says so; otherwise what looks like a token in it, and what a URL in it hides.  Each is found as it is,
    percent-encoded, and as JSON and ``repr`` write it; words of letters alone only where nothing joins them to others.
    """

    def __init__(self, variables: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        """``variables``: an environment, name to value; ``arguments``: a command line, whose credentials count too."""
        found = {
            secret for name, value in variables.items() if not is_plain(name, value) for secret in _of(name, value)
        }
        for option, value in _valued(arguments):
            found.update([value] if says_secret(option) else [])
            found.update(secret for url in urls_in(value) for secret in url.secrets)
        spellings = {each for secret in found for each in _spellings(secret) if len(each) >= _LEAST}
        self._spellings = sorted(spellings, key=lambda each: (-len(each), each))
        self._patterns = {each: re.compile(_pattern(each)) for each in self._spellings}

    def __call__(self, text: str) -> str:
        """The text, with ``***`` for every credential."""
        for each in self._spellings:
            if each in text:
                text = self._patterns[each].sub(HIDDEN, text)
        text = without_credentials(text)
        if "=" in text or ":" in text:
            text = _ASSIGNED.sub(_assigned, text)
        return text

    def record(self, value: Any) -> Any:
        """Plain data (as ``msgspec.to_builtins`` gives it) with every text redacted, but hashes and versions."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, list):
            return [self.record(each) for each in value]
        if isinstance(value, dict):
            return {self.record(k): v if k in _BOUND else self.record(v) for k, v in value.items()}
        return value

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """A command line: texts, and the values of options whose names say that they are credentials."""
        found = list(map(str, arguments))
        for i, (option, value) in enumerate(_valued(found)):
            if value and says_secret(option):
                found[i] = found[i][: len(found[i]) - len(value)] + HIDDEN
        return [self(argument) for argument in found]


def has_credentials(name: str, value: str) -> bool:
    """Whether a variable with this name and value has something that must not leave the machine."""
    return not is_plain(name, value) and any(_of(name, value))


def _of(name: str, value: str) -> Iterable[str]:
    """The credentials in the value of a variable."""
    stripped = value.strip()
    if all(map(os.path.lexists, stripped.split(os.pathsep))):
        return
    if says_secret(name):
        yield stripped
        yield from stripped.split("\n")
    for url in urls_in(value):
        yield from url.secrets
        if looks_random(url.whole):
            yield url.whole
    for key, words, word in _ASSIGNED_PIECE.findall(value):
        if says_secret(key):
            yield from (words, word)
    for piece in _PIECES.findall(value):
        if "://" not in piece and looks_random(piece) and not is_path(piece):
            yield piece
            yield piece.partition("=")[2]


def _valued(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Of each argument, the name that it is given under (``--name=value``, ``--name value``), and the value."""
    before = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name):
            yield name, value
        elif argument.startswith("-"):
            yield "", ""
        else:
            yield before, argument
        before = name if argument.startswith("-") and not equals else ""


def _spellings(secret: str) -> Iterable[str]:
    yield from (secret, quote(secret, safe=""), quote_plus(secret), quote(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])


def _pattern(secret: str) -> str:
    """Where a credential counts: a short one not within a word, one of letters alone not within a path or a name."""
    if secret.isalpha():
        return rf"(?<![\w./-]){re.escape(secret)}(?![\w/-])"
    if len(secret) < _ANYWHERE:
        return rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])"
    return re.escape(secret)


def _assigned(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if found[1] is not None else f"{found[4]}{HIDDEN}"


@functools.lru_cache(maxsize=4)
def _redactor(variables: tuple[tuple[str, str], ...], arguments: tuple[str, ...]) -> Redactor:
    return Redactor(dict(variables), arguments)


def current() -> Redactor:
    """The redactor for the environment of this process, as it is now, and its command line."""
    known = tuple(pair for pair in os.environ.items() if pair[0] != _OF_THE_TEST)
    return _redactor(known, tuple(sys.argv[1:]))


def redacted(text: str) -> str:
    """A text without the credentials of this process's environment, and of whatever it names by itself."""
    return current()(text)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without them."""
    return current().arguments(arguments)
