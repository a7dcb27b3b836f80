"""The comparison of two reports: tests that began to fail, were fixed, came or went."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from harness.results import BAD
from reports.markdown import escaped
from reports.model import Report
from reports.text import plural, visible

SCHEMA = "concord.comparison"
VERSION = 1


class Change(msgspec.Struct, kw_only=True):
    """A test whose verdicts in the two reports differ; a verdict is empty if its report lacks the test."""

    nodeid: str
    before: str
    after: str
    headline: str = ""


class Comparison(msgspec.Struct, kw_only=True):
    """The differences between two reports."""

    schema: str = SCHEMA
    version: int = VERSION
    newly_failing: list[Change]
    """Tests that are bad now and were not before, including new ones."""
    fixed: list[Change]
    """Tests that pass now and were bad before."""
    lost: list[Change]
    """Tests that were passed or waived before, and are not run, unsupported or undeclared now."""
    changed: list[Change]
    """Tests with other changes, such as from failed to hung or from passed to waived."""
    added: list[Change]
    removed: list[Change]
    unchanged: int
    conformant: tuple[str, str]
    environment: dict[str, tuple[str, str]]
    """Differences in the surroundings (versions, profile, suite, seeds), with the value in each report."""
    same_minimums: bool = True
    """Whether both reports judge levels by the same version of the minimums."""

    @property
    def worse(self) -> bool:
        """Whether anything is worse than before: a new failure, a test that is lost or removed, or a lower level.

        A level that another version of the minimums judged says nothing about the runs.
        """
        lower = self.conformant[1] < self.conformant[0] and self.same_minimums
        return bool(self.newly_failing or self.lost or self.removed) or lower


def compare(before: Report, after: Report) -> Comparison:
    """Compare two reports test by test."""
    old, new = ({test.nodeid: test for test in report.tests} for report in (before, after))
    changes: dict[str, list[Change]] = {
        name: [] for name in ("newly_failing", "fixed", "lost", "changed", "added", "removed")
    }
    unchanged = 0
    for nodeid in sorted({*old, *new}):
        was = old[nodeid].verdict if nodeid in old else ""
        now = new[nodeid].verdict if nodeid in new else ""
        if was == now:
            unchanged += 1
            continue
        headline = new[nodeid].headline if nodeid in new else ""
        changes[_kind(was, now)].append(Change(nodeid=nodeid, before=was, after=now, headline=headline))
    return Comparison(
        newly_failing=changes["newly_failing"],
        fixed=changes["fixed"],
        lost=changes["lost"],
        changed=changes["changed"],
        added=changes["added"],
        removed=changes["removed"],
        unchanged=unchanged,
        conformant=(before.conformant, after.conformant),
        environment=dict(_around(before, after)),
        same_minimums=before.levels_version == after.levels_version,
    )


def _kind(was: str, now: str) -> str:
    if not now:
        return "removed"
    if now in BAD and was not in BAD:
        return "newly_failing"
    if not was:
        return "added"
    if was in BAD and now == "passed":
        return "fixed"
    if was in ("passed", "waived") and now in ("not-run", "unsupported", "undeclared"):
        return "lost"
    return "changed"


def surroundings(report: Report) -> dict[str, str]:
    """Return the facts around the tests of a report by name: profile, suite, seeds, environment."""
    facts = {
        "profile": f"{report.profile} {report.profile_hash[:12]}",
        "subject": report.subject,
        "suite": report.suite_hash[:12],
        "concord": report.concord,
        "version of the levels' minimums": str(report.levels_version or ""),
        "seeds": ", ".join(run.seed for run in report.runs),
    }
    return {name: value.strip() for name, value in {**facts, **report.environment, **facts}.items()}


def _around(before: Report, after: Report) -> Iterator[tuple[str, tuple[str, str]]]:
    old, new = surroundings(before), surroundings(after)
    for name in dict.fromkeys([*old, *new]):
        if old.get(name, "") != new.get(name, ""):
            yield name, (old.get(name, ""), new.get(name, ""))


TITLES = {
    "newly_failing": "newly failing",
    "lost": "no longer run",
    "removed": "removed",
    "fixed": "fixed",
    "changed": "changed",
    "added": "added",
}
"""The kinds of changes, the worst first, with their names for readers."""


def lines(comparison: Comparison, *, markdown: bool = False) -> Iterator[str]:
    """Describe a comparison in lines of text or Markdown."""
    shown = escaped if markdown else visible
    item, heading = ("- ", "### ") if markdown else ("  ", "")
    counts = [plural_of(comparison, kind) for kind in TITLES if getattr(comparison, kind)]
    yield f"{heading}{', '.join([*counts, f'{comparison.unchanged:,} unchanged'])}"
    was, now = (level or "none" for level in comparison.conformant)
    if was != now:
        yield f"{item}conformant at: {was} before, {now} now"
    for key, (old, new) in comparison.environment.items():
        yield f"{item}{shown(key)}: {shown(old) or 'none'} before, {shown(new) or 'none'} now"
    for kind, title in TITLES.items():
        changes: list[Change] = getattr(comparison, kind)
        if not changes:
            continue
        if markdown:
            yield ""
        yield f"{heading}{title}"
        if markdown:
            yield ""
        for change in changes:
            verdicts = " → ".join(filter(None, (change.before, change.after)))
            said = f": {shown(change.headline)}" if change.headline else ""
            yield f"{item}{shown(change.nodeid)} ({verdicts}){said}"


def plural_of(comparison: Comparison, kind: str) -> str:
    """Count the tests of one kind of change, as in ``3 tests newly failing``."""
    return f"{plural(len(getattr(comparison, kind)), 'test')} {TITLES[kind]}"
