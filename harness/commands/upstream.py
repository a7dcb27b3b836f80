"""PyTorch's own distributed tests: which requirements ask what each of them asks, as tables and as pages.

The command ``concord upstream`` writes docs/upstream/ from fixtures/upstream/*.toml, which people keep.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.commands.outputs import INDEX, Check, PagesFolder, pages_out, require_folder
from harness.commands.refusing import bad
from harness.commands.tables import TableError, document, escaped, read_all, words
from harness.requirements import STACK_BY_PREFIX

FOLDER = "fixtures/upstream"
PAGES = "docs/upstream"
GAP = "gap"
KINDS = {
    "accelerator": "can only be seen on an accelerator: streams, memory of the device, kernels, what a library does",
    "internal": "asserts a private structure, the text of a log, or generated code, on which no user relies",
    "newer": "asks for what no release of PyTorch has",
    "outside": "is about another subject: pipelines, RPC, launchers, checkpoints in files",
    GAP: "no requirement asks this yet",
}
"""Why no requirement asks what a test asks."""
_VERSION = "version"
_ID = re.compile(r"[A-Z]+(-[A-Z0-9]+)+-\d+")
_FILE = re.compile(r"[\w./-]+\.py")
_TEST = re.compile(r"\w+(\.\w+)*(\.\*)?|\*")
"""The name of a test; ``*`` stands for all of a class or a file."""


@dataclass(frozen=True)
class Test:
    """A test of PyTorch, and what is asked of it here."""

    __test__ = False

    requirements: Sequence[str]
    """Ids of the requirements that ask what it asks."""
    reasons: Mapping[str, str]
    """What no requirement asks of it and why, by kind."""

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        if not self.requirements:
            return next(iter(self.reasons))
        return PARTLY if self.reasons else ASKED


ASKED, PARTLY = "asked", "asked in part"
VERDICTS = (ASKED, PARTLY, *reversed(KINDS))


@dataclass(frozen=True)
class File:
    """A file of PyTorch's tests."""

    version: str
    """The commit of PyTorch whose file was read, or its release."""
    tests: Mapping[str, Test]


Table = Mapping[str, File]


def parse(text: str, file: str) -> Table:
    """Parse the table of one stack.  ``file``: its name in messages.  Errors: :class:`TableError`."""
    return {name: _file(name, body, f"{file}: {name}") for name, body in document(text, file).items()}


def read(root: Path) -> dict[str, Table]:
    """Read the tables of all stacks, by stack.  Errors: :class:`TableError`."""
    return read_all(root / FOLDER, parse)


def _file(name: str, body: Any, where: str) -> File:
    if not isinstance(body, dict):
        raise TableError(f"{where}: must be a table of tests")
    if not _FILE.fullmatch(name):
        raise TableError(f"{where}: must be a file of PyTorch such as 'test/distributed/test_store.py'")
    rest = dict(body)
    version = words(rest.pop(_VERSION, None), f"{where}: {_VERSION}")
    if not rest:
        raise TableError(f"{where}: needs a test")
    return File(version, {test: _test(test, each, f"{where}: {test}") for test, each in rest.items()})


def _test(name: str, body: Any, where: str) -> Test:
    if not _TEST.fullmatch(name):
        raise TableError(f"{where}: must be a test such as 'StoreTest.test_get', with '*' for all of a class")
    if not isinstance(body, list) or not body:
        raise TableError(f"{where}: must be a list of requirements and reasons")
    requirements: list[str] = []
    reasons: dict[str, str] = {}
    for each in body:
        text = words(each, where)
        kind, colon, why = text.partition(": ")
        if colon and kind in KINDS:
            reasons[kind] = words(why, where)
        elif _ID.fullmatch(text):
            requirements.append(text)
        else:
            kinds = ", ".join(f"'{kind}: '" for kind in KINDS)
            raise TableError(f"{where}: {text!r} must be the id of a requirement, or a reason after one of {kinds}")
    return Test(requirements, reasons)


def unknown_requirements(table: Table, known: frozenset[str]) -> list[str]:
    """Return the tests that name a requirement which is not known."""
    return [
        f"{file}: {name}: there is no requirement {requirement}"
        for file, of_file in table.items()
        for name, test in of_file.tests.items()
        for requirement in test.requirements
        if requirement not in known
    ]


def pages(tables: Mapping[str, Table]) -> dict[str, str]:
    """Render the tables as Markdown: pages by the name of their file, one for each stack."""
    texts = {INDEX: [_INTRODUCTION]}
    total: Counter[str] = Counter()
    for stack, table in tables.items():
        counted = _counted(table)
        total += counted
        texts[INDEX].append(_numbers(f"[`{stack}`]({stack}.md)", counted))
    texts[INDEX].append(_numbers("all", total))
    for stack, table in tables.items():
        lines = texts[f"{stack}.md"] = [_GENERATED, "", f"# PyTorch's own tests: {stack}", ""]
        lines.append(f"[PyTorch's own tests]({INDEX}) says how to read this page.")
        for file, of_file in table.items():
            version = of_file.version[:12]
            lines += ["", f"## `{file}`", "", f"Read at {escaped(version)}.", ""]
            lines += ["| test | requirements | not asked |", "|---|---|---|"]
            lines += _rows(of_file)
    return {name: "\n".join(lines) + "\n" for name, lines in texts.items()}


def _counted(table: Table) -> Counter[str]:
    return Counter(test.verdict for of_file in table.values() for test in of_file.tests.values())


def _numbers(name: str, counted: Mapping[str, int]) -> str:
    return f"| {name} | {sum(counted.values())} | {' | '.join(str(counted.get(one, 0)) for one in VERDICTS)} |"


def _rows(of_file: File) -> Iterator[str]:
    for name, test in of_file.tests.items():
        ids = ", ".join(f"[{one}]({_page_of(one)}#{one.rpartition('-')[0].lower()})" for one in test.requirements)
        why = "; ".join(f"{'**gap**' if kind == GAP else kind}: {escaped(text)}" for kind, text in test.reasons.items())
        yield f"| `{name}` | {ids} | {why} |"


def _page_of(requirement: str) -> str:
    """Return the page that has a requirement, as a link from the pages here."""
    return f"../requirements/{STACK_BY_PREFIX.get(requirement.partition('-')[0], INDEX.removesuffix('.md'))}.md"


_GENERATED = f"<!-- Generated from {FOLDER}/ by: concord upstream {PAGES} -->"
_INTRODUCTION = f"""\
{_GENERATED}

# PyTorch's own tests

Each of PyTorch's own tests of its distributed stacks, and the [requirements](../requirements/README.md) that ask what
it asks. Most defects that PyTorch has mended have a test there, so what its tests ask and no requirement does is a
hole. A backend that meets a requirement has shown what the tests beside it show, and need not run them.

Each test was read beside the tests of its requirements. This is a judgment, and not a measurement: of a part of them it
was tried, by putting in the defect against which the test stands.

- **asked**: the tests of these requirements fail if PyTorch breaks what the test asserts.
- **asked in part**: the same, except for what the row says.
{chr(10).join(f"- **{kind}**: {text}." for kind, text in reversed(KINDS.items()))}

These pages are generated. To change one, change `{FOLDER}/STACK.toml` and run `concord upstream {PAGES}`.
`tests/unit/test_upstream.py` fails if a table names a requirement that does not exist.

| stack | tests | {" | ".join(VERDICTS)} |
|---|---|{"---|" * len(VERDICTS)}"""


def upstream(folder: PagesFolder = None, check: Check = False) -> None:
    """Write the table of PyTorch's own tests: the requirements that ask what each of them asks, or why none does.

    Run it in a checkout of Concord.
    """
    require_folder(folder, check)
    try:
        texts = pages(read(Path.cwd()))
    except TableError as e:
        raise bad(str(e)) from None
    pages_out(texts, folder, check, "upstream")
