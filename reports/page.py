"""A report as one page that opens offline: the answer on top, the evidence below."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import jinja2

from harness.results import LEVELS
from reports.model import ORDER, Cell, Report, RequirementReport, TestReport
from reports.text import duration, moment, plural, shortened, visible

LONGEST = 20_000
"""Characters of one rank's output, or of one stack, that the page has."""
EVERY_DTYPE = "several or none"
_TEMPLATES = Path(__file__).parent / "templates"
_SLOWEST = 12


def page(report: Report) -> str:
    """The page of a report.  Whatever is in it stays text."""
    tests = {test.nodeid: test for test in report.tests}
    slowest = sorted(report.tests, key=lambda test: (-test.seconds, test.nodeid))[:_SLOWEST]
    return (
        _environment()
        .get_template("report.html")
        .render(
            r=report,
            answer=answer(report),
            groups=groups(report, tests),
            loose=[test for test in report.tests if not test.requirements],
            tables=tables(report.matrix),
            order=ORDER,
            slowest=slowest,
            waived=report.counts.get("waived", 0),
            undeclared=report.counts.get("undeclared", 0),
            foreign=foreign(report),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters.update(
        moment=moment,
        duration=duration,
        cut=lambda text, longest=LONGEST: shortened(text, longest),
        plural=plural,
        web=web,
        visible=visible,
    )
    return environment


def answer(report: Report) -> str:
    """What a customer asks first, in a sentence."""
    if report.conformant:
        return f"Conformant at {report.conformant} ({LEVELS[report.conformant]})"
    return "Not conformant at any level"


def foreign(report: Report) -> dict[str, str]:
    """The plug-ins of some run that are neither pytest's nor Concord's, and where they are from."""
    return {name: where for run in report.runs for name, where in run.foreign.items()}


def web(link: str) -> bool:
    """Whether a link is one that a page may lead to."""
    return urlsplit(link).scheme in ("http", "https") if link.isprintable() else False


def groups(
    report: Report, tests: dict[str, TestReport]
) -> list[tuple[str, str, list[tuple[RequirementReport, list[TestReport]]]]]:
    """Level, its stack, and its requirements with their tests, the worst first."""
    found = []
    known = {*LEVELS}
    for level in [*LEVELS, ""]:
        mine = [r for r in report.requirements if (r.level if r.level in known else "") == level]
        mine.sort(key=lambda r: (ORDER.index(r.verdict), r.id))
        pairs = [
            (r, sorted((tests[n] for n in r.tests), key=lambda t: (ORDER.index(t.verdict), t.nodeid))) for r in mine
        ]
        if pairs:
            found.append((level, LEVELS.get(level, ""), pairs))
    return found


Table = tuple[str, list[int], list[tuple[str, list[Cell | None]]]]


def tables(matrix: Sequence[Cell]) -> list[Table]:
    """For each stack: its world sizes, and for each dtype the cells of these."""
    found = []
    for stack in dict.fromkeys([*LEVELS.values(), *(c.stack for c in matrix)]):
        mine = {(c.dtype, c.size): c for c in matrix if c.stack == stack}
        sizes = sorted({size for _, size in mine})
        dtypes = sorted({dtype for dtype, _ in mine})
        if mine:
            found.append((stack, sizes, [(dtype, [mine.get((dtype, size)) for size in sizes]) for dtype in dtypes]))
    return found
