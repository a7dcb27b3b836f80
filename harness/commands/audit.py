"""The commands of the audit: ``concord audit``, ``concord reach``, ``concord faults``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from harness.commands.refusing import refusing
from harness.faults import CLASSES, COMPONENTS, catalogue
from harness.safe_io.writing import write_whole
from harness.subjects import STACKS

Components = Annotated[list[str] | None, typer.Argument(help="Of these components; all by default.")]
Processes = Annotated[int, typer.Option(help="Pytest processes; 0: as many as cores, at most 8.", min=0)]
Subject = Annotated[str, typer.Option(help="Whose implementation runs: torch, or the reference, and its mutants.")]
State = Annotated[Path, typer.Option(help="Folder of journals, from which an audit goes on.")]

STATE = Path("reports/out/audit")


def faults(components: Components = None) -> None:
    """List the catalogue of faults: what `pytest suites/ --fault NAME` can put into ranks."""
    with refusing(ValueError, ImportError):
        chosen = _known(components or COMPONENTS)
        sys.path.insert(0, str(Path.cwd()))
        console = Console()
        for fault in catalogue().values():
            if fault.component in chosen:
                about = ", ".join(filter(None, (fault.component, CLASSES[fault.kind], fault.issue)))
                console.print(Text(fault.name, style="bold"), soft_wrap=True)  # whole, to be copied
                console.print(Text(f"    {fault.sentence} ({about})"), soft_wrap=True)


def audit(
    components: Components = None,
    with_faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Defects of the catalogue.")] = True,
    mutants: Annotated[
        str, typer.Option(help="source: of the sources under test; all: of what they stand on, too; none.")
    ] = "source",
    sample: Annotated[int, typer.Option(help="So many of each sort and component, always the same; 0: all.")] = 0,
    subject: Subject = "torch",
    name: Annotated[list[str] | None, typer.Option(help="Only defects with this in their name.")] = None,
    survivors: Annotated[Path | None, typer.Option(help="Only what nobody noticed in this saved audit.")] = None,
    again: Annotated[
        Path | None,
        typer.Option(help="Only what this saved audit noticed, each by the test that noticed it: takes minutes."),
    ] = None,
    workers: Processes = 0,
    limit: Annotated[float, typer.Option(help="Seconds for a defect, after which no further test is begun.")] = 240.0,
    state: State = STATE,
    save: Annotated[Path | None, typer.Option(help="Write the audit to this file (JSON).")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Save only what --compare and --again need.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that shows it to this file.")] = None,
    compare: Annotated[Path | None, typer.Option(help="A saved audit that must not have noticed more.")] = None,
) -> None:
    """Put defects into the ranks, one at a time, and see whether the suites notice.

    Run it where the suites are.  An audit that was interrupted goes on where it was, as long as nothing has changed.
    Exits with 1 if a test fails without a defect, or an earlier audit (--compare) noticed more.
    """
    from harness.audit.records import KILLED, load, shortened
    from harness.audit.run import Audit, Plan
    from harness.audit.table import COLUMNS, Shown, rows, show, show_lost, unnoticed

    console = Console()
    with refusing(ValueError, ImportError):
        if mutants not in ("source", "all", "none"):
            raise ValueError(f"--mutants {mutants}: source, all or none")
        before = load(compare) if compare else None
        plan = Plan(
            components=_audited(components, subject),
            subject=subject,
            faults=with_faults,
            mutants=mutants,
            sample=sample,
            names=tuple(name or ()),
            only=frozenset(r.defect.name for r in unnoticed(load(survivors))) if survivors else frozenset(),
            again={r.defect.name: r.test for r in load(again).results if r.state == KILLED} if again else {},
            limit=limit,
        )
        with Shown(console) as shown:
            found = Audit(_root(), state, plan, workers=workers or _cores(), progress=shown).run()
    show(found, console)
    if save:
        kept = shortened(found) if brief else found
        with refusing(OSError):
            write_whole(save, msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    if html:
        from reports.audit import page

        with refusing(OSError):
            write_whole(html, page(msgspec.to_builtins(found), rows(found), COLUMNS))
    worse = show_lost(before, found, console) if before else False
    raise typer.Exit(1 if worse or found.red else 0)


def reach(
    components: Components = None,
    mutants: Annotated[
        str, typer.Option(help="source: the sources under test; all: what they stand on, too.")
    ] = "source",
    subject: Subject = "torch",
    workers: Processes = 0,
    state: State = STATE,
    html: Annotated[Path | None, typer.Option(help="Write pages with the sources to this folder.")] = None,
) -> None:
    """Which lines and branches of PyTorch's sources the ranks of the suites reach.

    Run it where the suites are.  What an audit of the same tree has seen already is used.
    """
    from harness.audit.mutants import file, sources
    from harness.audit.reach import report
    from harness.audit.run import Audit, Plan
    from harness.audit.table import Shown

    console = Console()
    with refusing(ValueError, ImportError):
        if mutants not in ("source", "all"):
            raise ValueError(f"--mutants {mutants}: source or all")
        plan = Plan(components=_audited(components, subject), subject=subject)
        most = None if mutants == "all" else 1
        files = list(dict.fromkeys(file(m) for c in plan.components for m in sources(c, subject)[:most]))
        with Shown(console) as shown:
            found = Audit(_root(), state, plan, workers=workers or _cores(), progress=shown).reach()
    typer.echo(report({name: found[name] for name in files}, html), nl=False)


def _known(components: Sequence[str]) -> tuple[str, ...]:
    wrong = sorted(set(components) - set(COMPONENTS))
    if wrong:
        raise ValueError(f"no component {', '.join(wrong)}; there are {', '.join(COMPONENTS)}")
    return tuple(components)


def _audited(components: Sequence[str] | None, subject: str) -> tuple[str, ...]:
    """The components to look at: those that were asked for, or all that there are mutants of."""
    from harness.audit.mutants import sources
    from harness.subjects import find

    try:
        find(subject)
    except ValueError as e:
        raise ValueError(f"--subject {subject}: {e}") from e
    chosen = _known(components or [c for c in COMPONENTS if sources(c, subject)])
    none = [c for c in chosen if not sources(c, subject) and c in STACKS]
    if none or not chosen:
        raise ValueError(f"--subject {subject}: nobody knows the sources of its {', '.join(none or STACKS)}")
    return chosen


def _root() -> Path:
    root = Path.cwd()
    if not (root / "suites").is_dir():
        raise ValueError(f"{root} has no folder suites; run this where they are")
    sys.path.insert(0, str(root))  # the catalogue of faults is there
    return root


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)))
