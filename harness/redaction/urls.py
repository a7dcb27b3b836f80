"""URLs that show no credentials.

What is left of one: scheme, host, port, path, the parameters that are known to be harmless, and an anchor.  Left out:
all of the user info, the value of every other parameter, and whatever in path, parameters or fragment looks like a
token, as the last part of a webhook's address does.  Where it can't be told what is the user info (a password with a
slash in it, an address that was cut off), everything up to the last ``@``, or the whole authority, is left out.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_plus

from harness.redaction.shapes import HIDDEN, looks_random

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>`]*")
"""A URL in the middle of a text."""
_SCHEME = re.compile(r"[\w+. -]{0,31}")
_HOST = r"(?:[\w.%~-]*|\[[0-9A-Fa-f:.%\w]*\])(?::\d*)?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")
_WEB = ("http", "https", "ws", "wss")
"""Schemes in whose paths an ``@`` means nothing."""
_HARMLESS = frozenset(
    (
        *("application_name", "cache", "charset", "check_same_thread", "client_encoding", "connect_timeout"),
        *("dialect", "driver", "immutable", "keepalives", "mode", "nolock", "page", "per_page", "pool_size"),
        *("sslmode", "ssl_mode", "target_session_attrs", "timeout", "uri", "vfs"),
    )
)
"""Parameters whose values say how something is reached, and to nobody who may."""
_TRAILING = ".,;:!?)]}"


class Url:
    """A URL: ``str`` and ``repr`` give it without credentials, ``whole`` as it was given."""

    __slots__ = ("_shown", "secrets", "whole")

    def __init__(self, text: str) -> None:
        """``text``: anything with ``://`` in it.  Errors: ValueError for anything else."""
        scheme, mark, rest = text.partition("://")
        if not mark:
            raise ValueError("no URL: it has no ://")
        self.whole = text
        self.secrets: frozenset[str] = frozenset()
        """What was left out, part by part, encoded and decoded."""
        hidden: list[str] = []
        authority, rest = _parted(scheme, rest)
        rest, mark, fragment = rest.partition("#")
        path, question, query = rest.partition("?")
        shown = (
            f"{scheme if _SCHEME.fullmatch(scheme) else HIDDEN}://{_authority(authority, hidden)}{_path(path, hidden)}"
        )
        shown += f"?{_query(query, hidden)}" if question else ""
        if mark:
            if looks_random(fragment) or "=" in fragment:
                hidden.append(fragment)
                fragment = HIDDEN
            shown += f"#{fragment}"
        self._shown = shown
        self.secrets = frozenset(each for part in hidden for each in (part, unquote(part), unquote_plus(part)) if each)

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"Url({self._shown!r})"


def _parted(scheme: str, rest: str) -> tuple[str, str]:
    """The authority, and what comes after it: a later ``@`` may say that a password has ``/``, ``?`` or ``#`` in it."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    last = rest.rfind("@")
    if last >= len(authority) and (scheme.lower() not in _WEB or not _HOSTS.fullmatch(authority.rpartition("@")[2])):
        authority = rest[: last + 1] + re.split(r"[/?#]", rest[last + 1 :], maxsplit=1)[0]
    return authority, rest[len(authority) :]


def _authority(authority: str, hidden: list[str]) -> str:
    user, at, host = authority.rpartition("@")
    if at:
        name, colon, password = user.partition(":")
        hidden += [user, password] if colon else [name]
    if not _HOSTS.fullmatch(host):
        hidden += [host, host.partition(":")[2]]
        return HIDDEN
    return f"{HIDDEN}@{host}" if at else host


def _path(path: str, hidden: list[str]) -> str:
    segments = path.split("/")
    for i, segment in enumerate(segments):
        if looks_random(segment) or looks_random(unquote(segment)):
            hidden.append(segment)
            segments[i] = HIDDEN
    return "/".join(segments)


def _query(query: str, hidden: list[str]) -> str:
    shown = []
    for parameter in re.split(r"[&;]", query):
        name, equals, value = parameter.partition("=")
        if not re.fullmatch(r"[A-Za-z_][\w.-]{0,40}", name) or looks_random(name):
            hidden += [name, value]
            shown.append(HIDDEN if parameter else "")
        elif name.lower() in _HARMLESS and re.fullmatch(r"[\w./:-]{0,40}", value) and not looks_random(value):
            shown.append(parameter)
        else:
            hidden.append(value if equals else name)
            shown.append(f"{name}={HIDDEN}" if equals else HIDDEN)
    return "&".join(shown)


def without_credentials(text: str) -> str:
    """A text in which every URL shows no credentials."""
    if "://" not in text:
        return text
    return URL.sub(_replaced, text)


def _replaced(found: re.Match[str]) -> str:
    text = found[0].rstrip(_TRAILING)
    return f"{Url(text)}{found[0][len(text) :]}"


def urls_in(text: str) -> list[Url]:
    """Every URL of a text."""
    return [Url(found.rstrip(_TRAILING)) for found in URL.findall(text)] if "://" in text else []
