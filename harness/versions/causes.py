"""Where in PyTorch known defects are: the function that would have to change, and which defects one change would mend.

Someone has read PyTorch's source for each of them, and wrote it into ``docs/findings/causes.toml``.
``python -m harness.versions.causes`` writes docs/findings-by-cause.md anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from harness.safe_io.writing import write_whole
from harness.versions.scripts import FOLDER

FILE = FOLDER / "causes.toml"
PAGE = Path("docs/findings-by-cause.md")
SURE: Mapping[str, str] = {
    "ran": "a change there, or a trace, has shown it",
    "read": "the source shows it",
    "guess": "probably, and nobody has shown it",
}
"""What is known of a cause."""


class UnreadableCauses(ValueError):
    """``causes.toml`` can't be read."""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change to PyTorch that would mend one defect or several."""

    at: str
    """A file as in PyTorch's or gloo's repository, and, after ``::``, the function, class or table of it to change."""
    why: str
    """What the code there does that it must not, or leaves out: one sentence."""
    sure: Literal["ran", "read", "guess"]
    defects: tuple[str, ...]
    """The names of the defects, each with its owner."""

    @property
    def file(self) -> str:
        """The file without the function."""
        return self.at.partition("::")[0]

    @property
    def name(self) -> str:
        """The function, class or table in the file; empty if it is the module."""
        return self.at.partition("::")[2]


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    cause: tuple[Cause, ...] = ()


class File(msgspec.Struct, frozen=True):
    """A file of PyTorch with the causes in it, those of most defects first."""

    name: str
    causes: tuple[Cause, ...]

    @property
    def defects(self) -> int:
        """The number of defects that come from it."""
        return sum(len(cause.defects) for cause in self.causes)


def read(root: Path) -> tuple[Cause, ...]:
    """Return the causes that are known in a checkout; none if nobody wrote any.

    Errors: :class:`UnreadableCauses`, also if one defect has two causes.
    """
    file = root / FILE
    if not file.is_file():
        return ()
    try:
        causes = msgspec.toml.decode(file.read_bytes(), type=_Document).cause
    except (OSError, ValueError) as e:  # msgspec's errors are ValueErrors
        raise UnreadableCauses(f"{FILE}: {e}") from None
    seen: dict[str, str] = {}
    for cause in causes:
        for name in cause.defects:
            if name in seen:
                raise UnreadableCauses(f"{FILE}: {name} has two causes: {seen[name]} and {cause.at}")
            seen[name] = cause.at
    return causes


def names(root: Path) -> set[str]:
    """Return the names of all scripts of a checkout."""
    return {path.stem for path in (root / FOLDER).glob("*.py")}


def by_file(causes: Sequence[Cause]) -> list[File]:
    """Return the files with their causes, those of most defects first."""
    files: dict[str, list[Cause]] = {}
    for cause in causes:
        files.setdefault(cause.file, []).append(cause)
    made = [
        File(name, tuple(sorted(of, key=lambda cause: (-len(cause.defects), cause.name, cause.why))))
        for name, of in files.items()
    ]
    return sorted(made, key=lambda file: (-file.defects, file.name))


def page(causes: Sequence[Cause], scripts: Collection[str]) -> str:
    """Render the causes as Markdown: the files, and then a table of causes for each.

    ``scripts``: the names of the defects, without their owners, that have a script.
    """
    files = by_file(causes)
    places = {cause.at for cause in causes}
    defects = sum(file.defects for file in files)
    sure = {each: sum(cause.sure == each for cause in causes) for each in SURE}
    lines = [
        f"<!-- Generated from {FILE} by: python -m harness.versions.causes -->",
        "",
        "# Findings by cause",
        "",
        f"Which code of PyTorch would have to change: {defects} known defects have {len(causes)} causes, in",
        f"{len(places)} functions of {len(files)} files. One change at a cause would mend all of its",
        "[findings](findings.md). Names are those of PyTorch 2.13.0, or of a version that has the defect.",
        "",
        *(f"- **{each}**: {says} ({sure[each]} causes)" for each, says in SURE.items()),
        "",
        "| file | defects | causes |",
        "|---|---:|---:|",
        *(f"| [{file.name}](#{_anchor(file.name)}) | {file.defects} | {len(file.causes)} |" for file in files),
    ]
    for file in files:
        lines += ["", f"## {file.name}", "", "| where | what is wrong there | findings | known |", "|---|---|---|---|"]
        for cause in file.causes:
            ids = [name.partition("/")[2] for name in cause.defects]
            found = ", ".join(f"[{each}](findings/{each}.py)" if each in scripts else each for each in ids)
            where = f"`{cause.name}`" if cause.name else "the module"
            lines.append(f"| {where} | {_cell(cause.why)} | {found} | {cause.sure} |")
    return "\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    """The anchor that GitHub gives a title."""
    return "".join(each for each in title.lower().replace(" ", "-") if each.isalnum() or each in "-_")


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    write_whole(Path.cwd() / PAGE, page(read(Path.cwd()), names(Path.cwd())))
