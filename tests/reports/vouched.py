"""What each means of vouching says of each forgery: makes docs/forgeries.md.

    python tests/reports/vouched.py > docs/forgeries.md

Each forgery is a bundle in which everything that follows from what was forged is made anew, checksums included. Every
cell comes from a check of such a bundle.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from invented import STARTED, Change, change, checkout, records, written
from test_forgeries import FORGERIES, LEFT, ONE, TWO, WAIVED, only_the_drawn, unsupported

from harness.results import CasesDrawn, Challenge, Issued, RunHeader, TorchLacks, parse
from reports import bundle
from reports.bundle import MANIFEST, manifest_of, packed
from reports.rerun import WORSE, compared, population
from reports.signing import problems_of, sign
from reports.verify import Checked, verify

NOW = STARTED + 86400
MADE = Challenge(nonce="ab" * 32, made=int(STARTED) + 900)
SIGNER = "vendor@example.com"
FOUND, UNCHECKED, NOTE, IF_DRAWN, NOTHING = "found", "unchecked", "note", "if drawn", "\N{EN DASH}"
ON_THREE = "dynamo/test_a.py::test_one[3"

GROUPS = {
    "sentence": "facts of the suite",
    "size": "worlds and dtypes",
    "text-left": "evidence in records",
    "waiver-verdicts": "the profile and its waivers",
    "-k": "arguments",
    "given-and-drawn": "the seed",
    "effort": "the number of examples",
    "1970": "times",
    "undeclared-that-passed": "unsupported tests",
    "no-torch": "the rest",
}
"""The group that begins with each of these forgeries."""


BEFORE, DURING, AFTER = "before", "during", "after"


@dataclass(frozen=True)
class Lie:
    """A forgery that contradicts nothing."""

    what: str
    truth: Change
    """What is so, as a change of an honest run."""
    forge: Change = lambda made: None
    """What the bundle says, in the same way."""
    when: str = AFTER
    """:data:`AFTER` the run, :data:`BEFORE` it or :data:`DURING` it, by what an attested workflow executes, too."""


FAILS = change(ONE, verdict="failed", headline="no")


def nothing(made: list[Any]) -> None:
    """No change."""


LIES = (
    Lie("The results are edited: a failed test passed.", FAILS),
    Lie("The results are edited: a crash is the failure that is waived.", change(WAIVED, verdict="crashed", **LEFT)),
    Lie(
        "The results are edited: this PyTorch does not support what a failed test needs, as that test may say.",
        change(ON_THREE, verdict="failed", headline="no"),
        unsupported(ON_THREE, TorchLacks("compass")),
    ),
    Lie("Another suite ran, in which a test asks for less, under the hashes of this one.", FAILS, when=BEFORE),
    Lie("Concord or PyTorch is patched before the run, so that a test passes.", FAILS, when=BEFORE),
    Lie(
        "There was no run: results and cases are invented.",
        change(TWO, cases=CasesDrawn(100, "a" * 16)),
        change(TWO, cases=CasesDrawn(100, "b" * 16)),
        when=BEFORE,
    ),
    Lie(
        "The results are edited: a test's ranks issued fewer collectives.",
        change(ONE, issued=Issued({"all_reduce": 12}, 12)),
        change(ONE, issued=Issued({"all_reduce": 4}, 4)),
    ),
    Lie("The package under test patches Concord or PyTorch during the run, so that a test passes.", FAILS, when=DURING),
    Lie("A seed that was tried out is said to be drawn.", nothing, only_the_drawn(seed="7"), when=DURING),
    Lie("The package under test recognizes Concord, and behaves well only then.", nothing, when=DURING),
)


@dataclass(frozen=True)
class Said:
    """What each means says of a forgery."""

    checksum: str
    alone: str
    checkout: str
    changed: str
    """A signature, if the forgery came after it."""
    signed: str
    """A signature of whoever forged."""
    attestation: str
    challenge: str
    rerun: str


def answering(made: list[Any]) -> None:
    """The run with a random seed answers a challenge."""
    header: RunHeader = made[0]
    if header.seed_drawn:
        header.arguments = ["suites", "-n", "2", "--concord-challenge", "mine.challenge"]
        header.seed, header.challenge = MADE.seed, MADE


def of_changes(*changes: Change) -> dict[str, bytes]:
    """The raw results of two runs with changes."""
    files = {}
    for name, made in (("first", records()), ("second", records("123", drawn=True, later=1000))):
        for each in changes:
            each(made)
        files[name] = written(made)
    return files


def bundled(path: Path, *changes: Change) -> Path:
    """Write a bundle of two runs with changes, and all that follows from them."""
    found = bundle.made(list(of_changes(*changes).items())).files
    path.write_bytes(packed({**found, MANIFEST: manifest_of(found, "0.1.0")}))
    return path


class Vouching:
    """All the means, with a key of their own in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key, self._signers = folder / "key", folder / "signers"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._key)]
        subprocess.run(command, check=True)
        self._signers.write_text(f"{SIGNER} {self._key.with_suffix('.pub').read_text()}")

    def of(self, forge: Change, truth: Change = nothing, when: str = AFTER) -> Said:
        """What each means says of a bundle; ``forge``, ``truth``, ``when``: as in :class:`Lie`.

        An attestation is of a SHA-256, so another file has none. Nothing here asks GitHub.
        """
        path = bundled(self._folder / "forged.zip", forge)
        data = path.read_bytes()
        mine, earlier = self._folder / "forged.sig", self._folder / "earlier.sig"
        mine.write_bytes(sign(data, self._key).signature)
        real = bundled(self._folder / "real.zip", truth).read_bytes()
        earlier.write_bytes(sign(real, self._key).signature)
        here = self._checked(path)
        another = hashlib.sha256(data).hexdigest() != hashlib.sha256(real).hexdigest()
        return Said(
            checksum=FOUND if any("checksum" in line or "manifest" in line for line in here.problems) else NOTHING,
            alone=FOUND if verify(path, "0.1.0", None, NOW).problems else NOTHING,
            checkout=FOUND if here.problems else UNCHECKED if here.unchecked else NOTE if here.notes else NOTHING,
            changed=FOUND if when == AFTER and problems_of(path, earlier, self._signers, SIGNER) else NOTHING,
            signed=FOUND if problems_of(path, mine, self._signers, SIGNER) else NOTHING,
            attestation=FOUND if another and when != DURING else NOTHING,
            challenge=self._challenged(forge),
            rerun=_rerun(forge, truth),
        )

    def _checked(self, path: Path, challenge: Challenge | None = None) -> Checked:
        return verify(path, "0.1.0", checkout(), NOW, challenge=challenge)

    def _challenged(self, forge: Change) -> str:
        """What a challenge says of a forgery of a run that was to answer it."""
        path = bundled(self._folder / "challenged.zip", answering, forge)
        return FOUND if any("challenge" in line for line in self._checked(path, MADE).problems) else NOTHING


def _rerun(forge: Change, truth: Change) -> str:
    """What a second run of everything that may be drawn says, if it comes to the truth."""
    there, here = ([parse(data, name) for name, data in of_changes(each).items()] for each in (forge, truth))
    outcomes = compared(population(there, [test for run in here for test in run.tests]), there, dict(enumerate(here)))
    return IF_DRAWN if any(each.kind == WORSE or each.doubtful for each in outcomes) else NOTHING


COLUMNS = {
    "checksum": "checksums",
    "alone": "the bundle alone",
    "checkout": "checkout",
    "changed": "earlier signature",
    "signed": "forger's signature",
    "attestation": "attestation",
    "challenge": "challenge",
    "rerun": "rerun",
}

EXPLAINED = {
    "checksum": "the checksums in the bundle",
    "alone": "`concord verify` without the suite",
    "checkout": "`concord verify` in a checkout of the suite",
    "changed": (
        "a signature of the bundle as it was before someone changed it; a lie that is older than the bundle has none"
    ),
    "signed": "a signature that the forger made afterwards",
    "attestation": (
        "whether the file has the SHA-256 of the one that `attested.yml` would have made, on a runner of GitHub's; "
        "GitHub was not asked"
    ),
    "challenge": "`concord verify --challenge`, if the run was to answer a challenge",
    "rerun": (
        "`concord verify --rerun`, if the second run comes to the truth; found if the result is drawn "
        "([how likely](vouching.md#how-likely-a-lie-is-found))"
    ),
}
"""What was checked for each column."""

HEAD = """\
# What is found of a forgery

Make this page again:

```sh
python tests/reports/vouched.py > docs/forgeries.md
```

A person who makes a bundle can forge it, and make everything anew that follows: counts, digests, exit status, report,
page and checksums. This page shows what each [means of vouching](vouching.md) says of such a bundle. Every cell comes
from a check of a forged bundle, and `tests/reports/test_vouched.py` compares the page with the checks.
"""


def page(said: Mapping[str, Said], lies: Mapping[str, Said]) -> str:
    """The page; ``said``: of each forgery by name; ``lies``: of each lie."""
    groups: dict[str, list[Said]] = {}
    group = ""
    rows = []
    for name, each in said.items():
        if name in GROUPS:
            group = GROUPS[name]
            rows.append((f"**{group}**", [""] * len(COLUMNS)))
        groups.setdefault(group, []).append(each)
        rows.append((f"`{name}`", list(_cells(each))))
    every = [each for several in groups.values() for each in several]
    summary = [(name, list(_counts(several))) for name, several in [*groups.items(), ("**all**", every)]]
    parts = [
        HEAD,
        "| column | what was checked |\n|---|---|",
        *(f"| {COLUMNS[column]} | {explained} |" for column, explained in EXPLAINED.items()),
        "",
        "## Lies that contradict nothing\n",
        "No check of a file can find these, and nothing finds the last one. A dash says that nothing is found.\n",
        _table("lie", ((what, list(_cells(each))) for what, each in lies.items())),
        f"\n## {len(said)} forgeries that contradict something\n",
        "How many of each group are found:\n",
        _table("what is forged", summary),
        "\n## Each forgery\n",
        "The names are those of `tests/reports/test_forgeries.py`, which has the message for each.\n",
        _table("forgery", rows),
    ]
    return "\n".join(parts) + "\n"


def _cells(said: Said) -> Iterator[str]:
    yield from (getattr(said, column) for column in COLUMNS)


def _counts(several: list[Said]) -> Iterator[str]:
    for column in COLUMNS:
        counts = Counter(getattr(each, column) for each in several)
        told = [f"{counts[FOUND]} of {len(several)}"] if counts[FOUND] else []
        told += [f"{counts[kind]} {kind}" for kind in (UNCHECKED, NOTE, IF_DRAWN) if counts[kind]]
        yield ", ".join(told) or NOTHING


def _table(first: str, rows: Iterable[tuple[str, list[str]]]) -> str:
    lines = [f"| {' | '.join([first, *COLUMNS.values()])} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join([name, *cells])} |" for name, cells in rows)])


def made(folder: Path) -> str:
    """Make the page, in a folder for its files."""
    vouching = Vouching(folder)
    said = {name: vouching.of(forge) for name, (forge, _) in FORGERIES.items()}
    lies = {lie.what: vouching.of(lie.forge, lie.truth, lie.when) for lie in LIES}
    return page(said, lies)


if __name__ == "__main__":
    bundle.page = lambda report: "no page"  # no means looks at it
    with tempfile.TemporaryDirectory() as temporary:
        sys.stdout.write(made(Path(temporary)))
