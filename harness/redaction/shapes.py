"""What a text looks like: a token that a machine made, or words, numbers, versions and paths."""

from __future__ import annotations

import itertools
import os
import re

HIDDEN = "***"
"""What stands where a credential was."""

_RUN = re.compile(r"[A-Za-z0-9_+/=.~%-]{12,}")
_PART = re.compile(r"[A-Za-z0-9]+")
_WORD = re.compile(r"[A-Za-z]{1,20}\d{0,4}|\d{1,8}[A-Za-z]{0,3}")
"""``replicate``, ``cp311``, ``20261122``, ``64MiB``."""
_LEAST = 12
"""Characters that are no words, in one run of them, that make a token of it."""

_TELLING = {"AUTH", "KEY", "KEYS", "LOGIN", "OTP", "PASS", "PAT", "PIN", "PW", "PWD", "DSN", "SALT", "SESSION", "SIG"}
_TELLING_ENDS = ("PASS", "PW", "PWD")  # as in DBPASS
_TELLING_PARTS = (
    *("APIKEY", "ACCESSKEY", "COOKIE", "CREDENTIAL", "CREDS", "PASSCODE", "PASSPHRASE", "PASSW", "PRIVATE", "SECRET"),
    *("SIGNATURE", "TOKEN", "WEBHOOK"),
)


def looks_random(text: str) -> bool:
    """Whether some run of a text looks like a token: 12 letters and digits or more that are no words or numbers."""
    return any(_unlike_words(run) >= _LEAST for run in _RUN.findall(text))


def _unlike_words(run: str) -> int:
    return sum(len(part) for part in _PART.findall(run) if not _WORD.fullmatch(part) or _mixed_case(part))


def _mixed_case(part: str) -> bool:
    """Whether letters change their case more often than words written together do."""
    changes = sum(a.islower() != b.islower() for a, b in itertools.pairwise(part))
    return len(part) >= _LEAST and changes > 0.4 * len(part)


def is_path(text: str) -> bool:
    """Whether a text is a path on this machine: it begins with a folder that is there."""
    top = re.match(r"/[^/]+", text)
    return text == "/" or (top is not None and os.path.lexists(top[0]))


def says_secret(name: str) -> bool:
    """Whether a name (of a variable, an option, a parameter) says that its value is a credential.

    A safeguard beside the lists of what may be shown, and never the reason why something is.
    """
    upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
    parts = set(re.split(r"[^A-Z0-9]+", upper))
    return (
        bool(parts & _TELLING)
        or any(part.endswith(_TELLING_ENDS) for part in parts)
        or any(part in upper for part in _TELLING_PARTS)
    )
