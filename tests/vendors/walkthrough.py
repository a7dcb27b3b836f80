"""The fenced blocks of a page, in order, and which of them a test executes."""

from __future__ import annotations

import re
from dataclasses import dataclass


class BadPage(ValueError):
    """A page whose blocks can't be told apart; says in which line."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int
    """Of its fence, from 1."""
    section: str
    """The heading that it is under."""

    @property
    def executed(self) -> bool:
        """Whether it is a block of commands."""
        return self.language == "sh"


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a Markdown page.  Errors: :class:`BadPage`."""
    found: list[Block] = []
    section, fence, begun, language = "", "", 0, ""
    lines: list[str] = []
    for number, line in enumerate(page.splitlines(), 1):
        mark = re.match(r"(`{3,})\s*(\S*)\s*$", line)
        if not fence and mark:
            fence, language, begun, lines = mark[1], mark[2], number, []
        elif fence and line.rstrip() == fence:
            found.append(Block(language, "\n".join(lines) + "\n", begun, section))
            fence = ""
        elif fence:
            lines.append(line)
        elif line.startswith("#"):
            section = line.lstrip("#").strip()
    if fence:
        raise BadPage(f"line {begun}: the block never ends")
    return found


def commands(block: Block) -> list[str]:
    """Its commands, without comments; a line that ends with a backslash goes on in the next."""
    joined = block.text.replace("\\\n", " ")
    return [line for line in map(str.strip, joined.splitlines()) if line and not line.startswith("#")]
