"""Texts without credentials: those of this process's environment, of URLs, and those that are assigned to a name."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from harness.redaction.arguments import valued, without_values
from harness.redaction.named import AFTER_ESCAPE, without_named
from harness.redaction.shapes import HIDDEN, is_path, looks_random, says_secret
from harness.redaction.urls import urls_in, without_credentials
from harness.redaction.variables import is_plain, of_kind

_LEAST = 6
"""Characters of a credential that is looked for in texts: shorter ones are parts of everything."""
_OF_THE_TEST = "PYTEST_CURRENT_TEST"
"""Environment variable: the name of the test that runs, which pytest changes all the time."""
_ANYWHERE = 12
"""Characters from which on it is looked for within words, too."""
_PIECES = re.compile(r"[^\s\"',;()<>\[\]{}|&]+")
_NAMED = re.compile(rf"(?:(?<![\w.-])|{AFTER_ESCAPE})([A-Za-z_][\w.-]{{0,60}})[\"']?\s{{0,3}}[=:]\s{{0,3}}")
"""In the value of a variable: a name to which something is assigned."""
_ASSIGNED = re.compile(r"(?:(?=\"([^\"\n]{1,400})\")|(?='([^'\n]{1,400})')|)[\"']?(?=(\S{1,400}))([^\s;,\"'}]+)")
"""What is assigned to it: between quotes, up to a blank, and up to what may be a separator."""
_USER_INFO = re.compile(r"(?:^|(?<=[\s,;\"'=/:]))([^\s/:@,;\"'=]{1,64}+):(?!/)([^\s@]{1,256}+)@(?=[\w\[])")
"""``user:password@host`` in the value of a variable."""
_BOUND = frozenset(("digest", "environment", "files", "plugins", "profile_hash", "suite_hash"))
"""Fields of records that have no text of anybody's: hashes, versions, and variables that were checked one by one."""


class Redactor:
    """Takes credentials out of texts.

    Credentials are in variables of the environment that are not known to be harmless
    (:func:`~harness.redaction.variables.is_plain`): the whole value, from 6 characters on, where the variable's name
    says so; otherwise what looks like a token in it, and what a URL in it hides.  Each is found as it is,
    percent-encoded, and as JSON and ``repr`` write it; words of letters alone only where nothing joins them to others.
    """

    def __init__(self, variables: Mapping[str, str], arguments: Sequence[str] = (), known: Iterable[str] = ()) -> None:
        """``variables``: an environment, name to value; ``arguments``: a command line, whose credentials count too;
        ``known``: further credentials."""
        found = {*_secrets_in(variables, arguments), *known}
        spellings = {each for secret in found for each in _spellings(secret) if len(each) >= _LEAST}
        self._spellings = sorted(spellings, key=lambda each: (-len(each), each))
        self._patterns = {each: re.compile(_pattern(each)) for each in self._spellings}

    def __call__(self, text: str) -> str:
        """The text, with ``***`` for every credential."""
        for each in self._spellings:
            if each in text:
                text = self._patterns[each].sub(HIDDEN, text)
        return without_named(without_credentials(text))

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
        return [self(argument) for argument in without_values(list(map(str, arguments)))]


def has_credentials(name: str, value: str) -> bool:
    """Whether a variable with this name and value has something that must not leave the machine."""
    return not is_plain(name, value) and any(_of(name, value))


def _secrets_in(variables: Mapping[str, str], arguments: Sequence[str] = ()) -> set[str]:
    found = {secret for name, value in variables.items() if not is_plain(name, value) for secret in _of(name, value)}
    for option, value in valued(arguments):
        found.update([value] if says_secret(option) else [])
        found.update(_in_addresses(value))
    return found


def _in_addresses(value: str) -> Iterable[str]:
    """What URLs hide, and passwords of addresses that are no whole URLs."""
    for url in urls_in(value):
        yield from url.secrets
    for _, password in _USER_INFO.findall(value):
        yield from (password, password.rpartition(":")[2])


def _of(name: str, value: str) -> Iterable[str]:
    """The credentials in the value of a variable."""
    stripped = value.strip()
    if all(map(os.path.lexists, stripped.split(os.pathsep))):
        return
    if says_secret(name):
        yield stripped
        yield from stripped.split("\n")
    yield from _in_addresses(value)
    yield from (url.whole for url in urls_in(value) if looks_random(url.whole))
    end = 0
    for key in _NAMED.finditer(value):
        if key.start() >= end and says_secret(key[1]) and (assigned := _ASSIGNED.match(value, key.end())):
            yield from filter(None, assigned.groups())
            end = assigned.end()
    for piece in _PIECES.findall(value):
        if "://" not in piece and looks_random(piece) and not is_path(piece):
            yield piece
            yield piece.partition("=")[2]


def _spellings(secret: str) -> Iterable[str]:
    yield from (secret, quote(secret, safe=""), quote_plus(secret), quote(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])


def _pattern(secret: str) -> str:
    """Where a credential counts: a short one not within a word, one of letters alone not within a path or a name."""
    if secret.isalpha():
        return rf"(?:(?<![\w./-])|{AFTER_ESCAPE}){re.escape(secret)}(?![\w/-])"
    if len(secret) < _ANYWHERE:
        return rf"(?:(?<![A-Za-z0-9])|{AFTER_ESCAPE}){re.escape(secret)}(?![A-Za-z0-9])"
    return re.escape(secret)


class Memory:
    """Every credential that the environment and the command line of this process have had.

    It looks when it is made, and each time that a redactor is asked for: what a test takes out of the environment, or
    changes, is a credential still.
    """

    def __init__(self) -> None:
        self._unread: list[Mapping[str, str]] = [dict(os.environ)]
        self._last: dict[str, str] = {}
        self._arguments: tuple[str, ...] = ()
        self._secrets: frozenset[str] = frozenset()
        self._redactor = Redactor({})

    def add(self, variables: Mapping[str, str]) -> None:
        """Remember the credentials of another environment."""
        self._unread.append(dict(variables))

    def redactor(self) -> Redactor:
        """One for all that has been seen, up to now."""
        now, arguments = dict(os.environ), tuple(sys.argv[1:])
        now.pop(_OF_THE_TEST, None)
        unread, self._unread = [dict(now.items() - self._last.items()), *self._unread], []
        found = self._secrets.union(*map(_secrets_in, unread))
        self._last = now
        if arguments != self._arguments:
            found |= _secrets_in({}, arguments)
            self._arguments = arguments
        if found != self._secrets:
            self._secrets = found
            self._redactor = Redactor({}, known=self._secrets)
        return self._redactor


_MEMORY = Memory()


def current() -> Redactor:
    """The redactor for what the environment and the command line of this process have, and have had."""
    return _MEMORY.redactor()


def remember(variables: Mapping[str, str] | None = None) -> None:
    """Take note of the environment as it is now, or of another that this process gives to others."""
    _MEMORY.add(os.environ if variables is None else variables)


def recorded(name: str, value: str) -> str | None:
    """What results say of an environment variable; None: nothing, not even that it is set."""
    shown = of_kind(name, value)
    return shown if shown is None else redacted(shown)


def redacted(text: str) -> str:
    """A text without the credentials of this process, and without what it says itself to be one."""
    return current()(text)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without them."""
    return current().arguments(arguments)
