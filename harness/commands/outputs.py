"""Files that commands write where the user asked for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.refusing import bad
from harness.safe_io.writing import append_or_nothing, nearest, write_whole


def appended(path: Path, data: bytes) -> None:
    """Append data to a file, such as the one of $GITHUB_STEP_SUMMARY, or create it. Errors: OSError."""
    if not path.exists():
        write_whole(path, data)
        return
    with path.open("ab", buffering=0) as stream:
        append_or_nothing(stream.fileno(), data)


def writable(file: Path | None) -> Path | None:
    """Return the file of an option, unless it can't be written. Commands that take long ask this before they begin."""
    if file is None or file.is_symlink() or (file.exists() and not file.is_dir()):
        return file
    if file.is_dir():
        raise bad(f"{file}: a folder, not a file")
    above = nearest(file.absolute())
    if not above.is_dir():
        raise bad(f"{file}: {above} is not a folder")
    if not os.access(above, os.W_OK):
        raise bad(f"{file}: you may not write to {above}")
    return file


PageFile = Annotated[Path | None, typer.Argument(help="The page to write; without it, the page is printed.")]
Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if FILE is out of date.")]


def require_page(file: Path | None, check: bool) -> None:
    """Require that there is a page to check. Errors: one of the command line."""
    if check and file is None:
        raise bad("--check needs the page that it should check")


def page_out(text: str, file: Path | None, check: bool, command: str) -> None:
    """Print a generated page, write it to a file, or exit with 1 if the file has another text.

    ``command``: the name of the subcommand that writes it.
    """
    if file is None:
        typer.echo(text, nl=False)
    elif not check:
        write_whole(file, text.encode())
    elif not file.is_file() or file.read_text() != text:
        typer.echo(f"{file} is out of date; run: concord {command} {file}")
        raise typer.Exit(1)
