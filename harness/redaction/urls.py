"""URLs without their credentials.

A URL keeps its scheme, host, port, path, parameters that are known to be harmless, and fragment.  It loses all user
info, the values of all other parameters, and everything in path, parameters or fragment that looks like a token, such
as the last part of a webhook's address.  If the user info is ambiguous (a password with a slash in it, an address that
was cut off), everything up to the last ``@`` is left out, or the whole authority.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

from harness.redaction.shapes import HIDDEN, looks_random

_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}+://")
_STOP = re.compile(r"[\s'\"<>`]|\Z")
"""The end of a URL in a text, unless it is within the user info."""
_FARTHEST = 256
"""Maximum number of characters of user info after such a blank or quote."""
_NEXT_WORD = re.compile(rf"[^\S\r\n]{{0,3}}['\"<>`]?[^\s@]{{0,{_FARTHEST}}}@(?=[\w\[])")
_CLOSING = {"'": "'", '"': '"', "`": "`", "<": ">"}
_SURE_HOST = re.compile(r"(?:[\w-]{1,63}(?:\.[\w-]{1,63}){1,9}|localhost|\[[0-9A-Fa-f:.]{2,45}\]|)(?::\d{0,5})?")
"""An authority that cannot be a user name and the beginning of a password."""
_NO_USERS = ("env", "file", "grpc", "tcp", "udp", "unix")
"""Schemes of addresses without user info."""
_FEW_SLASHES = re.compile(
    r"(?<![A-Za-z0-9+.-])((?:(?:postgres(?:ql)?|m[ysq]{2}ql|mariadb|mongodb|redis|amqps?)(?:\+\w{1,20})?:/?"
    rf"|[A-Za-z][A-Za-z0-9+.-]{{0,30}}+:/))(?!/)([^\s/@:'\"]{{1,64}}+:[^\s@]{{1,{_FARTHEST}}}+@)(?=[\w\[])"
)
"""An address that lacks a slash: its beginning, and its user info."""
_SCHEME = re.compile(r"[\w+. -]{0,31}")
_HOST = r"(?:[\w.%~-]*|\[[0-9A-Fa-f:.%\w]*\])(?::\d*)?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")
_WEB = ("http", "https", "ws", "wss")
"""Schemes whose paths may contain an ``@``."""
_HARMLESS = frozenset(
    (
        *("application_name", "cache", "charset", "check_same_thread", "client_encoding", "connect_timeout"),
        *("dialect", "driver", "immutable", "keepalives", "mode", "nolock", "page", "per_page", "pool_size"),
        *("sslmode", "ssl_mode", "target_session_attrs", "timeout", "uri", "vfs"),
    )
)
"""Parameters whose values say how to reach something, and not who may."""
_TRAILING = ".,;:!?)]}"


class Url:
    """A URL: ``str`` and ``repr`` return it without credentials, and ``whole`` is the original."""

    __slots__ = ("_shown", "secrets", "whole")

    def __init__(self, text: str) -> None:
        """Parse a URL.  ``text`` must contain ``://``.  Errors: ValueError if it does not."""
        scheme, mark, rest = text.partition("://")
        if not mark:
            raise ValueError("no URL: it has no ://")
        self.whole = text
        self.secrets: frozenset[str] = frozenset()
        """The parts that were left out, encoded and decoded."""
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
    """Return the authority and the rest.  A later ``@`` may mean that a password contains ``/``, ``?`` or ``#``."""
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
    """Remove the credentials from every URL in a text."""
    if "://" in text:
        parts, end = [], 0
        for start, stop in _places(text):
            parts += [text[end:start], str(Url(text[start:stop]))]
            end = stop
        text = "".join([*parts, text[end:]])
    return _FEW_SLASHES.sub(rf"\1{HIDDEN}@", text) if ":" in text and "@" in text else text


def urls_in(text: str) -> list[Url]:
    """Return every URL in a text."""
    return [Url(text[start:stop]) for start, stop in _places(text)] if "://" in text else []


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of the URLs in a text."""
    end = 0
    while found := _START.search(text, end):
        end = _end(text, found)
        yield found.start(), found.end() + len(text[found.end() : end].rstrip(_TRAILING))


def _end(text: str, start: re.Match[str]) -> int:
    """Return the end of a URL: a blank or a quote that is not within its user info."""
    end = _stop(text, start.end())
    scheme = start[0][:-3].lower()
    if scheme in _NO_USERS or _is_closed(text, start.start(), end):
        return end
    body = text[start.end() : end]
    sure = _SURE_HOST.fullmatch(re.split(r"[/?#]", body, maxsplit=1)[0])
    if body.startswith(HIDDEN) or (sure and (scheme in _WEB or not sure[0])):
        return end
    if "@" not in body and not sure:
        line = _line(text, end)
        at = line.find("@")
        if at >= 0 and line[at + 1 : at + 2].strip() and ":" in body + line[:at]:
            end = _stop(text, end + at)
    while found := _NEXT_WORD.match(text, end):
        if "://" in found[0]:
            break
        end = _stop(text, found.end())
    return end


def _stop(text: str, start: int) -> int:
    found = _STOP.search(text, start)
    assert found is not None  # the end of the text always matches
    return found.start()


def _is_closed(text: str, start: int, end: int) -> bool:
    """Return whether a URL is between quotes, and a separator or the end of the text follows."""
    before, at, after = text[start - 1 : start], text[end : end + 1], text[end + 1 : end + 2]
    return bool(before) and _CLOSING.get(before) == at and (not after or after in ",;:.)]}>\\" or after.isspace())


def _line(text: str, start: int) -> str:
    """Return the rest of the line, as far as user info may reach, and up to the next URL."""
    reachable = text[start : start + _FARTHEST].partition("://")[0]
    return re.split(r"[\r\n]", reachable, maxsplit=1)[0]
