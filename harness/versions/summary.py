"""The summary at the top of docs/findings.md, made of the known defects.

``python -m harness.versions.summary`` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from harness.profiles.vocabulary import KINDS
from harness.safe_io.writing import write_whole
from harness.versions.catalog import ROWS, Catalog, catalog, counts

BEGIN = "<!-- Written by: python -m harness.versions.summary -->"
END = "<!-- End of what it writes -->"


def summary(of: Catalog) -> str:
    """Render the number of known defects by area and kind as Markdown."""
    lines = [
        BEGIN,
        "",
        f"| area | {' | '.join(KINDS)} | all | in {of.newest} | reported |",
        "|---" + "|---:" * (len(KINDS) + 3) + "|",
    ]
    for each in counts(of):
        numbers = [*each.kinds.values(), each.total, each.there, each.reported]
        lines.append(f"| {each.area or 'all'} | {' | '.join(str(number or '') for number in numbers)} |")
    return "\n".join([*lines, "", END])


def with_summary(page: str, text: str) -> str:
    """Return a page with another summary.  Errors: ValueError if the page has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{ROWS} has no lines {BEGIN} and {END}")
    return before + text + after


if __name__ == "__main__":
    page = Path.cwd() / ROWS
    write_whole(page, with_summary(page.read_text(), summary(catalog(Path.cwd()))))
