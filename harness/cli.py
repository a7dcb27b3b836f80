"""The ``concord`` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness import reporting
from harness.audit import commands
from harness.bench import commands as perf
from harness.entry_points import BACKENDS, DEVICES, modules_for
from harness.nightly import nightly
from harness.probe import commands as probing
from harness.refusing import bad, refusing
from harness.subjects import TORCH

if TYPE_CHECKING:
    from harness.programs.spec import Program
    from harness.worlds.world import WorldSpec

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
    subject: Annotated[str, typer.Option(help="Whose stacks: torch, reference, or what a package brings.")] = TORCH,
    timeout: Annotated[float, typer.Option(help="Seconds for the run on ranks.", min=1)] = 120.0,
    times: Annotated[int, typer.Option(help="How often, for what fails now and then.", min=1)] = 1,
    source: Annotated[bool, typer.Option("--source", help="Print the program as Python, and run nothing.")] = False,
) -> None:
    """Run a stored program on one device and on ranks again, and compare.

    Exits with 0 if the runs are the same, 1 if not, 2 if FILE is no program, or one that nothing can be said of or that
    can't be run as asked.
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
    from harness.programs.check import problems, tame, truth_of
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed

    spec = _spec(program, backend, device, subject, timeout)
    truth = truth_of(program)
    if not tame(program, truth.tensors):
        raise bad(f"{file}: its numbers are so large that they may overflow in {', '.join(sorted(program.dtypes))}")
    how = "bit for bit" if truth.exact else "within what rounding explains"
    whose = program.layout.stack if subject == TORCH else f"{program.layout.stack} of {subject}"
    typer.echo(f"{whose} on {program.layout.world} ranks ({spec.backend} on {device}), compared {how}")
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


def _spec(program: Program, backend: str, device: str, subject: str, timeout: float) -> WorldSpec:
    """The world that a program is to run on.  Errors: typer.Exit, once it has been said why there is none."""
    import torch.distributed as dist

    from harness.devices import DeviceError, backend_for, inventory
    from harness.subjects import SubjectError, find
    from harness.worlds.world import WorldSpec

    with refusing(DeviceError, SubjectError, ValueError):
        registers = modules_for(DEVICES, device)
        inventory(device, imports=registers)
        backend = backend or backend_for(device)
        imports = tuple(dict.fromkeys((*registers, *modules_for(BACKENDS, backend))))
        whose = find(subject)
        if missing := whose.lacks(program.layout.under):
            raise SubjectError(missing)
        if not imports and not dist.is_backend_available(backend):
            raise DeviceError(f"torch has no backend {backend!r} here")
        return WorldSpec(
            program.layout.world,
            backend=backend,
            device=device,
            timeout=timeout,
            imports=imports,
            subject=subject,
            first=whose.first,
        )


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()
