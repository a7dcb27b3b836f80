"""Links in README, CONTRIBUTING, CHANGELOG and docs/: linked files and anchors exist."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("fixtures/vendors/*/README.md")])

_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]\n]+\]: *<?(\S+?)>?(?:\s|$)", re.MULTILINE)
_CODE = re.compile(r"(`+)(?:(?!\1|\n\s*\n).)*+\1(?!`)", re.DOTALL)
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
_FENCE = re.compile(r"^ *(`{3,}|~{3,})(.*)$")
_EXPLICIT = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def prose_of(page: str) -> list[tuple[int, str]]:
    """Return the lines of a page outside of fenced blocks, each with its number from 1."""
    lines: list[tuple[int, str]] = []
    fence = ""
    for number, line in enumerate(page.splitlines(), 1):
        mark = _FENCE.match(line)
        if mark and not fence and not (mark[1][0] == "`" and "`" in mark[2]):
            fence = mark[1]
        elif mark and fence and mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
        elif not fence:
            lines.append((number, line))
    return lines


def slug(heading: str) -> str:
    """Return GitHub's anchor for a heading: lower case, punctuation dropped, each space a hyphen."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return "".join(c for c in text.strip().lower() if c in "- " or _is_word(c)).replace(" ", "-")


def _is_word(character: str) -> bool:
    """Return whether it is a letter, a mark, a decimal digit or an underscore; unlike ``\\w``, not a superscript."""
    category = unicodedata.category(character)
    return category[0] in "LM" or category in {"Nd", "Pc"}


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page; a repeated heading gets ``-1``, ``-2``, … appended, as on GitHub."""
    anchors: set[str] = set()
    times: Counter[str] = Counter()
    for _, line in prose_of(page):
        anchors.update(_EXPLICIT.findall(line))
        heading = _HEADING.match(line)
        if heading:
            name = slug(heading[1])
            anchors.add(f"{name}-{times[name]}" if times[name] else name)
            times[name] += 1
    return anchors


def links_of(page: str) -> list[tuple[int, str]]:
    """Return the targets that a page links to, outside of code, each with its line; a link may go over two lines."""
    lines = [""] * (len(page.splitlines()) + 1)
    for number, line in prose_of(page):
        lines[number] = line
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), "\n".join(lines))
    matches = [*_LINK.finditer(text), *_REFERENCE.finditer(text)]
    return sorted((text.count("\n", 0, match.start(1)), match[1]) for match in matches)


@cache
def anchors_in(path: Path) -> set[str]:
    """Return the anchors of a file."""
    return anchors_of(path.read_text())


def broken(path: Path, page: str) -> list[str]:
    """Return a sentence for each link of ``page``, the text of the file ``path``, that leads nowhere."""
    sentences: list[str] = []
    for number, target in links_of(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        where = f"{path.name}:{number}: {target}"
        if file != path and not file.exists():
            sentences.append(f"{where}: there is no such file")
        elif not file.is_relative_to(ROOT):
            sentences.append(f"{where}: leads out of the repository")
        elif anchor and file.suffix == ".md":
            known = anchors_of(page) if file == path else anchors_in(file)
            if anchor not in known:
                sentences.append(f"{where}: {file.name} has no such heading")
    return sentences


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file in the repository, and every anchor a heading in it."""
    assert broken(path, path.read_text()) == []


def linked(page: Path) -> set[Path]:
    """Return the files that a page links to."""
    return {(page.parent / target.partition("#")[0]).resolve() for _, target in links_of(page.read_text())}


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links to every page below docs/, or to the README of its folder, which does."""
    index = ROOT / "docs" / "README.md"
    reached = {index, *linked(index)}
    reached |= {page for readme in reached if readme.name == "README.md" for page in linked(readme)}
    assert [str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md") if page not in reached] == []


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("What it costs", "what-it-costs"),
        ("What it can't find", "what-it-cant-find"),
        ("What `concord report` writes", "what-concord-report-writes"),
        ("L1, L2 & L3", "l1-l2--l3"),
        ("tp_extension: the [TP](tp.md) extension", "tp_extension-the-tp-extension"),
        ("0.1.0 (unreleased)", "010-unreleased"),
        ("Größe: € u²", "größe--u"),
    ],
)
def test_slugs_are_those_of_github(heading: str, expected: str) -> None:
    """A slug keeps letters, digits, hyphens and underscores."""
    assert slug(heading) == expected


def test_repeated_headings_are_numbered() -> None:
    """The second of two equal headings ends with -1; headings in code are none."""
    assert anchors_of("# A\n## B\n```sh\n# C\n```\n## B\n") == {"a", "b", "b-1"}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("[x](#here)\n# Here", []),
        ("[x](https://example.com/nowhere)", []),
        ("`[x](nowhere.md)` and\n```\n[x](nowhere.md)\n```", []),
        ("``a ` [x](nowhere.md)``", []),
        ("`a\nb` [x\ny](nowhere.md)", ["page.md:3: nowhere.md: there is no such file"]),
        ("[x](README.md#what-it-costs)", []),
        ("[x](#there)", ["page.md:1: #there: page.md has no such heading"]),
        ("\n[x](nowhere.md)", ["page.md:2: nowhere.md: there is no such file"]),
        ("[x]: nowhere.md", ["page.md:1: nowhere.md: there is no such file"]),
        ("[x](README.md#nothing)", ["page.md:1: README.md#nothing: README.md has no such heading"]),
        ("[x](..)", ["page.md:1: ..: leads out of the repository"]),
    ],
)
def test_broken_links_are_named(page: str, expected: list[str]) -> None:
    """Each sentence has the page, the line and the target; code and addresses are left alone."""
    assert broken(ROOT / "page.md", page) == expected
