"""The tables of a report's page, which count cases by two of their fields, and tests by stack and world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import msgspec

from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS
from harness.requirements import LEVELS
from harness.results import GROUPS, NOT_REACHED, Call, Setting
from reports.model import CASE_ORDER, ORDER, UNDECLARED, CaseReport, Report, counted
from reports.text import visible

SIGNS: Mapping[str, str] = {
    "crashed": "†",
    "hung": "∞",
    "failed": "✗",
    "flaky": "≈",
    "waived": "◐",
    "passed": "✓",
    NOT_REACHED: "…",
    "not-run": "·",
    UNDECLARED: "○",
    "unsupported": "⊘",
}
"""A sign for each verdict, with which it differs from the others without color."""
MEANINGS: Mapping[str, str] = {
    "crashed": "a rank died in it",
    "hung": "ranks hung in it",
    "failed": "a rank found it wrong",
    "flaky": "failed, and passed when it was run again",
    "waived": "wrong, and a known defect: the owner is below",
    "passed": "every rank found it right",
    NOT_REACHED: "its test ended before it",
    "not-run": "should have run",
    UNDECLARED: "not tried: the profile does not claim it",
    "unsupported": "not run: this machine, backend or PyTorch cannot",
}
MOST = 60
"""The largest number of rows or columns; Concord's own have fewer."""
_MOST_SETTINGS = 300
KNOWN: Mapping[str, Sequence[str]] = {"collective": COLLECTIVES, "op": OPS, "dtype": DTYPES, "group": GROUPS}
"""The order of a field's values; other values come after them."""
_CORNERS = {"op": "reduction"}
_CALLS = (
    ("Collectives and dtypes", "collective", "dtype"),
    ("Reductions and dtypes", "op", "dtype"),
    ("Collectives and world sizes", "collective", "size"),
    ("Collectives and layouts of the input", "collective", "layout"),
    ("Collectives and layouts of the output", "collective", "out_layout"),
    ("Collectives and groups", "collective", "group"),
    ("Collectives and forms of the call", "collective", "form"),
)


@dataclass
class Box:
    """A cell: some cases or tests, counted by verdict."""

    link: str
    """The fragment of the page's address that shows them."""
    counts: dict[str, int] = field(default_factory=dict)
    """Worst first."""
    owners: list[str] = field(default_factory=list)
    """The owners of the defects for which some of them are waived."""

    @property
    def verdict(self) -> str:
        """The worst verdict."""
        return next(iter(self.counts), UNDECLARED)

    @property
    def ran(self) -> int:
        """How many of them were executed."""
        return sum(n for verdict, n in self.counts.items() if verdict not in _DID_NOT_RUN)

    @property
    def figure(self) -> str:
        """How many passed, of how many; empty if none was executed."""
        passed = self.counts.get("passed", 0)
        return "" if not self.ran else f"{passed:,}" if passed == self.ran else f"{passed:,}/{self.ran:,}"


_DID_NOT_RUN = (NOT_REACHED, UNDECLARED, "unsupported", "not-run")


@dataclass
class Table:
    """A table of cells; a cell is None where nothing was tried."""

    title: str
    corner: str
    columns: list[str]
    rows: list[tuple[str, list[Box | None]]]
    left_out: int = 0
    """The number of rows that are not shown."""


def of_calls(report: Report) -> list[Table]:
    """Return the tables of collectives; empty if no test tried any."""
    calls = [case for case in report.cases if isinstance(case.case, Call)]
    owners = _owners(report)
    made = [_table(title, calls, row, column, owners) for title, row, column in _CALLS]
    return [table for table in made if table.rows and table.columns]


def of_stacks(report: Report) -> list[Table]:
    """Return a table for each stack: its options with their values, and world sizes."""
    by_stack: dict[str, list[CaseReport]] = {}
    for each in report.cases:
        if isinstance(each.case, Setting):
            by_stack.setdefault(each.case.stack, []).append(each)
    owners = _owners(report)
    known = [*LEVELS.values()]
    stacks = sorted(by_stack, key=lambda name: (known.index(name) if name in known else len(known), name))
    return [
        _counted(
            stack,
            "option",
            by_stack[stack],
            lambda each: msgspec.structs.asdict(each.case),
            lambda each: {"size": str(each.size)},
            owners,
            _MOST_SETTINGS,
        )
        for stack in stacks[:MOST]
    ]


def of_tests(report: Report) -> Table:
    """Return the table of tests by stack and world size."""
    found: dict[tuple[str, int], Counter[str]] = {}
    for cell in report.matrix:
        found.setdefault((cell.stack, cell.size), Counter()).update(cell.counts)
    known = [*LEVELS.values()]
    order = sorted({stack for stack, _ in found}, key=lambda s: (known.index(s) if s in known else len(known), s))
    sizes = sorted({size for _, size in found})[:MOST]

    def box(stack: str, size: int) -> Box | None:
        counts = found.get((stack, size))
        by_verdict = {verdict: counts[verdict] for verdict in ORDER if counts[verdict]} if counts else {}
        return Box(urlencode({"tests": visible(stack), "size": size}), by_verdict) if by_verdict else None

    rows = [(stack, [box(stack, size) for size in sizes]) for stack in order[:MOST]]
    return Table("Tests by stack and world size", "stack", [str(size or "none") for size in sizes], rows)


def _owners(report: Report) -> dict[int, str]:
    return {number: test.owner for number, test in enumerate(report.tests) if test.owner}


def _table(title: str, calls: Sequence[CaseReport], row: str, column: str, owners: Mapping[int, str]) -> Table:
    def key(name: str) -> Callable[[CaseReport], dict[str, str]]:
        return lambda each: {name: str(each.size if name == "size" else getattr(each.case, name))}

    def said(each: CaseReport) -> bool:
        return all(value and value != "0" for name in (row, column) for value in key(name)(each).values())

    if "dtype" in (row, column):
        calls = list(_with_dtypes(calls))
    fitting = [each for each in calls if said(each)]
    return _counted(title, _CORNERS.get(row, row), fitting, key(row), key(column), owners, MOST)


def _with_dtypes(calls: Sequence[CaseReport]) -> Iterator[CaseReport]:
    """Yield calls; one without a dtype, of a collective that is not claimed at all, once for each dtype there is."""
    dtypes = dict.fromkeys(each.case.dtype for each in calls if isinstance(each.case, Call) and each.case.dtype)
    for each in calls:
        if isinstance(each.case, Call) and not each.case.dtype:
            for dtype in [*dtypes][:MOST]:
                yield msgspec.structs.replace(each, case=msgspec.structs.replace(each.case, dtype=dtype))
        else:
            yield each


def _counted(
    title: str,
    corner: str,
    cases: Sequence[CaseReport],
    row: Callable[[CaseReport], Mapping[str, str]],
    column: Callable[[CaseReport], Mapping[str, str]],
    owners: Mapping[int, str],
    most: int,
) -> Table:
    """Count cases in rows and columns, each of which is some fields with their values."""
    cells: dict[tuple[tuple[tuple[str, str], ...], ...], list[CaseReport]] = {}
    for each in cases:
        cells.setdefault((tuple(row(each).items()), tuple(column(each).items())), []).append(each)
    rows = sorted({of for of, _ in cells}, key=_place)
    columns = sorted({of for _, of in cells}, key=_place)[:MOST]

    def box(*of: tuple[tuple[str, str], ...]) -> Box | None:
        inside = cells.get(of)
        if inside is None:
            return None
        names = {owners[n] for each in inside if each.verdict == "waived" for n in each.tests if n in owners}
        counts = Counter(each.verdict for each in inside)
        by_verdict = {verdict: counts[verdict] for verdict in CASE_ORDER if counts[verdict]}
        fragment = urlencode({name: visible(value) for name, value in (*of[0], *of[1])})
        return Box(fragment, by_verdict, sorted(names))

    made = [(_name(of), [box(of, other) for other in columns]) for of in rows[:most]]
    return Table(title, corner, [_name(of) for of in columns], made, max(0, len(rows) - most))


def _place(fields: tuple[tuple[str, str], ...]) -> list[tuple[int, int, str]]:
    """Return the place of a row or column: in the order of the vocabulary, numbers by size, others by name."""
    places = []
    for name, value in fields:
        known = KNOWN.get(name, ())
        number = int(value) if value.isascii() and value.isdecimal() else 0
        places.append((known.index(value) if value in known else len(known), number, value))
    return places


def _name(fields: tuple[tuple[str, str], ...]) -> str:
    values = [value for name, value in fields if name != "stack"]
    return "=".join(values)


def legend(tables: Sequence[Table]) -> list[tuple[str, str, str]]:
    """Return the sign, the word and the meaning of each verdict that tables have, worst first."""
    there = {verdict for table in tables for _, cells in table.rows for box in cells if box for verdict in box.counts}
    return [(SIGNS[verdict], verdict, MEANINGS[verdict]) for verdict in SIGNS if verdict in there]


def whole(report: Report) -> dict[str, Any]:
    """Return what the template takes: every table and the legend."""
    calls, stacks, tests = of_calls(report), of_stacks(report), of_tests(report)
    return {
        "any_tried": any(case.count for case in report.cases),
        "calls": calls,
        "stacks": stacks,
        "tests_by_size": tests,
        "legend": legend([*calls, *stacks, tests]),
        "signs": SIGNS,
        "waiting": _did_not_run(report),
    }


def _did_not_run(report: Report) -> dict[str, int]:
    return {v: n for v, n in counted([test.verdict for test in report.tests]).items() if v in _DID_NOT_RUN}
