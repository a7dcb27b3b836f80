"""Files that commands write where the user asked for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
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


PagesFolder = Annotated[
    Path | None, typer.Argument(metavar="[FOLDER]", help="Folder to write the pages to; without it, they are printed.")
]
Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if a page in FOLDER is out of date.")]
INDEX = "README.md"
"""The page of a folder that links the others.  Hosts of repositories show it with the folder."""


def require_folder(folder: Path | None, check: bool) -> None:
    """Require that pages can be written, or that there is something to check. Errors: one of the command line."""
    if check and folder is None:
        raise bad("--check needs the folder of the pages that it should check")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise bad(f"{folder}: a file, not a folder for pages")


def out_of_date(pages: Mapping[str, str], folder: Path) -> list[str]:
    """Return the names of the pages that a folder lacks, has with another text, or has although nothing writes them.

    ``pages``: texts by the name of their file.
    """
    there = {file.name: file.read_text() for file in folder.glob("*.md")}
    return sorted(name for name in {*pages, *there} if pages.get(name) != there.get(name))


def pages_out(pages: Mapping[str, str], folder: Path | None, check: bool, command: str) -> None:
    """Print generated pages, write them to a folder, or exit with 1 if a page there has another text.

    ``pages``: texts by the name of their file.  ``command``: the name of the subcommand that writes them.
    """
    if folder is None:
        typer.echo("\n".join(pages.values()), nl=False)
    elif check:
        if old := out_of_date(pages, folder):
            typer.echo(f"in {folder}, {', '.join(old)} out of date; run: concord {command} {folder}")
            raise typer.Exit(1)
    else:
        for name, text in pages.items():
            write_whole(folder / name, text.encode())
        for file in sorted(folder.glob("*.md")):
            if file.name not in pages:
                typer.echo(f"{file}: nothing writes this page any more; remove it")
