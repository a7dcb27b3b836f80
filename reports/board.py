"""The board: a static site of many bundles, by backend, version of PyTorch and level, with history and differences.

Bundles come from anyone. So each is verified before anything of it is shown. A bundle with something wrong is only
named, with the reason. Everything that is shown of the others is text (:mod:`reports.page`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from packaging.version import InvalidVersion, Version

from harness.requirements import LEVELS
from reports.answer import PARTIAL, state
from reports.compare import TITLES, Change, Comparison, compare
from reports.model import CONFORMANT, NOT_CONFORMANT, NOT_SHOWN, Report, TestReport
from reports.page import environment
from reports.verify import Checked

MOST = 500
"""Bundles of a board."""
NOT_CHECKED, NOT_RUN = "not checked", "not run"
_LONGEST = 500
"""Characters of a text that a page shows."""
_REASONS = 5
"""Reasons why a bundle was refused, or could not be checked, that are shown."""
_CHANGES = 100
"""Tests of one kind of change that a page lists."""


@dataclass(frozen=True)
class Refused:
    """A file that is not on the board."""

    name: str
    reasons: tuple[str, ...]
    more: int = 0
    """The number of reasons that are not shown."""


@dataclass(frozen=True)
class Entry:
    """A bundle on the board."""

    name: str
    """The name of its file."""
    sha256: str
    report: Report
    """The report that was made anew, without the evidence of failures."""
    manifest: str
    unchecked: tuple[str, ...] = ()
    more: int = 0
    """The number of lines that are not among ``unchecked``."""
    notes: tuple[str, ...] = ()
    signer: str = ""
    """Who signed the file, among those who may; empty if nobody did, or nobody asked."""

    @property
    def page(self) -> str:
        """The name of its page, relative to the site."""
        return f"bundles/{self.sha256[:32]}.html"

    @property
    def whole(self) -> str:
        """The name of the page of its report, relative to the site."""
        return f"reports/{self.sha256[:32]}.html"

    @property
    def backend(self) -> tuple[str, str, str, str]:
        """What makes bundles comparable: profile, backend, device and subject."""
        report = self.report
        return report.profile or "no profile", report.backend, report.device, report.subject

    @property
    def torch(self) -> str:
        """The version of PyTorch, as the bundle says it."""
        return self.report.environment.get("torch", "")[:60] or "not said"

    @cached_property
    def states(self) -> dict[str, str]:
        """The state of each level.  Nothing is conformant if something could not be checked."""
        found = dict.fromkeys(LEVELS, NOT_RUN)
        for level in self.report.levels:
            if level.id in found and level.tests:
                found[level.id] = NOT_CHECKED if self.unchecked else state(level)
        return found


@dataclass(frozen=True)
class Step:
    """An entry in the history of its backend, with the differences from the one before it."""

    entry: Entry
    before: Entry | None = None
    comparison: Comparison | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The number of tests with each kind of change; empty if nothing changed or nothing was before."""
        counts = {title: len(self.changes(kind)) for kind, title in TITLES.items()}
        return {title: count for title, count in counts.items() if count}

    @property
    def lists(self) -> list[tuple[str, list[Change], int]]:
        """Each kind of change, with the tests that are listed and the number of the others."""
        found = [(title, self.changes(kind)) for kind, title in TITLES.items()]
        return [(title, changes[:_CHANGES], max(0, len(changes) - _CHANGES)) for title, changes in found if changes]

    @property
    def surroundings(self) -> list[tuple[str, str, str]]:
        """What differs around the tests: a name, and the value before and now."""
        around = self.comparison.environment if self.comparison is not None else {}
        return [(name, old, new) for name, (old, new) in around.items()]

    def changes(self, kind: str) -> list[Change]:
        """Return the changes of one kind."""
        changes: list[Change] = getattr(self.comparison, kind) if self.comparison is not None else []
        return changes


@dataclass(frozen=True)
class Backend:
    """A backend, and its bundles from the newest to the oldest."""

    profile: str
    on: str
    subject: str
    """Empty for PyTorch's own implementation."""
    steps: tuple[Step, ...]

    def newest(self, torch: str) -> Entry | None:
        """Return the newest bundle with a version of PyTorch."""
        return next((step.entry for step in self.steps if step.entry.torch == torch), None)


def taken(name: str, sha256: str, checked: Checked, signer: str = "") -> Entry | Refused:
    """Take in a bundle after its check, or refuse it if anything is wrong with it.

    ``name``: of its file; ``sha256``: of its file; ``signer``: who signed it, as far as that was checked.
    """
    if checked.problems or checked.report is None:
        return refused(name, checked.problems or ("there is nothing in it",))
    return Entry(
        name,
        sha256,
        _light(checked.report),
        checked.manifest,
        checked.unchecked[:_REASONS],
        max(0, len(checked.unchecked) - _REASONS),
        checked.notes[:_REASONS],
        signer,
    )


def refused(name: str, reasons: Sequence[str]) -> Refused:
    """Refuse a file for some reasons, of which the first are shown."""
    return Refused(name, tuple(reasons[:_REASONS]), max(0, len(reasons) - _REASONS))


def _light(report: Report) -> Report:
    """Return a report without the evidence of failures, which may be long."""
    tests = [
        TestReport(nodeid=t.nodeid, verdict=t.verdict, verdicts=[], stack=t.stack, headline=t.headline[:_LONGEST])
        for t in report.tests
    ]
    return msgspec.structs.replace(report, tests=tests, requirements=[], matrix=[])


def backends(entries: Iterable[Entry]) -> list[Backend]:
    """Group entries by backend, each with its history and the differences between bundles that follow each other."""
    groups: dict[tuple[str, str, str, str], list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: (each.report.made, each.name)):
        groups.setdefault(entry.backend, []).append(entry)
    found = []
    for (profile, backend, device, subject), history in sorted(groups.items()):
        steps = [Step(history[0])]
        for before, entry in itertools.pairwise(history):
            steps.append(Step(entry, before, compare(before.report, entry.report)))
        on = f"{backend} on {device}" if backend else "not said"
        found.append(Backend(profile, on, "" if subject == "torch" else subject, tuple(reversed(steps))))
    return found


def versions(entries: Iterable[Entry]) -> list[str]:
    """Return the versions of PyTorch, newest first; texts that are none come last."""

    def order(text: str) -> tuple[bool, Version, str]:
        try:
            return True, Version(text), text
        except InvalidVersion:
            return False, Version("0"), text

    return sorted({entry.torch for entry in entries}, key=order, reverse=True)


def site(entries: Sequence[Entry], refused: Sequence[Refused]) -> Iterator[tuple[str, str]]:
    """Render the site: the name and the text of each page, the one with the table last.

    The pages of whole reports (:attr:`Entry.whole`) are not among them.
    """
    grouped = backends(entries)
    for backend in grouped:
        for step in backend.steps:
            page = _rendered("board_bundle.html", step=step, entry=step.entry, r=step.entry.report, backend=backend)
            yield step.entry.page, page
    others = sorted(refused, key=lambda each: each.name)
    index = {"backends": grouped, "versions": versions(entries), "refused": others, "total": len(entries)}
    yield "index.html", _rendered("board.html", **index)


def _rendered(template: str, **values: object) -> str:
    return environment(_LONGEST).get_template(template).render(levels=LEVELS, marks=MARKS, **values)


MARKS: Mapping[str, tuple[str, str]] = {
    CONFORMANT: ("passed", "✓"),
    NOT_CONFORMANT: ("failed", "✗"),
    PARTIAL: ("waived", "½"),
    NOT_SHOWN: ("undeclared", "…"),
    NOT_CHECKED: ("waived", "?"),
    NOT_RUN: ("none", "·"),
}
"""The class and the sign of each state."""
