"""``concord replay``: run a stored program again."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.commands.refusing import bad, refusing
from harness.commands.requested import devices_for, profile_asked_for, world_asked_for
from harness.subjects import TORCH

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.profiles import Profile
    from harness.specs.program import Program
    from harness.worlds.world import WorldSpec


def replay(
    file: Annotated[Path, typer.Argument(help="Stored program: the .json file beside a reproducer.")],
    backend: Annotated[str, typer.Option(help="Backend. Default: the profile's, or torch's own for the device.")] = "",
    device: Annotated[str, typer.Option(help="Type of the ranks' device. Default: the profile's, or cpu.")] = "",
    profile: Annotated[str, typer.Option(help="Name or file of the profile under which it failed.")] = "",
    subject: Annotated[str, typer.Option(help="Whose stacks: torch, reference, or a package's.")] = TORCH,
    timeout: Annotated[float, typer.Option(help="Seconds for the run on ranks.", min=1)] = 120.0,
    times: Annotated[int, typer.Option(help="How often to run it, for intermittent failures.", min=1)] = 1,
    source: Annotated[
        bool, typer.Option("--source", help="Print the program as Python instead of running it.")
    ] = False,
) -> None:
    """Run a stored program again, on one device and on ranks, and compare the results.

    Exits with 0 if they are the same, 1 if not; with 2 if FILE is no program, if its numbers may overflow, or if it
    can't be run as asked.
    """
    from harness.programs.source import source as written

    program = _program(file)
    if source:
        typer.echo(written(program), nl=False)
        return

    from harness.programs import execute
    from harness.programs.check import problems, tame, truth_of
    from harness.programs.options import dtypes_of
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed

    claimed = profile_asked_for("--profile", profile) if profile else None
    spec, inventory = _world(program, backend, device, subject, timeout, claimed)
    _require_trainable(file, program)
    with _obeyed(claimed):
        truth = truth_of(program)
    if not tame(program, truth.tensors):
        dtypes = ", ".join(sorted(dtypes_of(program)))
        raise bad(f"{file}: its numbers are so large that they may overflow in {dtypes}")
    how = "bit for bit" if truth.exact else "within what rounding explains"
    whose = program.layout.stack if subject == TORCH else f"{program.layout.stack} of {subject}"
    typer.echo(f"{whose} on {spec.size} ranks ({spec.backend} on {spec.device}), compared {how}")
    failed = False
    ranks_per_device = claimed.ranks_per_device if claimed is not None else 1
    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(devices_for(inventory, spec.size, ranks_per_device))
        pool = stack.enter_context(contextlib.closing(Pool()))
        try:
            world = pool.acquire(spec, devices)
        except RanksFailed as e:
            raise bad(f"there is no such world: {e.summary()}") from e
        for number in range(1, times + 1):
            label = f"run {number} of {times}: " if times > 1 else ""
            try:
                differences = problems(program, truth, world.run(execute.on_rank, program))
            except RanksFailed as e:
                typer.echo(f"{label}{e}")
                failed = True
                continue
            failed = failed or bool(differences)
            for line in (
                map(str, differences) if differences else [f"the same: {len(truth.tensors)} tensors on every rank"]
            ):
                typer.echo(f"{label}{line}")
    raise typer.Exit(1 if failed else 0)


def _program(file: Path) -> Program:
    """Read the program in an untrusted file. Errors: typer.Exit, after the reason has been printed."""
    from harness.programs.stored import loads
    from harness.safe_io.files import FileError, contents
    from harness.specs import limits

    with refusing(FileError):
        data = contents(file, limits.FILE)
    try:
        return loads(data)
    except ValueError as e:
        raise bad(f"{file}: {e}") from e


def _require_trainable(file: Path, program: Program) -> None:
    """Require that one device can train a program. Errors: typer.Exit, after the reason has been printed."""
    from harness.programs import execute

    try:
        execute.trained_alone(program)
    except Exception as e:  # a stored model may be one that the strategies don't draw, so torch may raise anything
        first = (str(e).splitlines() or [""])[0]
        raise bad(f"{file}: one device can't train it: {type(e).__name__}: {first[:300]}") from e


def _obeyed(profile: Profile | None) -> contextlib.AbstractContextManager[None]:
    """Put the claims and tolerances of the profile in force."""
    from harness.plugin.profiles import here
    from harness.profiles.obeyed import obeying, of

    return obeying(of(profile, here(profile.device if profile is not None and profile.asks_for_device_name else "")))


def _world(
    program: Program, backend: str, device: str, subject: str, timeout: float, profile: Profile | None
) -> tuple[WorldSpec, Inventory]:
    """Return the world on which to run a program, and the available devices. Errors: typer.Exit."""
    import torch.distributed as dist

    from harness.stacks.registry import stack_of
    from harness.subjects import SubjectError, find

    with refusing(SubjectError):
        whose = find(subject)
    if missing := whose.lacks(stack_of(program.layout).name):
        raise bad(str(missing))
    if profile is not None:
        backend, device = backend or profile.backend, device or profile.device
    spec, inventory = world_asked_for(
        program.layout.world,
        backend=backend,
        device=device or "cpu",
        imports=profile.imports if profile is not None else (),
        timeout=timeout,
        profile=profile,
    )
    if not spec.imports and not dist.is_backend_available(spec.backend):
        raise bad(f"torch has no backend {spec.backend!r} here")
    return dataclasses.replace(spec, subject=subject, first=whose.first), inventory
