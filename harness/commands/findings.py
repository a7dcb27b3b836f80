"""``concord findings``: which of the findings are there in other versions of PyTorch, and the page of all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from harness.commands.refusing import bad, refusing
from harness.safe_io.writing import write_whole
from harness.versions import findings as by_version
from harness.versions.catalog import CatalogError, catalog, view
from harness.versions.environments import EnvironmentProblem
from harness.versions.findings import GONE, Unreadable, Version, short
from harness.versions.scripts import FOLDER, Script, scripts
from reports.findings import page as page_of
from reports.text import plural


def findings(
    names: Annotated[list[str] | None, typer.Argument(help="Names of scripts; all without them.")] = None,
    env: Annotated[
        list[Path] | None,
        typer.Option(help="A virtual environment, or a Python, with another PyTorch; may be given several times."),
    ] = None,
    record: Annotated[
        bool, typer.Option(help=f"Keep the outcomes in {by_version.FILE}, and write {by_version.PAGE} anew.")
    ] = True,
    page: Annotated[
        Path | None,
        typer.Option(help="Run nothing, and write all known defects, by kind, area and version, as one page here."),
    ] = None,
) -> None:
    """Run the scripts of docs/findings with this PyTorch, or with those of other environments.

    Run it in a checkout of Concord. Each outcome is kept at once, so that nothing is lost if it is interrupted.
    """
    root = Path.cwd()
    if page is not None:
        if names or env:
            raise bad("--page runs nothing: leave out the names of scripts and --env")
        _write_page(root, page)
        return
    chosen = _chosen(root, names or [])
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False, highlight=False)
    with refusing(Unreadable):
        known = by_version.read(root)
    pythons = [_python(each) for each in env or [Path(sys.executable)]]
    try:
        with Progress(console=console, disable=not sys.stdout.isatty(), transient=True) as progress:
            task = progress.add_task("scripts", total=len(pythons) * len(chosen))
            for python in pythons:
                for line in _tried(root, python, chosen, known, record=record):
                    console.print(line)
                    progress.advance(task)
    except EnvironmentProblem as e:
        raise bad(str(e)) from None
    finally:
        if record and known:
            by_version.write(root, known)
    for name, version in known.items():
        there = sum(outcome != GONE for outcome in version.outcomes.values())
        console.print(f"{name}: {len(version.outcomes)} scripts, of which {there} show a defect")


def _write_page(root: Path, file: Path) -> None:
    with refusing(CatalogError, OSError):
        known = catalog(root)
        write_whole(file, page_of(view(known)))
    there = sum(finding.is_in(known.newest) is True for finding in known.findings)
    typer.echo(f"{file}: {plural(len(known.findings), 'known defect')}, {there} of them in PyTorch {known.newest}")


def _tried(
    root: Path, python: Path, chosen: Sequence[Script], known: dict[str, Version], *, record: bool
) -> Iterator[str]:
    """Run scripts with a Python, and add to what is known how each ended; yields a line for each."""
    for script, outcome, seconds, versions in by_version.tried(python, root, chosen):
        name = short(versions["torch"])
        version = known.setdefault(name, Version(versions["torch"], versions["python"], {}))
        version.torch, version.python = versions["torch"], versions["python"]
        before = version.outcomes.get(script.name)
        version.outcomes[script.name] = outcome
        if record:
            by_version.keep(root, known)
        changed = f"  (before: {before})" if before not in (None, outcome) else ""
        yield f"{name}  {script.name}: {outcome}, {seconds:.1f} s{changed}"


def _chosen(root: Path, names: list[str]) -> list[Script]:
    every = {script.name: script for script in scripts(root)}
    if not every:
        raise bad(f"no scripts in {root / FOLDER}: run it in a checkout of Concord")
    unknown = [name for name in names if Path(name).stem not in every]
    if unknown:
        raise bad(f"no such script: {', '.join(unknown)} (those of {FOLDER} that need no accelerator)")
    return [every[Path(name).stem] for name in names] or list(every.values())


def _python(env: Path) -> Path:
    python = env / "bin/python" if env.is_dir() else env
    if not python.is_file():
        raise bad(f"{env}: neither a virtual environment nor a Python")
    return python
