"""Profiles: what a backend claims, and which of its defects are known, as a TOML file says it.

Every key is described in ``docs/profiles.md``.  A file with mistakes is refused as a whole, and all of them are named
at once, each with file, line and key.
"""

from __future__ import annotations

import datetime
import difflib
import fnmatch
import functools
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from harness.results import BAD
from harness.toml_lines import Where, lines_of

UNREPORTED = "unreported"
"""The link of a defect that has been reported nowhere."""

_MOST_SECONDS = 86_400
_MOST_RANKS = 100_000
_LARGEST_FILE = 4 << 20


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in a profile."""

    file: str
    line: int
    """From 1; 0: it is about the file as such."""
    key: str
    """With its table; empty: it is about no key."""
    what: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.what}" if self.key else f"{place}: {self.what}"


class ProfileError(ValueError):
    """A profile that can't be used; says what is wrong where, one mistake a line."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


@dataclass(frozen=True)
class Waiver:
    """Tests that are known to end badly: always, or (``intermittent``) now and then."""

    tests: tuple[str, ...]
    """Globs on whole node ids; ``*`` and ``?`` only, brackets mean themselves."""
    reason: str
    link: str
    """URL of the report, or :data:`UNREPORTED`."""
    expires: datetime.date
    """The last day on which it counts."""
    verdicts: tuple[str, ...] = BAD
    """The verdicts that it covers; an intermittent one names ``passed`` as well."""
    torch: str = ""
    """Versions of torch that it is about, as in ``>=2.11,<2.14``; empty: all."""
    subjects: tuple[str, ...] = ("torch",)
    """Whose implementations of the stacks it is about (:mod:`harness.subjects`)."""
    intermittent: bool = False
    place: str = ""
    """``file:line``."""

    def matches(self, nodeid: str) -> bool:
        """Whether it is about a test."""
        return any(pattern(glob).match(nodeid) for glob in self.tests)

    def is_about_torch(self, version: str) -> bool:
        """Whether it is about a version of torch, a pre-release or a local build as well."""
        try:
            return not self.torch or SpecifierSet(self.torch).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return True

    def has_expired(self, today: datetime.date) -> bool:
        """Whether it no longer counts."""
        return today > self.expires


@dataclass(frozen=True)
class Profile:
    """What a backend claims on a type of device."""

    name: str
    backend: str
    device: str
    about: str = ""
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks; empty: any."""
    ranks_per_device: int = 1
    warm: bool | None = None
    """Whether worlds are used again; None: on accelerators."""
    timeout: float | None = None
    """Seconds for one run on ranks."""
    env: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()
    """Modules that register the backend or the device."""
    waivers: tuple[Waiver, ...] = ()
    """In the file's order, intermittent ones among them."""
    file: str = ""

    def is_about(self, backend: str, device: str) -> bool:
        """Whether its claims are about worlds of this backend on this type of device."""
        return (self.backend, self.device) == (backend, device)


@functools.cache
def pattern(glob: str) -> re.Pattern[str]:
    """A glob on node ids as a regular expression; brackets mean themselves, since ids of parameters have them."""
    return re.compile(fnmatch.translate(glob.replace("[", "[[]")))


# reading


def read(path: Path, file: str = "") -> Profile:
    """Read a profile; ``file`` is what messages call it.  Errors: :class:`ProfileError`."""
    return parse(text_of(path, file), file or str(path))


def text_of(path: Path, file: str = "") -> str:
    """The text of a profile.  Errors: :class:`ProfileError`."""
    file = file or str(path)
    try:
        if path.exists() and not path.is_file():
            raise ProfileError([Mistake(file, 0, "", "not a file")])
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_FILE + 1)
    except OSError as e:
        raise ProfileError([Mistake(file, 0, "", e.strerror or str(e))]) from None
    if len(data) > _LARGEST_FILE:
        raise ProfileError([Mistake(file, 0, "", f"larger than {_LARGEST_FILE >> 20} MiB: not a profile")])
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ProfileError([Mistake(file, line, "", f"not UTF-8: byte 0x{data[e.start]:02x}")]) from None


def parse(text: str, file: str) -> Profile:
    """Read a profile's text; ``file`` is what messages call it.  Errors: :class:`ProfileError`."""
    text = text.replace("\r\n", "\n")
    try:
        document = tomllib.loads(text)
        lines = lines_of(text)
    except RecursionError:
        raise ProfileError([Mistake(file, 1, "", "not TOML that can be read: nested too deeply")]) from None
    except ValueError as e:
        found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(e))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1 if found else 1
        what = str(e)[: found.start()] if found else str(e)
        raise ProfileError([Mistake(file, line, "", f"not TOML: {what}")]) from None
    reader = _Reader(file, lines)
    waivers = [
        (reader.line(where), reader.waiver(kind, where, table))
        for kind in _LISTS
        for where, table in reader.tables(document, kind)
    ]
    head = reader.table({k: v for k, v in document.items() if k not in _LISTS}, _HEAD, (), _LISTS)
    if reader.mistakes:
        raise ProfileError(sorted(reader.mistakes, key=lambda mistake: mistake.line))
    waivers.sort(key=lambda pair: pair[0])
    return Profile(**head, waivers=tuple(waiver for _, waiver in waivers if waiver), file=file)


_LISTS = ("waiver", "intermittent")


class _Reader:
    """Checks tables against their keys, and gathers mistakes."""

    def __init__(self, file: str, lines: Mapping[Where, int]) -> None:
        self.file = file
        self.lines = lines
        self.mistakes: list[Mistake] = []

    def line(self, where: Where) -> int:
        """The line of a value, or of the closest thing around it that has one."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)

    def wrong(self, where: Where, what: str) -> None:
        names = [_shown_key(part) for part in where if isinstance(part, str)]
        table = [f"[[{names.pop(0)}]]"] if names and names[0] in _LISTS else []
        key = " ".join([*table, *([".".join(names)] if names else [])])
        self.mistakes.append(Mistake(self.file, self.line(where), key, what))

    def tables(self, document: Mapping[str, Any], name: str) -> Iterator[tuple[Where, Mapping[str, Any]]]:
        """The tables of ``[[name]]``, and where each begins."""
        found = document.get(name, [])
        if isinstance(found, list) and all(isinstance(table, dict) for table in found):
            for i, table in enumerate(found):
                yield (name, i), table
        else:
            self.wrong((name,), f"begin each with [[{name}]], in two brackets")

    def table(
        self, table: Mapping[str, Any], keys: Mapping[str, _Key], where: Where, others: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The values of a table, converted; mistakes are noted."""
        values: dict[str, Any] = {}
        meant = set()
        for name, value in table.items():
            if name not in keys:
                nearest = difflib.get_close_matches(name.lower(), [*keys, *others], 1)
                meant.update(nearest)
                hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join([*keys, *others])}"
                self.wrong((*where, name), f"no such key; {hint}")
                continue
            try:
                values[name] = keys[name].convert(value)
            except _BadItem as e:
                self.wrong((*where, name, e.item), str(e))
            except ValueError as e:
                self.wrong((*where, name), str(e))
        for name, key in keys.items():
            if key.required and name not in table and name not in meant:
                self.wrong((*where, name), f"is missing; write {name} = {key.example}")
        return values

    def waiver(self, kind: str, where: Where, table: Mapping[str, Any]) -> Waiver | None:
        before = len(self.mistakes)
        values = self.table(table, _WAIVER if kind == "waiver" else _INTERMITTENT, where)
        if len(self.mistakes) > before:
            return None
        return Waiver(**values, intermittent=kind == "intermittent", place=f"{self.file}:{self.line(where)}")


@dataclass(frozen=True)
class _Key:
    """A key of a table: how its value is checked and converted, and how one looks."""

    convert: Callable[[Any], Any]
    example: str
    required: bool = False


class _BadItem(ValueError):
    """What is wrong with one entry of a table."""

    def __init__(self, item: str, what: str) -> None:
        super().__init__(what)
        self.item = item


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):
        return "what is there"


def _shown_key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]{1,60}", name) else _shown(name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a text in quotes, not {_shown(value)}")
    if not value.strip():
        raise ValueError("is empty")
    for character in value:
        if not character.isprintable():
            raise ValueError(f"a text on one line, without {character!r}")
    return value


def _word(value: Any) -> str:
    if " " in _text(value):
        raise ValueError(f"a name without spaces, not {_shown(value)}")
    return _text(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_RANKS:
        raise ValueError(f"a whole number from 1, not {_shown(value)}")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"true or false, without quotes, not {_shown(value)}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST_SECONDS:
        raise ValueError(f"a number of seconds above 0, at most {_MOST_SECONDS}, not {_shown(value)}")
    return float(value)


def _list_of(convert: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def converted(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"a list in brackets, not {_shown(value)}")
        if not value:
            raise ValueError("is empty")
        items = tuple(convert(item) for item in value)
        seen = set()
        for item in items:
            if item in seen:
                raise ValueError(f"{_shown(item)} is there twice")
            seen.add(item)
        return items

    return converted


def _environment(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"a table of names and values, begun with [env], not {_shown(value)}")
    for name, content in value.items():
        if not name or "=" in name or not name.isprintable():
            raise _BadItem(name, "not the name of an environment variable")
        if not isinstance(content, str) or "\0" in content:
            raise _BadItem(name, f"a text in quotes, not {_shown(content)}")
    return tuple(sorted(value.items()))


def _module(value: Any) -> str:
    if not all(part.isidentifier() for part in _text(value).split(".")):
        raise ValueError(f"the name of a module, not {_shown(value)}")
    return _text(value)


def _link(value: Any) -> str:
    if _text(value) != UNREPORTED and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError(f'a URL, or "{UNREPORTED}", not {_shown(value)}')
    return _text(value)


def _date(value: Any) -> datetime.date:
    if type(value) is not datetime.date:
        raise ValueError(f"a date without quotes and without a time, as in 2027-06-30, not {_shown(value)}")
    return value


def _verdict(*known: str) -> Callable[[Any], str]:
    def converted(value: Any) -> str:
        if value in known:
            return str(value)
        nearest = difflib.get_close_matches(str(value), known, 1) if isinstance(value, str) else []
        hint = f"did you mean {nearest[0]}?" if nearest else f"write some of {', '.join(known)}"
        raise ValueError(f"{_shown(value)} is not a verdict that it can cover; {hint}")

    return converted


def _now_and_then(value: Any) -> tuple[str, ...]:
    verdicts: tuple[str, ...] = _list_of(_verdict("passed", *BAD))(value)
    if "passed" not in verdicts:
        raise ValueError("without passed: a test that never passes has a [[waiver]]")
    if len(verdicts) == 1:
        raise ValueError(f"passed alone: name what it comes to now and then ({', '.join(BAD)})")
    return verdicts


def _versions(value: Any) -> str:
    try:
        SpecifierSet(_text(value))
    except InvalidSpecifier:
        raise ValueError(f'a condition on versions, as in ">=2.11,<2.14", not {_shown(value)}') from None
    return _text(value)


_HEAD = {
    "name": _Key(_word, '"cpu-gloo"', required=True),
    "backend": _Key(_word, '"gloo"', required=True),
    "device": _Key(_word, '"cpu"', required=True),
    "about": _Key(_text, '"who made it, for what"'),
    "world_sizes": _Key(_list_of(_whole), "[1, 2, 4]"),
    "ranks_per_device": _Key(_whole, "1"),
    "warm": _Key(_boolean, "true"),
    "timeout": _Key(_seconds, "60"),
    "imports": _Key(_list_of(_module), '["my_backend"]'),
    "env": _Key(_environment, '{ NAME = "value" }'),
}
_WAIVER = {
    "tests": _Key(_list_of(_text), '["suites/collectives/test_x.py::test_y*"]', required=True),
    "reason": _Key(_text, '"what is wrong"', required=True),
    "link": _Key(_link, f'"{UNREPORTED}"', required=True),
    "expires": _Key(_date, "2027-06-30", required=True),
    "verdicts": _Key(_list_of(_verdict(*BAD)), '["failed"]'),
    "torch": _Key(_versions, '">=2.11,<2.14"'),
    "subjects": _Key(_list_of(_word), '["torch", "reference"]'),
}
_INTERMITTENT = {**_WAIVER, "verdicts": _Key(_now_and_then, '["passed", "failed"]', required=True)}

KEYS: Mapping[str, tuple[str, ...]] = {"": tuple(_HEAD), "waiver": tuple(_WAIVER), "intermittent": tuple(_INTERMITTENT)}
"""Every key that a profile can have, by table."""
