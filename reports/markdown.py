"""The report in Markdown, for the summary of a CI job."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.profiles import NEVER_RUN
from harness.results import BAD
from reports.answer import answer, explained, state, waived_tests, waivers
from reports.model import ORDER, LevelReport, Report, TestReport
from reports.text import moment, plural, visible

LARGEST = 1 << 20
"""The largest summary of a step that GitHub accepts, in bytes."""
_LONGEST = 300
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>#!|~&@$]|:(?=//)|(?<=[a-z])\.(?=[a-z]{2,})|^[-+=]")
"""Characters with a meaning in Markdown, and those from which GitHub makes links."""


def markdown(report: Report, *, largest: int = LARGEST) -> str:
    """Format a report in at most ``largest`` bytes; if failed tests at the end do not fit, say how many."""
    lines = list(_head(report))
    bad = [test for test in report.tests if test.verdict in BAD]
    waived = list(_waived(report))
    size = sum(len(line.encode()) + 1 for line in lines) + 200  # for the note
    if bad:
        title = ["", f"### {plural(len(bad), 'test')} ended badly", ""]
        lines += title
        size += sum(len(line) + 1 for line in title)
    for number, test in enumerate(bad):
        line = _test(test)
        size += len(line.encode()) + 1
        if size > largest:
            lines.append(f"- … and {len(bad) - number} more, which did not fit here; the report has all of them")
            break
        lines.append(line)
    if waived and size + sum(len(line.encode()) + 1 for line in waived) <= largest:
        lines += waived
    text = "\n".join(lines) + "\n"
    if len(text.encode()) <= largest:
        return text
    cut = text.encode()[: largest - 100].decode(errors="ignore").rpartition("\n")[0]
    return f"{cut}\n\nCut here: the rest did not fit; the report has all of it.\n"


def escaped(text: str) -> str:
    """Return text on one line, without meaning in Markdown or HTML and without mentions of GitHub users."""
    line = " ".join(visible(text).split())
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
    return _SPECIAL.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)


def _head(report: Report) -> Iterable[str]:
    yield f"## {answer(report)}"
    yield ""
    yield from _next(report)
    where = f"{escaped(f'{report.backend} on {report.device}')}, " if report.backend else ""
    yield (
        f"{escaped(report.profile or 'no profile')}: {where}torch "
        f"{escaped(report.environment.get('torch', 'not said'))}, {moment(report.made)}, "
        f"{_waivers(report)}"
    )
    yield ""
    if report.never_run:
        yield f"The profile: {NEVER_RUN}."
        yield ""
    for problem in report.problems:
        yield f"- {escaped(problem)}"
    for name, where in report.foreign.items():
        yield f"- plug-in of neither pytest nor Concord: {escaped(name)} ({escaped(where)})"
    if report.problems or report.foreign:
        yield ""
    columns = [verdict for verdict in ORDER if verdict in report.counts]
    yield f"| level | stack | answer | {' | '.join(columns)} |" if columns else "| level | stack | answer |"
    yield f"|{'---|' * (3 + len(columns))}"
    for level in report.levels:
        if level.tests:
            cells = " | ".join(str(level.tests.get(verdict, "")) for verdict in columns)
            yield f"| {level.id} | {level.stack} | {state(level)} | {cells} |"
    for level in report.levels:
        if level.tests:
            yield from _level(level, len(report.problems))


def _next(report: Report) -> Iterable[str]:
    """Yield what the answer means, and the next command."""
    if explained(report):
        yield escaped(explained(report))
        yield ""
    for number, step in enumerate(report.steps):
        yield f"{'Then' if number else 'Next'}: {escaped(step.do)}"
        yield ""
        if step.command:  # an indented block of code, which nothing on one line can end
            yield f"    {' '.join(visible(step.command).split())}"
            yield ""


def _level(level: LevelReport, problems: int) -> Iterable[str]:
    """Yield the notes and reasons of a level; ``problems``: how many of its reasons are the runs' problems."""
    parts = [("", level.notes), ("wrong", level.reds), ("missing", level.missing[problems:])]
    parts.insert(1, ("", [waivers(level)] if waivers(level) else []))
    lines = [f"- {f'{what}: ' if what else ''}{escaped(why)}" for what, sentences in parts for why in sentences]
    if lines:
        yield from ("", f"{level.partial or level.id}:", "", *lines)


def _waivers(report: Report) -> str:
    """Return how many tests are waived, PyTorch's own defects apart."""
    of_pytorch, of_others = waived_tests(report)
    counts = [f"{plural(count, 'test')} for defects of {escaped(owner)}" for owner, count in of_others.items()]
    counts += [f"{plural(of_pytorch, 'test')} for defects of PyTorch's own"] if of_pytorch else []
    return ", ".join([plural(len(report.waivers), "waiver"), *counts])


def _waived(report: Report) -> Iterable[str]:
    """Yield the waived tests under the owners of their defects."""
    for owner, count in report.owners.items():
        yield ""
        yield f"### {plural(count, 'test')} waived for known defects of {escaped(owner)}"
        yield ""
        for waiver in report.waivers:
            if waiver.owner == owner:
                name = f"{escaped(waiver.defect)}: " if waiver.defect else ""
                yield f"- {name}{escaped(waiver.reason)}: {', '.join(map(escaped, waiver.tests))}"


def _test(test: TestReport) -> str:
    said = f": {escaped(test.headline)}" if test.headline else ""
    return f"- {test.verdict} {escaped(test.nodeid)}{said}"
