"""The page of a report, which opens offline, with the answer on top and the evidence below."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import jinja2
import markupsafe

from harness.profiles import NEVER_RUN
from harness.requirements import LEVELS
from harness.results import RankEvidence
from reports import answer, embedded, matrix
from reports.model import CASE_ORDER, ORDER, VERSION, Report, ReportError, RequirementReport, TestReport
from reports.text import duration, moment, plural, shortened, visible

LONGEST = 20_000
"""The number of characters of one rank's output, or of one stack, on the page."""
_SHORTER = 500
"""The same if there is too much evidence for a page."""
_SHORTEST = 200
"""The same for a test that is waived for a known defect."""
_LONGEST_REPRODUCER = 100_000
MOST = 32 << 20
"""The largest number of characters of a page.  For two runs of all 2,341 tests, all passed, it has 0.8 million."""
_TEMPLATES = Path(__file__).parent / "templates"
_SLOWEST = 12
KNOWN = {"verdicts": ORDER, "case_verdicts": CASE_ORDER, "report_version": VERSION, "field_order": matrix.KNOWN}
"""What scripts of pages know of reports."""


def page(report: Report) -> str:
    """Render the page of a report, in which all texts of the report are escaped.

    If the page would exceed :data:`MOST` characters, the texts from ranks are cut shorter.
    Errors: :class:`ReportError` if that is not enough.
    """
    lengths = (_SHORTER,) if _much(report) else (LONGEST, _SHORTER)
    for longest in lengths:
        rendered = _rendered(report, longest)
        if rendered is not None:
            return rendered
    raise ReportError(f"a page of this report would have more than {MOST >> 20} MiB")


def comparison_page(before: Report, after: Report) -> str:
    """Render the page that compares two reports, in which all texts of the reports are escaped.

    Errors: :class:`ReportError` if the page would exceed :data:`MOST` characters.
    """
    values = {
        "before": before,
        "after": after,
        "before_data": embedded.data(before),
        "after_data": embedded.data(after),
    }
    rendered = environment(_SHORTER).get_template("compare.html").render(**values, **KNOWN)
    if len(rendered) > MOST:
        raise ReportError(f"a page of this comparison would have more than {MOST >> 20} MiB")
    return rendered


def _much(report: Report) -> bool:
    """Whether the texts of all tests on a page would be longer than half of the longest page."""
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
    """Render the page with texts cut to ``longest`` characters; None if it is too large."""
    tests = {test.nodeid: test for test in report.tests}
    of_pytorch, of_others = answer.waived_tests(report)
    slowest = sorted(report.tests, key=lambda test: (-test.seconds, test.nodeid))[:_SLOWEST]
    pieces = (
        environment(longest)
        .get_template("report.html")
        .generate(
            r=report,
            answer=answer.answer(report),
            kind=answer.kind(report),
            explained=answer.explained(report),
            of_pytorch=of_pytorch,
            of_others=of_others,
            groups=groups(report, tests),
            loose=[test for test in report.tests if not test.requirements],
            stacks_there=list(dict.fromkeys(test.stack for test in report.tests if test.stack)),
            numbers={test.nodeid: number for number, test in enumerate(report.tests)},
            **matrix.whole(report),
            page_data=embedded.data(report),
            **KNOWN,
            order=ORDER,
            slowest=slowest,
            undeclared=report.counts.get("undeclared", 0),
            foreign=report.foreign,
            never_run=NEVER_RUN,
        )
    )
    written, length = [], 0
    for piece in pieces:
        written.append(piece)
        length += len(piece)
        if length > MOST:
            return None
    return "".join(written)


@functools.cache
def environment(longest: int) -> jinja2.Environment:
    """Return the environment that renders pages; ``longest``: characters of a text from ranks."""
    most = _LONGEST_REPRODUCER + 1000 if longest == LONGEST else 10 * longest  # characters of any text
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
        cut=lambda text, known=False: shortened(text, _SHORTEST if known else longest),
        cut_file=lambda text: shortened(text, _LONGEST_REPRODUCER),
        by_function=by_function,
        first_rank=_first_rank,
        plain=_plain,
        plural=plural,
        state=answer.state,
        waivers=answer.waivers,
        web=web,
        visible=visible,
    )
    return environment


def _plain(test: TestReport) -> bool:
    """Whether it passed and there is nothing more to say of it."""
    return test.verdict == "passed" and not (test.headline or test.reason or test.ranks or test.text)


def _function(test: TestReport) -> str:
    return test.nodeid.partition("[")[0]


def by_function(tests: Iterable[TestReport]) -> list[tuple[str, list[tuple[str, TestReport]]]]:
    """Group plain tests of one function that follow each other, so that a page has its name once.

    The result has the function and its tests with their parameters, or, of any other test, "" and it with its nodeid.
    """
    grouped: list[tuple[str, list[tuple[str, TestReport]]]] = []
    for (function, plain), alike in itertools.groupby(tests, lambda test: (_function(test), _plain(test))):
        several = list(alike)
        if plain and len(several) > 1:
            grouped.append((function, [(test.nodeid.removeprefix(function), test) for test in several]))
        else:
            grouped.append(("", [(test.nodeid, test) for test in several]))
    return grouped


def _first_rank(ranks: list[RankEvidence]) -> list[RankEvidence]:
    """Return the rank that failed first, or the first in the list if none is marked so; empty if there are none."""
    return [rank for rank in ranks if rank.first][:1] or ranks[:1]


def web(link: str) -> bool:
    """Whether a page may have this link: only http and https are allowed."""
    return urlsplit(link).scheme in ("http", "https") if link.isprintable() else False


def groups(
    report: Report, tests: dict[str, TestReport]
) -> list[tuple[str, str, list[tuple[RequirementReport, list[TestReport]]]]]:
    """Group requirements: each level, its stack, and its requirements with their tests, worst first."""
    grouped = []
    known = {*LEVELS}
    for level in [*LEVELS, ""]:
        mine = [r for r in report.requirements if (r.level if r.level in known else "") == level]
        mine.sort(key=lambda r: (ORDER.index(r.verdict), r.id))
        pairs = [
            (r, sorted((tests[n] for n in r.tests), key=lambda t: (ORDER.index(t.verdict), t.nodeid))) for r in mine
        ]
        if pairs:
            grouped.append((level, LEVELS.get(level, ""), pairs))
    return grouped
