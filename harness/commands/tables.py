"""Tables that people keep as TOML files in ``fixtures/``, from which commands write pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import printable
from harness.safe_io.untrusted import TOML_SIZE, Refused, toml

MOST_LETTERS = 400
"""Maximum characters of a text in a table."""
Table = TypeVar("Table")


class TableError(Exception):
    """A table is not valid.  The message says where and what to do."""


def read_all(folder: Path, parse: Callable[[str, str], Table]) -> dict[str, Table]:
    """Read the tables of all stacks in a folder, by stack.

    ``parse`` returns the table of a text; its second argument is the file's name for messages.  Errors:
    :class:`TableError`.
    """
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise TableError(f"no tables in {folder}: run it in a checkout of Concord")
    return {path.stem: parse(_text(path), path.name) for path in paths}


def document(text: str, file: str) -> dict[str, Any]:
    """Parse a TOML file.  ``file``: its name in messages.  Errors: :class:`TableError`."""
    try:
        return toml(text)
    except Refused as e:
        raise TableError(f"{file}: {e}") from None


def words(text: Any, where: str) -> str:
    """Return a text of a table if it is one line of moderate length.  Errors: :class:`TableError`."""
    if not isinstance(text, str) or not text.strip() or len(text) > MOST_LETTERS or printable(text) != text:
        raise TableError(f"{where}: must be a text of 1 to {MOST_LETTERS} characters on one line")
    return text


def escaped(text: str) -> str:
    """Escape what Markdown would take for markup."""
    marked = "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _text(path: Path) -> str:
    try:
        return contents(path, TOML_SIZE).decode()
    except FileError as e:
        raise TableError(f"{path.name}: {e.why}") from None
    except UnicodeDecodeError:
        raise TableError(f"{path.name}: not UTF-8") from None
