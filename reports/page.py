"""A report as one page that opens offline: the answer on top, the evidence below."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import jinja2
import markupsafe

from harness.requirements import LEVELS
from reports.model import ORDER, Cell, Report, ReportError, RequirementReport, TestReport
from reports.text import duration, moment, plural, shortened, visible

LONGEST = 20_000
"""Characters of one rank's output, or of one stack, that the page has."""
_SHORTER = 500
"""How many it has where there is too much evidence for a page."""
_LONGEST_REPRODUCER = 100_000
MOST = 32 << 20
"""Characters of a page; one of two runs of all 2,341 tests, all of them passed, has 0.8 million."""
EVERY_DTYPE = "several or none"
_TEMPLATES = Path(__file__).parent / "templates"
_SLOWEST = 12


def page(report: Report) -> str:
    """The page of a report.  Whatever is in it stays text.

    Where everything that ranks said would be more than :data:`MOST` characters, each of their texts is cut shorter.
    Errors: :class:`ReportError` if that is not enough.
    """
    lengths = (_SHORTER,) if _much(report) else (LONGEST, _SHORTER)
    for longest in lengths:
        found = _rendered(report, longest)
        if found is not None:
            return found
    raise ReportError(f"a page of this report would have more than {MOST >> 20} MiB")


def _much(report: Report) -> bool:
    """Whether the texts of all tests, as a page has them, are more than half of what a page may have."""
    left = MOST // 2
    for test in report.tests:
        for text in _texts(test):
            left -= max(1, len(test.requirements)) * len(markupsafe.escape(visible(text[-LONGEST:])))
            if left < 0:
                return True
    return False


def _texts(test: TestReport) -> Iterator[str]:
    yield from (test.headline, test.reason, test.text)
    if test.reproducer is not None:
        yield from (test.reproducer.text, test.reproducer.command)
    for rank in test.ranks:
        yield from (rank.what, rank.text, rank.stack, rank.output, *rank.collectives)


def _rendered(report: Report, longest: int) -> str | None:
    """The page, with texts cut to a length; None if it is too large."""
    tests = {test.nodeid: test for test in report.tests}
    slowest = sorted(report.tests, key=lambda test: (-test.seconds, test.nodeid))[:_SLOWEST]
    pieces = (
        _environment(longest)
        .get_template("report.html")
        .generate(
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
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > MOST:
            return None
    return "".join(found)


@functools.cache
def _environment(longest: int) -> jinja2.Environment:
    """How pages are written; ``longest``: characters of a text of ranks."""
    most = _LONGEST_REPRODUCER + 1000 if longest == LONGEST else 10 * longest  # of anything that is written
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(shortened(value, most)) if type(value) is str else value,
    )
    environment.filters.update(
        moment=moment,
        duration=duration,
        cut=lambda text: shortened(text, longest),
        cut_file=lambda text: shortened(text, _LONGEST_REPRODUCER),
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
