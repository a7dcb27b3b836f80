"""The commands of the audit: ``concord audit``, ``concord reach``, ``concord faults``."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from harness.cluster.elsewhere import Place
from harness.commands import hosts
from harness.commands.hosts import KeyFile, Where
from harness.commands.outputs import writable
from harness.commands.refusing import refusing
from harness.devices import cores
from harness.faults import CLASSES, COMPONENTS, catalog
from harness.safe_io.writing import write_whole
from harness.subjects import STACKS

Components = Annotated[list[str] | None, typer.Argument(help="Components to include. Default: all.")]
Processes = Annotated[
    int,
    typer.Option(help="Number of pytest processes. 0: one a core, at most 8 here and 32 on agents' hosts.", min=0),
]
Subject = Annotated[str, typer.Option(help="Subject whose implementation runs and is mutated: torch or reference.")]
State = Annotated[Path, typer.Option(help="Folder of the journals from which an interrupted audit continues.")]

STATE = Path("reports/out/audit")
_MOST, _MOST_ELSEWHERE = 8, 32
"""The most processes, if no number is given: on this machine, and on others."""


def faults(components: Components = None) -> None:
    """List the faults that `pytest suites/ --fault NAME` can inject into ranks."""
    with refusing(ValueError, ImportError):
        chosen = _known(components or COMPONENTS)
        sys.path.insert(0, str(Path.cwd()))
        console = Console()
        for fault in catalog().values():
            if fault.component in chosen:
                about = ", ".join(filter(None, (fault.component, CLASSES[fault.kind], fault.issue)))
                console.print(Text(fault.name, style="bold"), soft_wrap=True)  # unwrapped, so that it can be copied
                console.print(Text(f"    {fault.sentence} ({about})"), soft_wrap=True)


def audit(
    components: Components = None,
    with_faults: Annotated[
        bool, typer.Option("--faults/--no-faults", help="Whether to include the faults of the catalog.")
    ] = True,
    mutants: Annotated[
        str,
        typer.Option(
            help="Which mutants to include. source: of the sources under test; all: also of what they use; "
            "wide: also of DTensor, FSDP1, checkpoints and process groups; none."
        ),
    ] = "source",
    pairs: Annotated[
        int,
        typer.Option(help="How many pairs of mutants (two edits at once) of each component, always the same.", min=0),
    ] = 0,
    sample: Annotated[
        int,
        typer.Option(
            help="How many faults and mutants of each component, from its modules in turn, always the same. 0: all."
        ),
    ] = 0,
    subject: Subject = "torch",
    name: Annotated[
        list[str] | None, typer.Option(help="Include only defects whose name contains this. Repeatable.")
    ] = None,
    survivors: Annotated[
        Path | None, typer.Option(help="Include only what no test detected in this saved audit.")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            help="Include only what this saved audit detected, each with the test that detected it. Takes minutes."
        ),
    ] = None,
    workers: Processes = 0,
    launcher: Where = None,
    agents_key: KeyFile = None,
    limit: Annotated[float, typer.Option(help="Seconds for each defect, after which no further test starts.")] = 240.0,
    state: State = STATE,
    save: Annotated[Path | None, typer.Option(help="Write the audit to this file as JSON.", callback=writable)] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Save only what --compare and --again need.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the audit to this file as an HTML page.", callback=writable)
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Exit with 1 if this saved audit detected more.")] = None,
) -> None:
    """Inject defects into the ranks, one at a time, and see whether the suites detect them.

    Run it where the suites are. An interrupted audit continues where it stopped, as long as nothing has changed. Exits
    with 1 if a test fails without a defect, or if an earlier audit (--compare) detected more.
    """
    from harness.audit.mutants import LEVELS
    from harness.audit.records import KILLED, load, shortened
    from harness.audit.run import Audit, Plan
    from harness.audit.table import COLUMNS, Shown, rows, show, show_lost, unnoticed

    console = Console()
    with refusing(ValueError, ImportError):
        if mutants not in (*LEVELS, "none"):
            raise ValueError(f"--mutants {mutants}: {', '.join(LEVELS)} or none")
        before = load(compare) if compare else None
        plan = Plan(
            components=_audited(components, subject),
            subject=subject,
            faults=with_faults,
            mutants=mutants,
            pairs=pairs,
            sample=sample,
            names=tuple(name or ()),
            only=frozenset(r.defect.name for r in unnoticed(load(survivors))) if survivors else frozenset(),
            again={r.defect.name: r.test for r in load(again).results if r.state == KILLED} if again else {},
            limit=limit,
        )
        root = _root()
        with _places(launcher, agents_key, workers) as places, Shown(console) as shown:
            audited = Audit(root, state, plan, places=places, progress=shown).run()
    show(audited, console)
    if save:
        kept = shortened(audited) if brief else audited
        with refusing(OSError):
            write_whole(save, msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    if html:
        from reports.audit import page

        with refusing(OSError):
            write_whole(html, page(msgspec.to_builtins(audited), rows(audited), COLUMNS))
    worse = show_lost(before, audited, console) if before else False
    raise typer.Exit(1 if worse or audited.red else 0)


def reach(
    components: Components = None,
    mutants: Annotated[
        str, typer.Option(help="source: the sources under test; all: also what they use; wide: see audit.")
    ] = "source",
    subject: Subject = "torch",
    workers: Processes = 0,
    launcher: Where = None,
    agents_key: KeyFile = None,
    state: State = STATE,
    html: Annotated[Path | None, typer.Option(help="Write HTML pages with the sources to this folder.")] = None,
) -> None:
    """Report which lines and branches of PyTorch's sources the ranks of the suites reach.

    Run it where the suites are. What an audit of the same tree has already recorded is reused.
    """
    from harness.audit.mutants import LEVELS, sources
    from harness.audit.reach import report
    from harness.audit.run import Audit, Plan
    from harness.audit.sites import file
    from harness.audit.table import Shown

    console = Console()
    with refusing(ValueError, ImportError):
        if mutants not in LEVELS:
            raise ValueError(f"--mutants {mutants}: {' or '.join(LEVELS)}")
        plan = Plan(components=_audited(components, subject), subject=subject, mutants=mutants)
        files = list(dict.fromkeys(file(m) for c in plan.components for m in sources(c, subject, mutants)))
        root = _root()
        with _places(launcher, agents_key, workers) as places, Shown(console) as shown:
            reached = Audit(root, state, plan, places=places, progress=shown).reach()
    typer.echo(report({name: reached[name] for name in files}, html), nl=False)


def _known(components: Sequence[str]) -> tuple[str, ...]:
    wrong = sorted(set(components) - set(COMPONENTS))
    if wrong:
        raise ValueError(f"no component {', '.join(wrong)}; there are {', '.join(COMPONENTS)}")
    return tuple(components)


def _audited(components: Sequence[str] | None, subject: str) -> tuple[str, ...]:
    """Return the components that were asked for, or all that have mutants."""
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
    sys.path.insert(0, str(root))  # the catalog of faults is there
    return root


@contextlib.contextmanager
def _places(launcher: str | None, key_file: Path | None, count: int) -> Iterator[Sequence[Place]]:
    """Yield the place of each process: here, or on the hosts of agents in turn.  Errors: ValueError."""
    with hosts.agents(launcher, key_file) as found:
        if found is None:
            yield [Place()] * (count or min(_MOST, cores()))
            return
        turns = itertools.cycle(found.places)
        yield [next(turns) for _ in range(count or min(_MOST_ELSEWHERE, found.slots))]
