"""The ``concord`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness import reporting
from harness.audit import commands
from harness.bench import commands as perf
from harness.nightly import nightly
from harness.probe import commands as probing
from harness.refusing import bad

app = typer.Typer(no_args_is_help=True, add_completion=False)

app.add_typer(perf.app, name="perf")
app.command()(commands.audit)
app.command()(commands.faults)
app.command()(commands.reach)
app.command()(nightly)
app.command()(reporting.report)
app.command()(reporting.compare)
app.command()(reporting.bundle)
app.command("verify")(reporting.verify_bundle)
app.command()(probing.probe)
app.add_typer(probing.profile_app, name="profile")


@app.callback()
def concord() -> None:
    """Concord: conformance of PyTorch's distributed stack."""


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A stored program: the .json beside a reproducer.")],
    backend: Annotated[str, typer.Option(help="Of the process groups. Default: torch's own for the device.")] = "",
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
        raise bad(f"{file}: {e.strerror}") from e
    except ValueError as e:
        raise bad(f"{file}: {e}") from e
    if source:
        typer.echo(text, nl=False)
        return

    from harness.programs import execute
    from harness.programs.check import problems, truth_of
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed
    from harness.worlds.world import WorldSpec

    spec = WorldSpec(program.layout.world, backend=backend, device=device, timeout=timeout)
    truth = truth_of(program)
    how = "bit for bit" if truth.exact else "within what rounding explains"
    typer.echo(f"{program.layout.stack} on {program.layout.world} ranks ({spec.backend} on {device}), compared {how}")
    pool, failed = Pool(), False
    try:
        world = pool.acquire(spec)
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


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
