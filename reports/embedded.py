"""The data of a report that a page carries for its script: its cases, and what a comparison needs.

A page can be compared with another one in a browser.  So each has what :mod:`reports.compare` compares, in a form that
is smaller than the report as JSON: each word, each verdict and the name of each test function is there once.
"""

from __future__ import annotations

from typing import Any

import markupsafe
import msgspec

from reports import answer
from reports.compare import surroundings
from reports.model import CASE_ORDER, ORDER, Report
from reports.text import visible

SCHEMA = "concord.page"
VERSION = 1
_LONGEST = 200
"""Characters of a headline or of a fact that the data has."""
_FINE = ("passed", "undeclared", "unsupported")


def data(report: Report) -> markupsafe.Markup:
    """Return the data of a report as JSON, in which no text can end the script."""
    everything = {
        "schema": SCHEMA,
        "version": VERSION,
        "profile": _short(report.profile),
        "torch": _short(report.environment.get("torch", "")),
        "made": report.made,
        "conformant": _short(report.conformant),
        "minimums": report.levels_version,
        "around": [[_short(name), _short(value)] for name, value in surroundings(report).items()],
        "levels": [[_short(level.id), _short(level.stack), answer.state(level)] for level in report.levels],
        "order": ORDER,
        "tests": _tests(report),
        **_cases(report),
    }
    text = msgspec.json.encode(everything).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return markupsafe.Markup(text)  # noqa: S704 - nothing in it is markup, as replaced above


def _short(text: str) -> str:
    return visible(text[:_LONGEST])


def _tests(report: Report) -> list[list[Any]]:
    """Return tests by function: its name, then the parameters, the verdict and, if it is bad, the headline of each."""
    functions: dict[str, list[Any]] = {}
    for test in report.tests:
        stem, bracket, parameters = test.nodeid.partition("[")
        entry = functions.setdefault(stem, [visible(stem)])
        verdict = ORDER.index(test.verdict)
        headline = [_short(test.headline)] if test.headline and test.verdict not in _FINE else []
        entry.append([visible(bracket + parameters), verdict, *headline])
    return list(functions.values())


def _cases(report: Report) -> dict[str, Any]:
    """Return words, verdicts and cases.

    A case is its kind and fields as numbers of words, and then for each world size: the size, the verdict, how often it
    was executed, and its tests.
    """
    words: dict[str, int] = {}
    cases: dict[tuple[str, ...], list[Any]] = {}
    for each in report.cases:
        entry = cases.get(each.words)
        if entry is None:
            numbers = [words.setdefault(visible(word), len(words)) for word in each.words]
            entry = cases[each.words] = [numbers]
        entry.append([each.size, CASE_ORDER.index(each.verdict), each.count, *each.tests])
    return {"words": list(words), "verdicts": CASE_ORDER, "cases": list(cases.values())}
