"""Read profiles and defects from TOML; report each mistake with file, line and key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from harness.profiles import keys, values
from harness.profiles.defects import Defect, Defects, names_of, with_defects
from harness.profiles.keys import Key
from harness.profiles.model import (
    Claims,
    Condition,
    Exclusion,
    Mistake,
    Profile,
    ProfileError,
    Tolerance,
    Waiver,
    pattern,
)
from harness.profiles.toml_lines import Where, lines_of
from harness.profiles.values import BadItem, nearest, shown_key
from harness.profiles.vocabulary import BOUNDED
from harness.safe_io.files import FileError, contents
from harness.safe_io.untrusted import TOML_SIZE, Refused, toml

_MOST_MISTAKES = 50
_MOST_BASES = 20

Base = Callable[[str, str], tuple[str, str]]
"""Find the profile ``name`` that ``file`` inherits from: ``(name, file)`` to its file's name in messages, and its text.

Errors: ValueError that says why there is none."""


def read(path: Path, file: str = "", base: Base | None = None, known: Sequence[Defects] = ()) -> Profile:
    """Read a profile.  ``file``: its name in messages.  Errors: :class:`ProfileError`."""
    return parse(text_of(path, file), file or str(path), base, known)


def text_of(path: Path, file: str = "") -> str:
    """Read the text of a profile or of defects.  ``file``: its name in messages.  Errors: :class:`ProfileError`."""
    file = file or str(path)
    try:
        data = contents(path, TOML_SIZE)
    except FileError as e:
        raise ProfileError([Mistake(file, 0, "", e.why)]) from None
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ProfileError([Mistake(file, line, "", f"not UTF-8: byte 0x{data[e.start]:02x}")]) from None


def parse(text: str, file: str, base: Base | None = None, known: Sequence[Defects] = ()) -> Profile:
    """Parse a profile.  ``file``: its name in messages.  ``base`` finds the profile that it inherits from.

    ``known``: all known defects, of which those that concern the profile are among its waivers.
    Errors: :class:`ProfileError`, about this file or one that it inherits from.
    """
    return with_defects(_parsed(text, file, base, (file,), known), known)


def parse_defects(text: str, file: str) -> Defects:
    """Parse a file of defects.  ``file``: its name in messages.  Errors: :class:`ProfileError`."""
    document, lines = _document(text, file)
    reader = _Reader(file, lines)
    owner = reader.defects(document)
    reader.finish()
    return owner


def is_of_defects(text: str) -> bool:
    """Return whether a text is a file of defects, which has an owner, and not a profile, which has a name."""
    try:
        document = toml(text.replace("\r\n", "\n"))
    except Refused:
        return False
    return ("owner" in document or keys.DEFECT_LIST in document) and "name" not in document


def defects_among(texts: Mapping[str, str]) -> tuple[Defects, ...]:
    """Return the defects in texts of profiles and of defects, by the file's name in messages.

    Errors: :class:`ProfileError`.
    """
    return tuple(parse_defects(text, file) for file, text in texts.items() if is_of_defects(text))


def _document(text: str, file: str) -> tuple[Mapping[str, Any], Mapping[Where, int]]:
    text = text.replace("\r\n", "\n")
    try:
        document = toml(text)
    except Refused as e:
        raise ProfileError([Mistake(file, e.line, "", e.what)]) from None
    return document, lines_of(text)


def _parsed(text: str, file: str, base: Base | None, seen: tuple[str, ...], known: Sequence[Defects]) -> Profile:
    document, lines = _document(text, file)
    reader = _Reader(file, lines, known)
    below = reader.base(document, base, seen)
    entries = reader.said(document, () if "inherits" in document else [n for n, k in keys.HEAD.items() if k.required])
    reader.finish()
    return entries.over(below, file)


def _first(mistakes: list[Mistake]) -> list[Mistake]:
    """Return the first of many mistakes, and the number of the others."""
    if len(mistakes) <= _MOST_MISTAKES:
        return mistakes
    more = len(mistakes) - _MOST_MISTAKES
    return [*mistakes[:_MOST_MISTAKES], Mistake(mistakes[0].file, 0, "", f"and {more:,} more mistakes")]


@dataclass
class _Said:
    """The converted contents of one file."""

    head: dict[str, Any] = field(default_factory=dict)
    collectives: dict[str, Any] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()
    features: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tolerances: tuple[Tolerance, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    defects: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def over(self, below: Profile | None, file: str) -> Profile:
        """Return the profile that results from these contents and the inherited profile.

        Values replace values, tables are merged key by key, and lists of tables are appended.
        """
        head = dict(self.head)
        for name in ("inherits", "inherit_waivers"):
            head.pop(name, None)
        under = below or Profile("", "", "")
        claimed = {("collectives" if k == "names" else k): v for k, v in self.collectives.items()}
        if "stacks" in head:
            claimed["stacks"] = head.pop("stacks")
        claims: Claims = replace(
            under.claims,
            **claimed,
            exclusions=(*under.claims.exclusions, *self.exclusions),
            features=tuple(sorted({**dict(under.claims.features), **self.features}.items())),
        )
        for name in ("env", "shared_device_env"):
            if name in head:
                head[name] = tuple(sorted({**dict(getattr(under, name)), **dict(head[name])}.items()))
        head.setdefault("never_run", False)  # it is about this file: whoever inherits from it may have run it
        own = {tolerance.dtype for tolerance in self.tolerances}
        return replace(
            under,
            **head,
            claims=claims,
            tolerances=(*(t for t in under.tolerances if t.dtype not in own), *self.tolerances),
            waivers=(
                *_inherited(under.waivers, self.head.get("inherit_waivers")),
                *(replace(waiver, owner=head["name"]) for waiver in self.waivers),
            ),
            with_defects=self.defects.get("with", under.with_defects),
            without_defects=self.defects.get("without", under.without_defects),
            keeps=self.defects.get("keep", ()),
            file=file,
            bases=(under.file, *under.bases) if below else (),
        )


def _of_any_owner(name: str, known: Sequence[str]) -> str:
    """Return the defect whose id is a name, of whichever owner; empty if there is none."""
    return next((each for each in known if each.partition("/")[2] == name), "")


def _inherited(waivers: Sequence[Waiver], globs: Sequence[str] | None) -> Iterator[Waiver]:
    """Yield waivers with those of their test globs that match a glob; None: all of them."""
    for waiver in waivers:
        kept = [t for t in waiver.tests if globs is None or any(pattern(glob).match(t) for glob in globs)]
        if kept:
            yield replace(waiver, tests=tuple(kept))


class _Reader:
    """A check of a file's tables against their keys, which collects mistakes."""

    def __init__(self, file: str, lines: Mapping[Where, int], known: Sequence[Defects] = ()) -> None:
        self.file = file
        self.lines = lines
        self.known = known
        self.mistakes: list[Mistake] = []

    def finish(self) -> None:
        """Raise the mistakes, if there are any.  Errors: :class:`ProfileError`."""
        if self.mistakes:
            raise ProfileError(_first(sorted(self.mistakes, key=lambda mistake: mistake.line)))

    def line(self, where: Where) -> int:
        """Return the line of a value, or of the innermost table around it that has a line."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)

    def wrong(self, where: Where, what: str) -> None:
        """Note a mistake."""
        names = [shown_key(part) for part in where if isinstance(part, str)]
        count = next((i for i, part in enumerate(where) if not isinstance(part, str)), 0)
        count = count or (1 if where[:1] in ((name,) for name in (*keys.LISTS, keys.DEFECT_LIST)) else 0)
        table = [f"[[{'.'.join(names[:count])}]]"] if count else []
        key = " ".join([*table, *([".".join(names[count:])] if names[count:] else [])])
        self.mistakes.append(Mistake(self.file, self.line(where), key, what))

    # the whole file

    def base(self, document: Mapping[str, Any], base: Base | None, seen: tuple[str, ...]) -> Profile | None:
        """Read the profile that the file inherits from; None if there is none, or there is a mistake."""
        name = document.get("inherits")
        if not isinstance(name, str) or base is None:
            if isinstance(name, str):
                self.wrong(("inherits",), "nothing is known of other profiles here")
            return None
        try:
            file, text = base(name, self.file)
        except ValueError as e:
            self.wrong(("inherits",), str(e))
            return None
        if file in seen:
            self.wrong(("inherits",), f"goes round in a circle: {' -> '.join([*seen, file])}")
            return None
        if len(seen) > _MOST_BASES:
            self.wrong(("inherits",), f"more than {_MOST_BASES} profiles, one over the other")
            return None
        return _parsed(text, file, base, (*seen, file), self.known)

    def said(self, document: Mapping[str, Any], required: Sequence[str]) -> _Said:
        """Return the converted contents of the file."""
        entries = _Said()
        waivers = [
            (self.line(where), self.waiver(kind, where, table))
            for kind in keys.LISTS
            for where, table in self.tables(document.get(kind, []), (kind,))
        ]
        entries.waivers = tuple(waiver for _, waiver in sorted(waivers, key=lambda pair: pair[0]) if waiver)
        others = (*keys.TABLES, *keys.LISTS)
        plain = {k: v for k, v in document.items() if k not in others}
        entries.head = self.table(plain, keys.HEAD, (), others, required={"name", *required})
        listed = dict(self.nested(document, "collectives"))
        excluded = listed.pop("except", [])
        entries.collectives = self.table(listed, keys.COLLECTIVES_TABLE, ("collectives",), ("except",))
        entries.exclusions = tuple(
            Exclusion(**self.conditioned(found))
            for where, table in self.tables(excluded, ("collectives", "except"))
            if (found := self.whole(table, keys.EXCLUSION, where)) is not None
        )
        entries.features = self.table(self.nested(document, "features"), keys.FEATURES_TABLE, ("features",))
        entries.tolerances = tuple(self.tolerances(self.nested(document, "tolerance")))
        entries.defects = self.table(self.nested(document, "defects"), keys.DEFECTS_TABLE, ("defects",))
        self.known_defects(entries.defects)
        return entries

    def tolerances(self, tables: Mapping[str, Any]) -> Iterator[Tolerance]:
        """Yield the tolerances without mistakes."""
        for dtype, table in tables.items():
            where: Where = ("tolerance", dtype)
            if dtype not in BOUNDED:
                self.unknown(where, BOUNDED)
            elif not isinstance(table, dict):
                self.wrong(where, f"a table, begun with [tolerance.{dtype}], not {values.shown(table)}")
            elif (found := self.whole(table, keys.TOLERANCE, where)) is not None:
                yield Tolerance(dtype, **self.conditioned(found))

    def waiver(self, kind: str, where: Where, table: Mapping[str, Any]) -> Waiver | None:
        """Return the waiver of a table; None if it has mistakes."""
        found = self.whole(table, keys.WAIVER if kind == "waiver" else keys.INTERMITTENT, where)
        if found is None:
            return None
        place = f"{self.file}:{self.line(where)}"
        return Waiver(**self.conditioned(found), intermittent=kind == "intermittent", place=place)

    # defects

    def known_defects(self, named: Mapping[str, Sequence[str]]) -> None:
        """Note names of owners and of defects that do not exist, and contradictions."""
        owners, every = [each.owner for each in self.known], names_of(self.known)
        for key, names in named.items():
            existing = owners if key == "keep" else every
            for name in names:
                if name not in existing:
                    near = self.near(name, existing) or _of_any_owner(name, existing)
                    hint = f"did you mean {near}?" if near else f"owners are {', '.join(owners) or 'not known here'}"
                    self.wrong(("defects", key), f"there is no {values.shown(name)}; {hint}")
        for name in set(named.get("with", ())) & set(named.get("without", ())):
            self.wrong(("defects", "without"), f"{name} is in with, too")

    def defects(self, document: Mapping[str, Any]) -> Defects:
        """Return the contents of a file of defects."""
        plain = {k: v for k, v in document.items() if k != keys.DEFECT_LIST}
        head = self.table(plain, keys.OWNER, (), (keys.DEFECT_LIST,))
        owner = head.get("owner", "")
        if owner and owner != PurePosixPath(self.file).stem:
            self.wrong(("owner",), f"the file of {owner} is called {owner}.toml")
        listed: list[Defect] = []
        ids: dict[str, Where] = {}
        for where, table in self.tables(document.get(keys.DEFECT_LIST, []), (keys.DEFECT_LIST,)):
            defect = self.defect(owner, where, table, head.get("backends", ()))
            if defect is not None:
                first = ids.setdefault(defect.waiver.defect, where)
                if first is not where:
                    self.wrong((*where, "id"), f"{defect.waiver.defect} is there already, in line {self.line(first)}")
                listed.append(defect)
        return Defects(owner, self.file, head.get("about", ""), tuple(listed))

    def defect(self, owner: str, where: Where, table: Mapping[str, Any], backends: tuple[str, ...]) -> Defect | None:
        """Return the defect of a table; None if it has mistakes.  ``backends``: where it shows unless it says so."""
        known = keys.DEFECT_NOW_AND_THEN if table.get("intermittent") is True else keys.DEFECT
        found = self.whole(table, known, where)
        if found is None:
            return None
        backends, devices = found.pop("backends", backends), found.pop("devices", ())
        place = f"{self.file}:{self.line(where)}"
        defect, kind = found.pop("id"), found.pop("kind", "")
        waiver = Waiver(**self.conditioned(found), place=place, owner=owner, defect=defect)
        return Defect(waiver, backends, devices, kind)

    # tables

    def nested(self, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return the table with a name; empty if it is missing or not a table."""
        found = document.get(name, {})
        if isinstance(found, dict):
            return found
        self.wrong((name,), f"a table, begun with [{name}], not {values.shown(found)}")
        return {}

    def tables(self, found: object, where: Where) -> Iterator[tuple[Where, Mapping[str, Any]]]:
        """Yield the tables of a list, each with its path."""
        if isinstance(found, list) and all(isinstance(table, dict) for table in found):
            for i, table in enumerate(found):
                yield (*where, i), table
        else:
            self.wrong(where, f"begin each with [[{'.'.join(map(str, where))}]], in two brackets")

    def whole(self, table: Mapping[str, Any], known: Mapping[str, Key], where: Where) -> dict[str, Any] | None:
        """Return the values of a table; None if it has mistakes."""
        before = len(self.mistakes)
        values = self.table(table, known, where)
        return values if len(self.mistakes) == before else None

    def conditioned(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a table, with its conditions as one :class:`Condition`."""
        when = Condition(**{k: values[k] for k in keys.CONDITION if k in values})
        return {**{k: v for k, v in values.items() if k not in keys.CONDITION}, "when": when}

    def near(self, name: object, known: Sequence[str]) -> str:
        """Return the nearest name, for the first mistakes only: a search takes 0.3 ms."""
        return nearest(name, known) if len(self.mistakes) < _MOST_MISTAKES else ""

    def unknown(self, where: Where, known: Sequence[str]) -> str:
        """Note an unknown key.  Returns the key that was probably meant."""
        near = self.near(where[-1], known)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
        self.wrong(where, f"no such key; {hint}")
        return near

    def table(
        self,
        table: Mapping[str, Any],
        known: Mapping[str, Key],
        where: Where,
        others: Sequence[str] = (),
        required: set[str] | None = None,
    ) -> dict[str, Any]:
        """Return the converted values of a table, and note its mistakes."""
        values: dict[str, Any] = {}
        meant = set()
        for name, value in table.items():
            if name not in known:
                meant.add(self.unknown((*where, name), [*known, *others]))
                continue
            try:
                values[name] = known[name].convert(value)
            except BadItem as e:
                self.wrong((*where, name, e.item), str(e))
            except ValueError as e:
                self.wrong((*where, name), str(e))
        needed = {name for name, key in known.items() if key.required} if required is None else required
        for name, key in known.items():
            if name in needed and name not in table and name not in meant:
                self.wrong((*where, name), f"is missing; write {name} = {key.example}")
        return values
