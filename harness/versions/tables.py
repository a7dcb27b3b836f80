"""What the tables of pages say: the rows of docs/findings.md, and the requirements of each test."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain

from harness.profiles.model import pattern

_CELL = re.compile(r"(?<!\\)\|")
_SCRIPT = re.compile(r"\]\(findings/([\w.-]+)\.py\)")
_REQUIREMENT = re.compile(r"`([A-Z][A-Z0-9-]+-\d{2,})`")
_TEST = re.compile(r"\[`([^`\[]+)(?:\[([^`]*)\])?`\]\((?:\.\./)+([^)\s]+)\)")


@dataclass(frozen=True)
class Row:
    """A row of docs/findings.md."""

    sentence: str
    scripts: tuple[str, ...]
    """The names of its scripts, without their suffix."""


def rows(page: str) -> list[Row]:
    """Return the rows of docs/findings.md: what each is about, and its scripts.  Other lines are passed over."""
    found = []
    for cells in _cells(page):
        scripts = tuple(_SCRIPT.findall(cells[1])) if len(cells) > 1 else ()
        if scripts:
            found.append(Row(cells[0], scripts))
    return found


@dataclass(frozen=True)
class Proof:
    """That a test proves a requirement."""

    requirement: str
    sentence: str
    only: tuple[str, ...] = ()
    """The parameters of its instances that do; empty: all."""


@dataclass
class Standard:
    """The requirements of docs/requirements, by the file and the function of their tests."""

    proofs: dict[str, dict[str, list[Proof]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def of(self, globs: Iterable[str]) -> dict[str, str]:
        """Return the requirements of tests, given as globs of node ids, with their sentences."""
        found: dict[str, str] = {}
        for glob in globs:
            file, _, rest = glob.partition("::")
            name = rest.partition("[")[0]
            for function, proofs in self.proofs.get(file, {}).items():
                if fnmatchcase(function, name):
                    certain = [proof for proof in proofs if _proves(proof, glob, f"{file}::{function}")]
                    found |= {proof.requirement: proof.sentence for proof in certain or proofs}
        return found


def standard(pages: Iterable[str]) -> Standard:
    """Return the requirements of the pages in docs/requirements.  Lines that are no rows of tables are passed over."""
    known = Standard()
    for cells in chain.from_iterable(map(_cells, pages)):
        named = _REQUIREMENT.match(cells[0])
        if named is None or len(cells) < 4:
            continue
        sentence = cells[1].replace("\\", "")
        for function, only, file in _TEST.findall(cells[3]):
            proof = Proof(named[1], sentence, tuple(only.split(", ")) if only else ())
            known.proofs[file][function].append(proof)
    return known


def _cells(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in _CELL.split(line.strip().strip("|"))]


def _proves(proof: Proof, glob: str, function: str) -> bool:
    """Whether an instance that proves the requirement is among those of a glob, whatever its world."""
    if not proof.only or "[" not in glob:
        return True
    match = pattern(glob).match
    return any(match(f"{function}[2ranks-{each}]") or match(f"{function}[{each}]") for each in proof.only)
