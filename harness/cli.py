"""The ``concord`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)

BAD_INPUT = 2


@app.callback()
def concord() -> None:
    """Concord: conformance of PyTorch's distributed stack."""


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A stored program: the .json beside a reproducer.")],
    backend: Annotated[str, typer.Option(help="Of the process groups.")] = "gloo",
    device: Annotated[str, typer.Option(help="Type of the ranks' device.")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds for the run on ranks.")] = 120.0,
    times: Annotated[int, typer.Option(help="How often, for what fails now and then.", min=1)] = 1,
    source: Annotated[bool, typer.Option("--source", help="Print the program as Python, and run nothing.")] = False,
) -> None:
    """Run a stored program on one device and on ranks again, and compare.

    Exits with 0 if the runs are the same, 1 if not, 2 if FILE is no program.
    """
    from harness.programs.source import source as written
    from harness.programs.spec import loads

    try:
        program = loads(file.read_bytes())
        text = written(program)
    except OSError as e:
        raise typer.Exit(_bad(f"{file}: {e.strerror}")) from e
    except ValueError as e:
        raise typer.Exit(_bad(f"{file}: {e}")) from e
    if source:
        typer.echo(text, nl=False)
        return

    from harness.programs import execute
    from harness.programs.check import problems, truth_of
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed
    from harness.worlds.world import WorldSpec

    truth = truth_of(program)
    how = "bit for bit" if truth.exact else "within what rounding explains"
    typer.echo(f"{program.layout.stack} on {program.layout.world} ranks ({backend} on {device}), compared {how}")
    pool, failed = Pool(), False
    try:
        world = pool.acquire(WorldSpec(program.layout.world, backend=backend, device=device, timeout=timeout))
        for number in range(1, times + 1):
            label = f"run {number} of {times}: " if times > 1 else ""
            try:
                found = problems(program, truth, world.run(execute.on_rank, program))
            except RanksFailed as e:
                typer.echo(f"{label}{e}")
                failed = True
                continue
            failed = failed or bool(found)
            for problem in found or [f"the same: {len(truth.tensors)} tensors on every rank"]:
                typer.echo(f"{label}{problem}")
    finally:
        pool.close()
    raise typer.Exit(1 if failed else 0)


@app.command()
def faults(
    components: Annotated[list[str] | None, typer.Argument(help="Of these components; all by default.")] = None,
) -> None:
    """List the catalogue of faults: what `pytest suites/ --fault NAME` can put into ranks."""
    from rich.console import Console
    from rich.table import Table

    from harness.faults import COMPONENTS, catalogue

    wrong = set(components or ()) - set(COMPONENTS)
    if wrong:
        raise typer.Exit(_bad(f"no component {', '.join(sorted(wrong))}; there are {', '.join(COMPONENTS)}"))
    table = Table("name", "component", "class", "what is wrong", "issue", box=None, pad_edge=False)
    for fault in catalogue().values():
        if not components or fault.component in components:
            table.add_row(fault.name, fault.component, fault.kind, fault.sentence, fault.issue)
    Console().print(table)


@app.command()
def audit(
    components: Annotated[list[str] | None, typer.Argument(help="Of these components; all by default.")] = None,
    with_faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Defects of the catalogue.")] = True,
    mutants: Annotated[
        str, typer.Option(help="source: of the sources under test; all: of what they stand on, too; none.")
    ] = "source",
    sample: Annotated[int, typer.Option(help="So many of each sort and component, always the same; 0: all.")] = 0,
    name: Annotated[list[str] | None, typer.Option(help="Only defects with this in their name.")] = None,
    survivors: Annotated[Path | None, typer.Option(help="Only what nobody noticed in this saved audit.")] = None,
    again: Annotated[
        Path | None,
        typer.Option(help="Only what this saved audit noticed, each by the test that noticed it: takes minutes."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Pytest processes; 0: as many as cores, at most 8.", min=0)] = 0,
    limit: Annotated[float, typer.Option(help="Seconds for a defect, after which no further test is begun.")] = 240.0,
    state: Annotated[Path, typer.Option(help="Folder of journals, from which an audit goes on.")] = Path(
        "reports/out/audit"
    ),
    save: Annotated[Path | None, typer.Option(help="Write the audit to this file (JSON).")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Save only what --compare and --again need.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows it to this file.")] = None,
    compare: Annotated[Path | None, typer.Option(help="A saved audit that must not have noticed more.")] = None,
) -> None:
    """Put defects into the ranks, one at a time, and see whether the suites notice.

    Run it where the suites are.  An audit that was interrupted goes on where it was, as long as nothing has changed.
    Exits with 1 if a test fails without a defect, or an earlier audit (--compare) noticed more.
    """
    import os
    import sys

    import msgspec
    from rich.console import Console

    from harness.audit.records import KILLED, AuditError, load, shortened
    from harness.audit.run import Audit, Plan
    from harness.audit.table import COLUMNS, Shown, rows, show, show_lost, unnoticed
    from harness.faults import COMPONENTS

    wrong = set(components or ()) - set(COMPONENTS)
    if wrong:
        raise typer.Exit(_bad(f"no component {', '.join(sorted(wrong))}; there are {', '.join(COMPONENTS)}"))
    if mutants not in ("source", "all", "none"):
        raise typer.Exit(_bad(f"--mutants {mutants}: source, all or none"))
    root = Path.cwd()
    if not (root / "suites").is_dir():
        raise typer.Exit(_bad(f"{root} has no folder suites; run this where they are"))
    console = Console()
    sys.path.insert(0, str(root))  # the catalogue of faults is there
    try:
        before = load(compare) if compare else None
        only = frozenset(r.defect.name for r in unnoticed(load(survivors))) if survivors else frozenset()
        plan = Plan(
            components=tuple(components or COMPONENTS[:-1]),
            faults=with_faults,
            mutants=mutants,
            sample=sample,
            names=tuple(name or ()),
            only=only,
            again={r.defect.name: r.test for r in load(again).results if r.state == KILLED} if again else {},
            limit=limit,
        )
        with Shown(console) as shown:
            found = Audit(
                root, state, plan, workers=workers or min(8, len(os.sched_getaffinity(0))), progress=shown
            ).run()
    except (AuditError, ValueError, ImportError) as e:
        raise typer.Exit(_bad(str(e))) from e
    show(found, console)
    if save:
        save.write_bytes(
            msgspec.json.format(msgspec.json.encode(shortened(found) if brief else found), indent=1) + b"\n"
        )
    if html:
        from reports.audit import page

        html.write_text(page(msgspec.to_builtins(found), rows(found), COLUMNS))
    worse = show_lost(before, found, console) if before else False
    raise typer.Exit(1 if worse or found.red else 0)


def _bad(message: str) -> int:
    typer.echo(f"concord: {message}", err=True)
    return BAD_INPUT


def main() -> None:
    """The entry point."""
    app()
