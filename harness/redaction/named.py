"""Credentials that a text itself reveals: tokens of well-known shapes, and values of names such as ``password``.

Every search here is linear: it reads a run of letters once, and looks ahead or back by a bounded number of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.redaction.shapes import HIDDEN, looks_random

AFTER_ESCAPE = r"(?<=\\[abfnrtv0])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4})"
"""The beginning of a word after a character that ``repr`` or JSON has escaped, such as a newline (``\\nPASSWORD``)."""
_ESCAPE = re.compile(r"[abfnrtv0]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}")
_KEYED = re.compile(
    r"(?:passw(?:or)?d|passphrase|secret(?:[_-]?key)?|api[_-]?key|private[_-]?key|credentials?"
    r"|(?:^|[_-])(?:pwd|access[_-]?key(?:[_-]?id)?|(?:access|api|auth|bearer|id|refresh)[_-]?token))\Z",
    re.IGNORECASE,
)
"""The ends of names whose values are credentials in any text."""
_LONGEST_KEY = 40
_NAME = re.compile(r"(?<![\w-])([\w-]++)(?:\\{0,4}[\"']\]?)?\s{0,12}[=:]\s{0,3}")
"""A name, and the sign before its value."""
_OPENING = re.compile(r"(\\{0,4})([\"'])")
_WITHIN = {quote: re.compile(rf"(?:[^{quote}\\\n]|\\.){{1,2000}}+(?={quote})") for quote in "\"'"}
"""The text between two quotes."""
_VALUE = re.compile(r"(?!(?:None|str|bytes)(?![^\s,)\]}|=;:]))[^\s\"'&;,)\]}]+")
_WORKING_FOLDER = re.compile(r"(?:.*[_-])?pwd", re.IGNORECASE)
_AUTHORIZATION = re.compile(
    r"(authorization[\"']?\s{0,3}[=:]\s{0,3}[\"']?(?:basic|bearer|token)\s{1,3})([^\s\"',;]+)", re.IGNORECASE
)
_TOKENS = re.compile(
    r"gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[A-Za-z0-9-]{10,}|hf_[A-Za-z0-9]{30,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|AIza[\w-]{35}|(?:AKIA|ASIA)[A-Z0-9]{16}|[sr]k_(?:live|test)_\w{10,}"
    rf"|(?:(?<![\w-])|{AFTER_ESCAPE})(?:"
    r"sk-[\w-]{20,}|eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+(?:\.[\w-]*)?|SG\.[\w-]{16,}+\.[\w-]{16,})"
    r"|-----BEGIN (?:[A-Z]{2,9} ){0,3}PRIVATE KEY-----(?:[A-Za-z0-9+/=\s]|\\[nr]){0,9000}+"
)
"""Tokens of GitHub, GitLab, Slack, Hugging Face, npm, PyPI, Google, Amazon, Stripe, OpenAI, SendGrid; JWT; PEM keys."""


def without_named(text: str) -> str:
    """Hide tokens of well-known shapes and values of names such as ``password`` in a text."""
    text = _TOKENS.sub(_token, text)
    if "=" not in text and ":" not in text:
        return text
    parts = []
    end = 0
    for start, stop in _values(text):
        parts += [text[end:start], HIDDEN]
        end = stop
    text = "".join([*parts, text[end:]])
    return _AUTHORIZATION.sub(rf"\1{HIDDEN}", text) if "uthorization" in text.lower() else text


def names_credential(name: str) -> bool:
    """Return whether the value after this name and ``=`` or ``:`` is a credential in any text."""
    return _KEYED.search(name[-_LONGEST_KEY:]) is not None


def _token(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("sk-") and not looks_random(found[0]) else HIDDEN


def _values(text: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of the values of names such as ``password``."""
    end = 0
    for found in _NAME.finditer(text):
        name = _unescaped(text, found)
        if found.start() < end or not names_credential(name):
            continue
        place = _value(text, found.end())
        if place is not None and not (_WORKING_FOLDER.fullmatch(name[-_LONGEST_KEY:]) and text[place[0]] == "/"):
            yield place
            end = place[1]


def _unescaped(text: str, found: re.Match[str]) -> str:
    """Return a name without leading letters that belong to an escape (``\\nPWD``)."""
    escape = _ESCAPE.match(found[1]) if text[found.start() - 1 : found.start()] == "\\" else None
    return found[1][escape.end() :] if escape else found[1]


def _value(text: str, start: int) -> tuple[int, int] | None:
    """Return the position of the value that begins here: between quotes, or up to a blank or a separator."""
    opening = _OPENING.match(text, start)
    if opening is None:
        found = _VALUE.match(text, start)
        return found.span() if found else None
    if opening[1]:  # a quote in an escaped text: the closing one is escaped in the same way
        end = text.find(opening[0], opening.end(), opening.end() + 2000)
        if end > opening.end() and "\n" not in text[opening.end() : end]:
            return opening.end(), end
    found = _WITHIN[opening[2]].match(text, opening.end()) or _VALUE.match(text, opening.end())
    return found.span() if found else None
