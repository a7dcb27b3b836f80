"""All known defects of a checkout, with what is known of each: kind, area, versions, report, requirements and script.

Nothing is run.  It is read from ``fixtures/defects``, ``docs/findings.md``, ``docs/requirements``, the scripts and
``docs/findings/versions.json``.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.profiles.defects import Defect
from harness.profiles.model import UNREPORTED, ProfileError
from harness.profiles.reading import parse_defects, text_of
from harness.profiles.shelf import SHIPPED_DEFECTS, shipped_defects
from harness.profiles.vocabulary import KINDS
from harness.versions import causes, findings
from harness.versions.areas import AREAS, area
from harness.versions.causes import Cause, UnreadableCauses
from harness.versions.findings import GONE, THERE, Version, state
from harness.versions.scripts import FOLDER, Script, command_in, scripts
from harness.versions.tables import Row, rows, standard

ROWS = Path("docs/findings.md")
REQUIREMENTS = Path("docs/requirements")
NOT_RUN, OTHERWISE = "not run", "otherwise"
_HOST = ("gloo", "cpu")
"""The backend and the device on which scripts run for ``versions.json``."""


class CatalogError(ValueError):
    """The catalog can't be made."""


class InVersion(msgspec.Struct, frozen=True):
    """Whether a defect is there in a version of PyTorch."""

    version: str
    state: str
    """:data:`THERE`, :data:`GONE`, :data:`OTHERWISE` or :data:`NOT_RUN`."""
    how: str = ""
    """How its script ends otherwise."""


class Shown(msgspec.Struct, frozen=True):
    """A script that shows a defect."""

    name: str
    path: str
    command: str
    """Empty if the script does not say how it is run."""
    text: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A known defect."""

    id: str
    owner: str
    kind: str
    """One of :data:`~harness.profiles.vocabulary.KINDS`, or empty."""
    area: str
    sentence: str
    """What is wrong, in Markdown's inline code at most."""
    link: str
    """Empty if it is unreported."""
    expires: str
    place: str
    """The file and the line of its waiver."""
    versions: tuple[InVersion, ...]
    requirements: dict[str, str]
    """The sentences of the requirements that its tests prove."""
    tests: tuple[str, ...]
    """Globs of node ids."""
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    scripts: tuple[Shown, ...] = ()
    cause: Cause | None = None
    """Where in PyTorch it is, if that is known."""

    @property
    def named(self) -> str:
        """Its owner and its id."""
        return f"{self.owner}/{self.id}"

    def is_in(self, version: str) -> bool | None:
        """Return whether its script shows a defect with a version; None if it was not run."""
        of = next((each.state for each in self.versions if each.version == version), NOT_RUN)
        return None if of == NOT_RUN else of != GONE


class Catalog(msgspec.Struct, frozen=True):
    """All known defects, the worst first."""

    findings: tuple[Finding, ...]
    versions: tuple[str, ...]
    """The versions of PyTorch that are known, oldest first."""
    causes: tuple[Cause, ...] = ()
    """Where in PyTorch they are, as far as that is known."""

    @property
    def newest(self) -> str:
        """The newest version of PyTorch that is known."""
        return self.versions[-1]


def catalog(root: Path) -> Catalog:
    """Return the known defects of a checkout.

    A defect whose row, script, test or kind is missing is there without it.  Errors: :class:`CatalogError`.
    """
    if not (root / SHIPPED_DEFECTS).is_dir():
        raise CatalogError(f"no defects in {root / SHIPPED_DEFECTS}: run it in a checkout of Concord")
    try:
        known = findings.read(root)
        why = causes.read(root)
        owners = [parse_defects(text_of(path), path.relative_to(root).as_posix()) for path in shipped_defects(root)]
    except (findings.Unreadable, UnreadableCauses, ProfileError) as e:
        raise CatalogError(str(e)) from None
    if not known:
        raise CatalogError(f"{findings.FILE}: nothing is known of any version; concord findings writes it")
    defects = [defect for owner in owners for defect in owner.defects]
    said = _Said(root, known, {defect.waiver.defect for defect in defects}, why)
    found = sorted((said.finding(defect) for defect in defects), key=lambda each: _order(each, [*known][-1]))
    return Catalog(tuple(found), tuple(known), why)


def _order(finding: Finding, newest: str) -> tuple[int, bool, int, str]:
    """Order the worst first: by kind, those that the newest version has, area, and name."""
    kinds, areas = list(KINDS), list(AREAS)
    return (
        kinds.index(finding.kind) if finding.kind in kinds else len(kinds),
        finding.is_in(newest) is False,
        areas.index(finding.area),
        finding.named,
    )


class _Said:
    """What the pages and scripts of a checkout say of defects."""

    def __init__(self, root: Path, known: Mapping[str, Version], ids: set[str], causes: Iterable[Cause]) -> None:
        self.root = root
        self.causes = {name: cause for cause in causes for name in cause.defects}
        self.known = known
        self.ids = ids
        self.rows: dict[str, list[Row]] = {}
        for row in rows(_text(root / ROWS)):
            for name in row.scripts:
                self.rows.setdefault(name, []).append(row)
        self.standard = standard(map(_text, sorted((root / REQUIREMENTS).glob("*.md"))))
        self.on_host = {script.name: script for script in scripts(root)}

    def finding(self, defect: Defect) -> Finding:
        """Return what is known of a defect."""
        waiver = defect.waiver
        of = self.rows.get(waiver.defect, [])
        own = of[0] if len(of) == 1 and of[0].scripts == (waiver.defect,) else None  # or a row is about several defects
        others = [name for row in of for name in row.scripts if name not in self.ids]
        shown = [self.shown(name) for name in dict.fromkeys([waiver.defect, *others])]
        return Finding(
            id=waiver.defect,
            owner=waiver.owner,
            kind=defect.kind,
            area=area(waiver.defect, waiver.tests),
            sentence=own.sentence if own and defect.concerns(*_HOST) else waiver.reason,
            link="" if waiver.link == UNREPORTED else waiver.link,
            expires=waiver.expires.isoformat(),
            place=waiver.place,
            versions=tuple(self.versions(defect)),
            requirements=self.standard.of(waiver.tests),
            tests=waiver.tests,
            backends=defect.backends,
            devices=defect.devices,
            scripts=tuple(each for each in shown if each is not None),
            cause=self.causes.get(waiver.named),
        )

    def versions(self, defect: Defect) -> Iterable[InVersion]:
        """Yield whether a defect is there in each version; scripts say nothing of a defect that the host has not."""
        script = self.on_host.get(defect.waiver.defect) if defect.concerns(*_HOST) else None
        for version in self.known:
            yield _in_version(script, version, self.known)

    def shown(self, name: str) -> Shown | None:
        """Return a script with its text; None if there is none of that name."""
        path = FOLDER / f"{name}.py"
        text = _text(self.root / path)
        if not text:
            return None
        command = [str(path) if word == path.name else word for word in command_in(text)]
        return Shown(name, path.as_posix(), shlex.join(command), text)


def _in_version(script: Script | None, version: str, known: Mapping[str, Version]) -> InVersion:
    how = state(script, version, known) if script is not None else ""
    if not how:
        return InVersion(version, NOT_RUN)
    return InVersion(version, how) if how in (THERE, GONE) else InVersion(version, OTHERWISE, how)


def _text(path: Path) -> str:
    """Return the text of a file; empty if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class Counts(msgspec.Struct, frozen=True):
    """The number of defects of an area, or of all."""

    area: str
    kinds: dict[str, int]
    """By kind, of all kinds."""
    total: int
    there: int
    """How many the newest version has."""
    reported: int


def counts(of: Catalog) -> list[Counts]:
    """Return the numbers of defects for each area that has any, and then for all, whose area is empty."""
    areas = [name for name in AREAS if any(finding.area == name for finding in of.findings)]
    by_area = [_counts(name, [each for each in of.findings if each.area == name], of.newest) for name in areas]
    return [*by_area, _counts("", of.findings, of.newest)]


def _counts(name: str, of: Sequence[Finding], newest: str) -> Counts:
    kinds = Counter(each.kind for each in of)
    return Counts(
        name,
        {kind: kinds[kind] for kind in KINDS},
        len(of),
        sum(each.is_in(newest) is True for each in of),
        sum(bool(each.link) for each in of),
    )


def view(of: Catalog) -> dict[str, Any]:
    """Return the catalog as plain data for its page (:mod:`reports.findings`)."""
    return {
        "findings": [{**msgspec.to_builtins(each), "named": each.named} for each in of.findings],
        "versions": list(of.versions),
        "newest": of.newest,
        "run": sum(each.is_in(of.newest) is not None for each in of.findings),
        "counts": msgspec.to_builtins(counts(of)),
        "kinds": dict(KINDS),
        "areas": dict(AREAS),
        "files": [
            {**msgspec.to_builtins(file), "defects": file.defects, "causes": [_plain(each) for each in file.causes]}
            for file in causes.by_file(of.causes)
        ],
        "sure": dict(causes.SURE),
    }


def _plain(cause: Cause) -> dict[str, Any]:
    return {**msgspec.to_builtins(cause), "name": cause.name}
