"""``concord board``: make a static site from many bundles."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

import harness
from harness.commands.collecting import checkout_of
from harness.commands.refusing import refusing
from harness.provenance import suite_hash
from harness.results import VERSION
from harness.safe_io.ceiling import Exceeded, ceiling
from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import one_line
from harness.safe_io.writing import write_whole
from reports import signing
from reports.archive import LARGEST_PACKED
from reports.board import MOST, Entry, Refused, refused, site, taken
from reports.bundle import signature_of
from reports.checkout import Checkout
from reports.model import ReportError
from reports.page import page
from reports.text import plural
from reports.verify import Checked, verify

_MEMORY, _SECONDS = 1 << 30, 120.0
"""Bytes and seconds that checking a bundle, or making its pages, may take."""
_UNCHECKED = 3
_OURS = re.compile(r"[0-9a-f]{32}\.html")


def board(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with bundles, and folders of them.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the site.")],
    suite: Annotated[
        bool, typer.Option("--suite/--no-suite", help="Whether to collect the suite here for bundles of the same one.")
    ] = True,
    signers: Annotated[
        Path | None, typer.Option(help="File of those who may sign (ssh's ALLOWED SIGNERS), for FILE.zip.sig.")
    ] = None,
) -> None:
    """Make one static site from many bundles: by backend, PyTorch and level, with history and differences.

    Each bundle is verified. One with something wrong is only named, with the reason. Exits with 1 if there is such a
    bundle, and with 3 if there is none and something could not be checked.
    """
    with refusing(ReportError, Exceeded, FileError):
        if signers is not None:
            signing.require("--signers")
            if not signers.is_file():
                raise ReportError(f"--signers {signers}: no such file")
        files = _bundles(folder, output)
        root = Path.cwd()
        here = Checkout(suite_hash(root), harness.__version__, VERSION) if suite else None
        entries: dict[str, Entry] = {}
        others: list[Refused] = []
        for file in files:
            name = one_line(file.relative_to(folder).as_posix())
            found, here = _taken(file, name, here, root, signers, output)
            if isinstance(found, Entry) and found.sha256 in entries:
                found = refused(name, (f"the same file as {entries[found.sha256].name}",))
            if isinstance(found, Entry):
                entries[found.sha256] = found
            else:
                others.append(found)
            state = "refused" if isinstance(found, Refused) else "unchecked" if found.unchecked else "taken in"
            typer.echo(f"{state:<9} {name}")
        _write(output, entries.values(), others)
        typer.echo(f"{output / 'index.html'}: {plural(len(entries), 'bundle')}, {len(others)} refused")
        if others:
            raise typer.Exit(1)
        if any(entry.unchecked for entry in entries.values()):
            raise typer.Exit(_UNCHECKED)


def _bundles(folder: Path, output: Path) -> list[Path]:
    """Return the files that may be bundles, without those of the site. Errors: :class:`ReportError`."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder")
    found = []
    site_folder = output.resolve()
    for file in folder.rglob("*.zip"):
        if not file.resolve().is_relative_to(site_folder) or folder.resolve() == site_folder:
            found.append(file)
        if len(found) > MOST:
            raise ReportError(f"{folder}: more than {MOST} bundles; make a board of fewer of them")
    if not found:
        raise ReportError(f"{folder}: no bundle (*.zip) in it; `concord bundle` makes one")
    return sorted(found)


def _taken(
    file: Path, name: str, here: Checkout | None, root: Path, signers: Path | None, output: Path
) -> tuple[Entry | Refused, Checkout | None]:
    """Check a bundle, and write the page of its whole report if it is taken in.

    Returns the local suite as well, with its tests if they had to be collected. Errors: :class:`ReportError` for what
    is no fault of the bundle.
    """
    try:
        digest = hashlib.sha256(contents(file, LARGEST_PACKED)).hexdigest()
        signer, wrong = _signer(file, signers)
        checked = _checked(file, here, wrong)
    except (ReportError, Exceeded, FileError) as e:
        return refused(name, (one_line(str(e)),)), here
    suites = {run.header.suite_hash for run in checked.runs}
    if here is not None and here.facts is None and here.suite_hash and here.suite_hash in suites:
        here = checkout_of(root)
        checked = _checked(file, here, wrong)
    found = taken(name, digest, checked, signer)
    if isinstance(found, Entry) and checked.report is not None:
        try:
            with ceiling(_MEMORY, _SECONDS):
                text = page(checked.report)
        except (ReportError, Exceeded) as e:
            return refused(name, (one_line(str(e)),)), here
        _save(output / found.whole, text)
    return found, here


def _checked(file: Path, here: Checkout | None, wrong: Sequence[str]) -> Checked:
    with ceiling(_MEMORY, _SECONDS):
        return verify(file, harness.__version__, here, time.time(), wrong=wrong)


def _signer(file: Path, signers: Path | None) -> tuple[str, list[str]]:
    """Return who signed a bundle, and what is wrong with its signature; a bundle without one has none."""
    signature = signature_of(file)
    if signers is None or not signature.exists():
        return "", []
    name = signing.signer_in(file, signature, signers)
    if not name:
        return "", [f"{signature.name}: not a signature of this file by anyone in {signers.name}"]
    return name, []


def _write(output: Path, entries: Iterable[Entry], others: Sequence[Refused]) -> None:
    """Write the pages, remove those of bundles that are no longer there, and write the table last."""
    everything = list(entries)
    written = {entry.whole for entry in everything}
    for name, text in site(everything, others):
        if name == "index.html":
            _remove(output, written)
        _save(output / name, text)
        written.add(name)


def _remove(output: Path, written: set[str]) -> None:
    for folder in ("bundles", "reports"):
        for file in (output / folder).glob("*.html"):
            if _OURS.fullmatch(file.name) and f"{folder}/{file.name}" not in written:
                file.unlink(missing_ok=True)


def _save(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as e:
        raise ReportError(f"{path}: {e.strerror}") from None
