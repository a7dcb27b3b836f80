"""The commands ``concord probe`` and ``concord profile check``."""

from __future__ import annotations

import datetime
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.commands.outputs import writable
from harness.commands.refusing import bad
from harness.commands.requested import defects_in, devices_for, profile_asked_for, world_asked_for
from harness.profiles import NEVER_RUN, Profile, ProfileError
from harness.profiles.shelf import profile_named
from harness.profiles.vocabulary import COLLECTIVES, DTYPES, STACKS
from harness.safe_io.writing import write_whole

if TYPE_CHECKING:
    from rich.table import Table

    from harness.devices import Inventory
    from harness.probe.found import Difference, Found
    from harness.worlds.world import WorldSpec


profile_app = typer.Typer(no_args_is_help=True)


@profile_app.callback()
def profile() -> None:
    """Profiles: what a backend claims."""


@profile_app.command()
def check(files: Annotated[list[Path], typer.Argument(help="Profiles, or files of defects (.toml).")]) -> None:
    """Read profiles, with what they inherit and the known defects, and report every mistake with file, line and key.

    Exits with 0 if there is none, otherwise with 2.
    """
    wrong = 0
    for file in files:
        try:
            if (defects := defects_in(file)) is not None:
                typer.echo(f"{file}: {len(defects.defects)} known defects of {defects.owner}")
                continue
            parsed = profile_named(str(file))
        except ProfileError as e:
            typer.echo(str(e), err=True)
            wrong += len(e.mistakes)
        else:
            over = f", over {', '.join(parsed.bases)}" if parsed.bases else ""
            over += f"; {NEVER_RUN}" if parsed.never_run else ""
            counts = Counter(waiver.owner for waiver in parsed.waivers)
            of = f" ({', '.join(f'{n} of {owner}' for owner, n in counts.items())})" if counts else ""
            typer.echo(
                f"{file}: {parsed.name}, {parsed.backend} on {parsed.device}, {len(parsed.waivers)} waivers{of}{over}"
            )
    if wrong:
        raise bad(f"{wrong} mistake{'s' if wrong > 1 else ''}")


def probe(
    backend: Annotated[str, typer.Option(help="Backend for init_process_group. Default: torch's own.")] = "",
    device: Annotated[str, typer.Option(help="Type of device. Default: the accelerator, or cpu.")] = "",
    imports: Annotated[list[str] | None, typer.Option(help="Module that ranks import first. Repeatable.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the draft to this file.", callback=writable)
    ] = None,
    against: Annotated[str, typer.Option(help="Profile to compare the results with, instead of drafting one.")] = "",
    json: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file as JSON.", callback=writable)
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the draft. Default: DEVICE-BACKEND.")] = "",
    sizes: Annotated[str, typer.Option(help="World sizes to try, with commas between them.")] = "1,2,3,4",
    stacks: Annotated[str, typer.Option(help="Stacks to try, with commas between them.")] = ",".join(STACKS),
    timeout: Annotated[float, typer.Option(help="Seconds for one trial.", min=1)] = 10.0,
    limit: Annotated[float, typer.Option(help="Seconds for all trials; the rest is not tried.", min=1)] = 600.0,
    ranks_per_device: Annotated[int, typer.Option(help="How many ranks share an accelerator.", min=1)] = 1,
) -> None:
    """Try what a backend can do, in throw-away ranks, and draft its profile or compare it with a profile.

    Every result is compared with the exact model, so whatever works gave the right values. Exits with 1 if no world
    came up, or if something that the profile claims was not found; with 2 for bad input.
    """
    from harness.probe.draft import draft

    profile = profile_asked_for("--against", against) if against else None
    counts, tried = _sizes(sizes), _stacks(stacks)
    if output is not None and against:
        raise bad("--output: --against compares with a profile, and drafts none")
    if output is not None and output.is_file():
        raise bad(f"--output {output}: the file exists, and you may have edited it: give the draft another name")
    if profile is not None:
        backend, device = backend or profile.backend, device or profile.device
        ranks_per_device = max(ranks_per_device, profile.ranks_per_device)
    modules = tuple(imports or ()) or (profile.imports if profile is not None else ())
    spec, inventory = world_asked_for(
        1, backend=backend, device=device, imports=modules, timeout=timeout, profile=profile
    )
    found = _probed(spec, inventory, counts, tried, limit, ranks_per_device)
    difference = _against(found, profile) if profile is not None else None
    _show(found, difference)
    if json is not None:
        _write(json, _encoded(found, difference))
    if not any(size.end == "right" for size in found.sizes):
        ask = "" if modules else f"; if a package brings {spec.backend!r}, name its module: --imports MODULE"
        typer.echo(f"concord: no world came up, so nothing else was tried{ask}", err=True)
        raise typer.Exit(1)
    if difference is not None:
        raise typer.Exit(1 if difference.not_found else 0)
    today = datetime.datetime.now(datetime.UTC).date()
    text = draft(found, name or f"{spec.device}-{spec.backend}", today)
    if output is None:
        typer.echo(text, nl=False)
    else:
        _write(output, text)
        typer.echo(f"{output}: review it, then: concord profile check {output}", err=True)


# input


def _sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 1024 for word in words):
        raise bad(f"--sizes {text}: whole numbers from 1, with commas between them")
    return sorted({int(word) for word in words})


def _stacks(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if word not in STACKS]
    if wrong:
        raise bad(f"--stacks: {wrong[0]!r} is not a stack; there are {', '.join(STACKS)}")
    return words


# trying, and showing it


def _probed(
    spec: WorldSpec, inventory: Inventory, sizes: list[int], stacks: list[str], limit: float, ranks_per_device: int
) -> Found:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from harness.placement import Need
    from harness.plugin.profiles import here
    from harness.probe import trials
    from harness.probe.run import Prober

    possible = [n for n in sizes if Need(n, ranks_per_device).fits(inventory)]
    if not possible:
        raise bad(f"--sizes: there are {len(inventory.devices)} {inventory.kind} devices, which is too few")
    total = len(possible)
    if "collectives" in stacks:
        total += sum(map(len, trials.portions())) + len(trials.FEATURES)
    total += sum(stack in stacks for stack, _ in (*trials.programs(1), *trials.WORK))
    columns = (TextColumn("{task.fields[what]:<45.45}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with ExitStack() as stack:
        devices = stack.enter_context(devices_for(inventory, max(possible), ranks_per_device))
        console = Console(stderr=True)
        shown = stack.enter_context(Progress(*columns, TimeElapsedColumn(), console=console, transient=True))
        task = shown.add_task("", total=total, what="starting")

        def say(what: str, end: str) -> None:
            shown.update(task, advance=1, what=what)
            if end in ("crashed", "hung", "wrong"):
                shown.console.print(f"{end}: {what}", markup=False, highlight=False)

        prober = stack.enter_context(Prober(spec, devices, seconds=limit, say=say))
        return prober.probe(possible, stacks, here())


def _against(found: Found, profile: Profile) -> Difference:
    from harness.plugin.profiles import here
    from harness.probe.found import against

    return against(found, profile, profile.claims.on(here(profile.device if profile.asks_for_device_name else "")))


def _encoded(found: Found, difference: Difference | None) -> str:
    from harness.probe.found import encoded

    return encoded(found, difference)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as e:
        raise bad(f"{path}: {e.strerror or e}") from e


def table(found: Found) -> Table:
    """Return, for each collective, the dtypes whose trials ended well, were refused, or ended badly."""
    from rich.table import Table

    title = f"{found.backend} on {found.device}: {found.seconds:g} s"
    shown = Table("collective", "right", "refused", "bad", title=title, title_justify="left", show_lines=True)
    for collective in COLLECTIVES:
        columns: dict[str, list[str]] = {"right": [], "refused": [], "bad": []}
        for dtype in DTYPES:
            trials = [t for t in found.trials if (t.collective, t.dtype) == (collective, dtype)]
            for end, count in Counter(t.end for t in trials).items():
                what = dtype if count == len(trials) else f"{dtype} ({count} of {len(trials)} ops)"
                column = columns.get(end)
                columns["bad"].append(f"{what} {end}") if column is None else column.append(what)
        if any(columns.values()):
            shown.add_row(collective, *(", ".join(column) for column in columns.values()))
    return shown


def _show(found: Found, difference: Difference | None) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    if found.trials:
        console.print(table(found))
    for size in found.sizes:
        if size.end != "right":
            console.print(f"worlds of {size.size}: {size.end}: {size.detail}", markup=False, highlight=False)
    for ability in found.abilities:
        if ability.end != "right":
            console.print(f"{ability.name}: {ability.end}: {ability.detail}", markup=False, highlight=False)
    if difference is not None:
        for title, lines in (("undeclared", difference.undeclared), ("not found", difference.not_found)):
            typer.echo(f"{title}: {len(lines)}")
            for line in lines:
                typer.echo(f"  {line}")
