"""Shapes of texts: tokens that a machine made, as opposed to words, numbers, versions and paths."""

from __future__ import annotations

import itertools
import os
import re

HIDDEN = "***"
"""Replaces a credential."""

_RUN = re.compile(r"[A-Za-z0-9_+/=.~%-]{12,}")
_PART = re.compile(r"[A-Za-z0-9]+")
_WORD = re.compile(r"[A-Za-z]{1,20}\d{0,4}|\d{1,8}[A-Za-z]{0,3}")
"""``replicate``, ``cp311``, ``20261122``, ``64MiB``."""
_LEAST = 12
"""Minimum number of characters outside of words that makes a run of characters a token."""

_TELLING = {"AUTH", "KEY", "KEYS", "LOGIN", "OTP", "PASS", "PAT", "PIN", "PW", "PWD", "DSN", "SALT", "SESSION", "SIG"}
_TELLING_ENDS = ("PASS", "PW", "PWD")  # as in DBPASS
_TELLING_PARTS = (
    *("APIKEY", "ACCESSKEY", "COOKIE", "CREDENTIAL", "CREDS", "PASSCODE", "PASSPHRASE", "PASSW", "PRIVATE", "SECRET"),
    *("SIGNATURE", "TOKEN", "WEBHOOK"),
)


def looks_random(text: str) -> bool:
    """Return whether a text contains a token: a run with 12 or more letters and digits outside of words and numbers."""
    return any(_unlike_words(run) >= _LEAST for run in _RUN.findall(text))


def _unlike_words(run: str) -> int:
    return sum(len(part) for part in _PART.findall(run) if not _WORD.fullmatch(part) or _mixed_case(part))


def _mixed_case(part: str) -> bool:
    """Return whether letters change case more often than in words written together."""
    changes = sum(a.islower() != b.islower() for a, b in itertools.pairwise(part))
    return len(part) >= _LEAST and changes > 0.4 * len(part)


def is_path(text: str) -> bool:
    """Return whether a text is a path on this machine: its top-level folder exists."""
    top = re.match(r"/[^/]+", text)
    return text == "/" or (top is not None and os.path.lexists(top[0]))


def says_secret(name: str) -> bool:
    """Return whether a name (of a variable, an option, a parameter) says that its value is a credential.

    This is an additional safeguard.  Only the lists of what may be shown decide that something is shown.
    """
    upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    parts = set(re.split(r"[^A-Z0-9]+", upper))
    return (
        bool(parts & _TELLING)
        or any(part.endswith(_TELLING_ENDS) for part in parts)
        or any(part in upper for part in _TELLING_PARTS)
    )
