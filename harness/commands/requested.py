"""Resolve command-line options to a profile, a world and leased devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from harness import entry_points
from harness.commands.refusing import bad
from harness.profiles import Defects, Profile, ProfileError, is_of_defects, parse_defects, text_of
from harness.profiles.shelf import profile_named
from harness.profiles.vocabulary import FORK

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.worlds.world import WorldSpec


def defects_in(file: Path) -> Defects | None:
    """Read a file of defects; None if it is something else, such as a profile.

    Errors: :class:`~harness.profiles.ProfileError`.
    """
    if not file.is_file():
        return None
    text = text_of(file)
    return parse_defects(text, str(file)) if is_of_defects(text) else None


def profile_asked_for(option: str, name: str) -> Profile:
    """Read the profile that an option names. Errors: typer.Exit, after its mistakes have been printed."""
    try:
        return profile_named(name)
    except ProfileError as e:
        raise bad(f"{option}:\n{e}") from e


def world_asked_for(
    size: int,
    *,
    backend: str = "",
    device: str = "",
    imports: tuple[str, ...] = (),
    timeout: float = 60.0,
    profile: Profile | None = None,
) -> tuple[WorldSpec, Inventory]:
    """Return the specification of a world, and the available devices.

    ``size``: the number of ranks. ``backend``: torch's own for the device if empty. ``device``: a type; if empty, the
    accelerator's, or the host if there is none. ``imports``: modules that ranks import first. ``profile``: gives
    further settings.

    Errors: typer.Exit, after a message that says what is missing.
    """
    from harness.devices import DeviceError, backend_for, inventory
    from harness.worlds.world import WorldSpec

    try:
        brought = entry_points.modules_for(entry_points.DEVICES, device) if device else ()
        mask = profile.visible_devices if profile is not None else ""
        there = inventory(device or None, imports=(*imports, *brought), mask=mask)
        backend = backend or backend_for(there.kind)
    except (DeviceError, ValueError, RuntimeError) as e:
        raise bad(str(e)) from e
    modules = (*imports, *brought, *entry_points.modules_for(entry_points.BACKENDS, backend))
    env = profile.env if profile is not None else ()
    start = profile.start if profile is not None and profile.start else FORK
    imported = tuple(dict.fromkeys(modules))
    spec = WorldSpec(size, backend, there.kind, timeout=timeout, imports=imported, env=env, start=start)
    return spec, there


@contextlib.contextmanager
def devices_for(inventory: Inventory, ranks: int, ranks_per_device: int = 1) -> Iterator[tuple[str, ...]]:
    """Lease the devices of so many ranks, and yield one for each rank, or () on the host.

    Errors: typer.Exit if there are too few.
    """
    from harness.devices import DeviceError
    from harness.leases import Leases
    from harness.leases.messages import Teller
    from harness.placement import Need

    need = Need(ranks, ranks_per_device)
    try:
        leases = Leases(inventory)
        for place in leases.refused:
            typer.echo(f"leases on devices are not kept in {place}", err=True)
        tell = Teller(lambda line: typer.echo(line, err=True))
        with leases.hold(need.count(inventory), waiting=tell) as leased:
            yield need.deal(inventory, leased)
    except DeviceError as e:
        raise bad(str(e)) from e
