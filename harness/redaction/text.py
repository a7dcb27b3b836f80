"""Redaction of texts: credentials of this process's environment, in URLs, and in assignments to a name."""

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
"""Minimum length of a credential that is searched for: shorter ones occur everywhere."""
_OF_THE_TEST = "PYTEST_CURRENT_TEST"
"""Environment variable with the name of the running test, which pytest changes all the time."""
_ANYWHERE = 12
"""Minimum length of a credential that is also searched for within words."""
_PIECES = re.compile(r"[^\s\"',;()<>\[\]{}|&]+")
_NAMED = re.compile(rf"(?:(?<![\w.-])|{AFTER_ESCAPE})([A-Za-z_][\w.-]{{0,60}})[\"']?\s{{0,3}}[=:]\s{{0,3}}")
"""A name with an assigned value, in the value of a variable."""
_ASSIGNED = re.compile(r"(?:(?=\"([^\"\n]{1,400})\")|(?='([^'\n]{1,400})')|)[\"']?(?=(\S{1,400}))([^\s;,\"'}]+)")
"""The assigned value: between quotes, up to a blank, and up to a possible separator."""
_USER_INFO = re.compile(r"(?:^|(?<=[\s,;\"'=/:]))([^\s/:@,;\"'=]{1,64}+):(?!/)([^\s@]{1,256}+)@(?=[\w\[])")
"""``user:password@host`` in the value of a variable."""
_BOUND = frozenset(("digest", "environment", "files", "nonce", "plugins", "profile_hash", "suite_hash"))
"""Fields of records without free text: hashes, versions, and variables that were checked one by one."""


class Redactor:
    """A function that removes credentials from texts.

    Credentials come from environment variables that are not known to be harmless
    (:func:`~harness.redaction.variables.is_plain`).  If the variable's name says that it is secret, the whole value is
    a credential, from 6 characters on.  Otherwise, tokens in the value are, and the parts that a URL in it hides.  Each
    credential is found as it is, percent-encoded, and as JSON and ``repr`` write it.  A credential of letters alone is
    found only as a separate word.
    """

    def __init__(self, variables: Mapping[str, str], arguments: Sequence[str] = (), known: Iterable[str] = ()) -> None:
        """Collect the credentials.

        ``variables``: an environment, name to value.  ``arguments``: a command line, which may also have credentials.
        ``known``: further credentials.
        """
        found = {*_secrets_in(variables, arguments), *known}
        spellings = {each for secret in found for each in _spellings(secret) if len(each) >= _LEAST}
        self._spellings = sorted(spellings, key=lambda each: (-len(each), each))
        self._patterns = {each: re.compile(_pattern(each)) for each in self._spellings}

    def __call__(self, text: str) -> str:
        """Return the text with ``***`` for every credential."""
        for each in self._spellings:
            if each in text:
                text = self._patterns[each].sub(HIDDEN, text)
        return without_named(without_credentials(text))

    def record(self, value: Any) -> Any:
        """Redact every text in plain data (as ``msgspec.to_builtins`` returns it) except hashes and versions."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, (list, tuple)):
            return [self.record(each) for each in value]
        if isinstance(value, dict):
            return {self.record(k): v if k in _BOUND else self.record(v) for k, v in value.items()}
        return value

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """Redact a command line, including the values of options whose names say that they are credentials."""
        return [self(argument) for argument in without_values(list(map(str, arguments)))]


def has_credentials(name: str, value: str) -> bool:
    """Return whether a variable with this name and value has credentials, which must not leave the machine."""
    return not is_plain(name, value) and any(_of(name, value))


def _secrets_in(variables: Mapping[str, str], arguments: Sequence[str] = ()) -> set[str]:
    found = {secret for name, value in variables.items() if not is_plain(name, value) for secret in _of(name, value)}
    for option, value in valued(arguments):
        found.update([value] if says_secret(option) else [])
        found.update(_in_addresses(value))
    return found


def _in_addresses(value: str) -> Iterable[str]:
    """Yield what URLs hide, and passwords of addresses that are not complete URLs."""
    for url in urls_in(value):
        yield from url.secrets
    for _, password in _USER_INFO.findall(value):
        yield from (password, password.rpartition(":")[2])


def _of(name: str, value: str) -> Iterable[str]:
    """Yield the credentials in the value of a variable."""
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
    """Return a pattern for a credential.

    A short credential does not match within a word, and one of letters alone does not match within a path or a name.
    """
    if secret.isalpha():
        return rf"(?:(?<![\w./-])|{AFTER_ESCAPE}){re.escape(secret)}(?![\w/-])"
    if len(secret) < _ANYWHERE:
        return rf"(?:(?<![A-Za-z0-9])|{AFTER_ESCAPE}){re.escape(secret)}(?![A-Za-z0-9])"
    return re.escape(secret)


class Memory:
    """All credentials that the environment and the command line of this process have or had.

    It reads the environment when it is created and whenever it returns a redactor.  A credential that a test removes or
    changes stays a credential.
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
        """Return a redactor for all credentials that were seen so far."""
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
    """Return the redactor for the credentials that this process's environment and command line have or had."""
    return _MEMORY.redactor()


def remember(variables: Mapping[str, str] | None = None) -> None:
    """Remember the credentials of the current environment, or of one that this process gives to others."""
    _MEMORY.add(os.environ if variables is None else variables)


def recorded(name: str, value: str) -> str | None:
    """Return what results show of an environment variable; None: nothing, not even that it is set."""
    shown = of_kind(name, value)
    return shown if shown is None else redacted(shown)


def redacted(text: str) -> str:
    """Redact a text: the credentials of this process, and those that the text itself reveals."""
    return current()(text)


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """Redact a command line."""
    return current().arguments(arguments)
