"""What a report answers, in the words with which the terminal, the page and Markdown begin."""

from __future__ import annotations

from collections.abc import Sequence

from harness.requirements import LEVELS
from reports.model import CONFORMANT, NOT_CONFORMANT, NOT_SHOWN, LevelReport, Report
from reports.text import plural

PARTIAL = "partial"
"""The kind of an answer that is not shown, of which a part is."""


def kind(report: Report) -> str:
    """Return ``conformant``, ``not conformant``, ``not shown`` or ``partial``."""
    if report.conformant:
        return CONFORMANT
    tested = _tested(report)
    if tested and all(level.answer == CONFORMANT for level in tested):  # P alone
        return CONFORMANT
    if any(level.answer == NOT_CONFORMANT for level in tested):
        return NOT_CONFORMANT
    return PARTIAL if _partial(tested) else NOT_SHOWN


def answer(report: Report) -> str:
    """Say at which level the backend is conformant, which is what customers ask first."""
    tested = _tested(report)
    match kind(report):
        case "conformant":
            level = report.conformant or tested[0].id
            return f"Conformant at {level} ({LEVELS[level]})"
        case "not conformant":
            first = next(level for level in tested if level.answer == NOT_CONFORMANT)
            if first.id == min(LEVELS):
                return "Not conformant at any level"
            return f"Not conformant at {first.id} ({first.stack})"
        case "partial":
            return _partial(tested)
    return "Not shown at any level" if report.problems else "Not shown yet at any level"


def explained(report: Report) -> str:
    """Say what is wrong, or whether anything is; empty if nothing has to be said.

    It may contain names of tests, so show it as text from elsewhere.
    """
    above = [level for level in _tested(report) if level.answer != CONFORMANT]
    match kind(report):
        case "conformant":
            return " ".join(f"{level.id} is {state(level)}." for level in above[:1])
        case "not conformant":
            reds = next(level.reds for level in _tested(report) if level.answer == NOT_CONFORMANT)
            return f"{plural(len(reds), 'thing')} {'is' if len(reds) == 1 else 'are'} wrong. {reds[0]}" if reds else ""
        case "partial":
            return "Nothing is wrong in what ran. It is less than the level takes, so it is not the level."
    if report.problems:
        return "Nothing counts as long as the runs have problems."
    return "Nothing is wrong in what ran. Something is missing."


def state(level: LevelReport) -> str:
    """Return the answer for a level in a word or two: ``not run`` for one without a test."""
    if level.partial:
        return PARTIAL
    return level.answer if level.tests or level.answer == CONFORMANT else "not run"


def waivers(level: LevelReport) -> str:
    """Say of how many requirements of a level tests are waived, PyTorch's own defects apart; empty if of none."""
    parts = []
    if level.waived_of_pytorch:
        parts.append(f"{plural(level.waived_of_pytorch, 'requirement')} for defects of PyTorch's own")
    if level.waived_of_others:
        parts.append(f"{level.waived_of_others} for others (at most {level.may_be_waived})")
    return f"Waived: {', '.join(parts)}." if parts else ""


def waived_tests(report: Report) -> tuple[int, dict[str, int]]:
    """Return how many tests are waived for PyTorch's own defects, and how many for those of each other owner."""
    of_pytorch = sum(len(waiver.tests) for waiver in report.waivers if waiver.of_pytorch)
    others: dict[str, int] = {}
    for waiver in report.waivers:
        if not waiver.of_pytorch:
            name = waiver.owner or "an owner that the results do not say"
            others[name] = others.get(name, 0) + len(waiver.tests)
    return of_pytorch, others


def _tested(report: Report) -> list[LevelReport]:
    return [level for level in report.levels if level.tests]


def _partial(tested: Sequence[LevelReport]) -> str:
    """Return the name of the highest level that is partial; empty if a level of which tests ran is neither."""
    chain = [level for level in tested if level.id != "P"] or tested
    if not all(level.partial or level.answer == CONFORMANT for level in chain):
        return ""
    return max((level for level in chain if level.partial), key=lambda level: level.id).partial if chain else ""
