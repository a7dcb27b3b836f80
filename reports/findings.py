"""The page of known defects, which opens offline: how many of each kind are where, and each with what is known of it.

The page is one file, made only from the plain data of :mod:`harness.versions.catalog`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reports.page import LONGEST, environment

_GITHUB = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)/(?:issues|pull|discussions)/(\d+)\b")
MARKS: Mapping[str, str] = {"wrong": "failed", "hang": "hung", "crash": "crashed", "error": "waived"}
"""The class of the mark of a kind; any other kind has none."""
FILES = 15
"""The number of files of PyTorch that are shown at once; a click shows the others."""


def page(view: Mapping[str, Any]) -> str:
    """Render the page as one HTML document, in which all texts are escaped."""
    highest = max((number for area in view["counts"][:-1] for number in area["kinds"].values()), default=0) or 1

    def heat(number: int) -> int:
        """The share of a cell's color, in percent.  The root keeps small numbers apart from none."""
        return round(100 * math.sqrt(number / highest))

    return (
        environment(LONGEST)
        .get_template("findings.html")
        .render(**view, marks=MARKS, heat=heat, report_of=report_of, short=short(view["versions"]), SHOWN=FILES)
    )


def report_of(link: str) -> str:
    """Return how a report is called: ``pytorch#192920`` for one on GitHub, or its address."""
    found = _GITHUB.match(link)
    return f"{found[2]}#{found[3]}" if found else link


def short(versions: Sequence[str]) -> dict[str, str]:
    """Return each version without its patch, as ``2.15`` for ``2.15.0``, or whole if two would be the same."""
    minor = {version: ".".join(version.split(".")[:2]) for version in versions}
    return minor if len({*minor.values()}) == len(minor) else {version: version for version in versions}
