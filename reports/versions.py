"""The comparison of sessions of the same tests with several versions of PyTorch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.results import BAD, TestResult
from harness.safe_io.shown import one_line
from reports.build import shown_verdict
from reports.markdown import escaped
from reports.model import ORDER
from reports.text import plural

SCHEMA = "concord.versions"
VERSION = 1
ABSENT = "absent"
"""The verdict of a test that a session does not have."""
_SHOWN = 10
"""How many tests of one change the terminal shows. Markdown and JSON have all."""


@dataclass(frozen=True)
class Column:
    """The session of one version, as the caller has it."""

    name: str
    torch: str
    python: str
    tests: Mapping[str, TestResult]
    commit: str = ""
    problem: str = ""


class OneVersion(msgspec.Struct, kw_only=True):
    """The session of one version: its tests with each verdict."""

    name: str
    """The version of torch, with the environment if two have the same."""
    torch: str
    commit: str
    python: str
    counts: dict[str, int]
    problem: str
    """Why its results are not whole; empty if they are."""


class Cause(msgspec.Struct, kw_only=True):
    """Tests that changed alike, and the headline or reason that they share."""

    headline: str
    tests: list[str]


class Change(msgspec.Struct, kw_only=True):
    """The tests whose verdict changed in the same way, grouped by cause, with the most frequent cause first."""

    before: str
    after: str
    count: int
    causes: list[Cause]


class Step(msgspec.Struct, kw_only=True):
    """The changes from one version to the next."""

    before: str
    after: str
    unchanged: int
    changes: list[Change]


class Versions(msgspec.Struct, kw_only=True):
    """A comparison of versions, in the order in which they were given."""

    schema: str = SCHEMA
    version: int = VERSION
    versions: list[OneVersion]
    steps: list[Step]

    @property
    def bad(self) -> bool:
        """Whether a session is not whole, or a test ended badly."""
        return any(each.problem or set(each.counts) & set(BAD) for each in self.versions)


def compared(columns: Sequence[Column]) -> Versions:
    """Compare sessions, each with the next one."""
    versions = [
        OneVersion(
            name=each.name,
            torch=each.torch,
            commit=each.commit,
            python=each.python,
            counts=_counts(each.tests),
            problem=each.problem,
        )
        for each in columns
    ]
    return Versions(versions=versions, steps=[_step(*pair) for pair in itertools.pairwise(columns)])


def _counts(tests: Mapping[str, TestResult]) -> dict[str, int]:
    counted = Counter(map(shown_verdict, tests.values()))
    return {verdict: counted[verdict] for verdict in ORDER if counted[verdict]}


def _step(old: Column, new: Column) -> Step:
    changes: dict[tuple[str, str], dict[str, list[str]]] = {}
    unchanged = 0
    for nodeid in sorted({*old.tests, *new.tests}):
        was, now = old.tests.get(nodeid), new.tests.get(nodeid)
        verdicts = tuple(shown_verdict(test) if test is not None else ABSENT for test in (was, now))
        before, after = verdicts
        if before == after:
            unchanged += 1
            continue
        changes.setdefault((before, after), {}).setdefault(_cause(was, now), []).append(nodeid)
    places = {verdict: i for i, verdict in enumerate((*ORDER, ABSENT))}
    listed = []
    for (before, after), causes in sorted(changes.items(), key=lambda item: (places[item[0][1]], places[item[0][0]])):
        grouped = [Cause(headline=headline, tests=tests) for headline, tests in causes.items()]
        grouped.sort(key=lambda cause: -len(cause.tests))
        listed.append(Change(before=before, after=after, count=sum(len(c.tests) for c in grouped), causes=grouped))
    return Step(before=old.name, after=new.name, unchanged=unchanged, changes=listed)


def _cause(was: TestResult | None, now: TestResult | None) -> str:
    """Return what the later result says, or else what the earlier one says: a passed test says nothing."""
    return next((said for test in (now, was) if test is not None and (said := test.headline or test.reason)), "")


def show(versions: Versions, console: Console) -> None:
    """Print the table of verdicts, and the changes from each version to the next."""
    columns = _verdicts(versions)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("torch")
    for verdict in columns:
        table.add_column(verdict, justify="right")
    for each in versions.versions:
        table.add_row(Text(one_line(each.name)), *(f"{each.counts.get(verdict, 0):,}" for verdict in columns))
    console.print(table)
    for each in versions.versions:
        if each.problem:
            console.print(Text(f"{one_line(each.name)}: not whole: {one_line(each.problem)}"), soft_wrap=True)
    for step in versions.steps:
        console.print()
        console.print(Text(one_line(_title(step)), style="bold"), soft_wrap=True)
        for change in step.changes:
            console.print(Text(f"  {_kind(change)}", style="bold"))
            for cause in change.causes:
                if cause.headline:
                    console.print(Text(f"    {one_line(cause.headline)}"), soft_wrap=True)
                for nodeid in cause.tests[:_SHOWN]:
                    console.print(Text(f"      {one_line(nodeid)}", style="dim"), soft_wrap=True)
                if len(cause.tests) > _SHOWN:
                    console.print(Text(f"      and {len(cause.tests) - _SHOWN:,} more", style="dim"))


def markdown(versions: Versions) -> str:
    """Format the comparison in Markdown."""
    return "\n".join([*_markdown(versions), ""])


def _markdown(versions: Versions) -> Iterator[str]:
    columns = _verdicts(versions)
    yield f"| torch | {' | '.join(columns)} |" if columns else "| torch |"
    yield f"|---|{'---:|' * len(columns)}"
    for each in versions.versions:
        yield f"| {' | '.join([escaped(each.name), *(f'{each.counts.get(v, 0):,}' for v in columns)])} |"
    for each in versions.versions:
        if each.problem:
            yield f"\n{escaped(each.name)}: not whole: {escaped(each.problem)}"
    for step in versions.steps:
        yield f"\n### {escaped(_title(step))}\n"
        for change in step.changes:
            yield f"- {_kind(change)}"
            for cause in change.causes:
                yield f"  - {escaped(cause.headline) or 'no headline'}"
                yield from (f"    - {escaped(nodeid)}" for nodeid in cause.tests)


def _verdicts(versions: Versions) -> list[str]:
    return [verdict for verdict in ORDER if any(each.counts.get(verdict) for each in versions.versions)]


def _title(step: Step) -> str:
    changed = sum(change.count for change in step.changes)
    return f"{step.before} → {step.after}: {plural(changed, 'test')} changed, {step.unchanged:,} unchanged"


def _kind(change: Change) -> str:
    return f"{change.before} → {change.after}: {plural(change.count, 'test')}"
