"""What commands are asked for: profiles, worlds of a backend, and devices for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from harness import entry_points
from harness.commands.refusing import bad
from harness.profiles import Mistake, Profile, ProfileError
from harness.profiles.shelf import OURS, Shelf

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.worlds.world import WorldSpec


def read_profile(name: str) -> Profile:
    """The profile of a file, or of that name: a shipped one, or a package's.

    Errors: :class:`~harness.profiles.ProfileError`.
    """
    file = Path(name)
    if not file.exists() and file.suffix != ".toml":
        try:
            file = Shelf(OURS.parents[1]).path(name)
        except ValueError as e:
            raise ProfileError([Mistake(name, 0, "", str(e))]) from e
    return Shelf(Path.cwd()).read(file)


def profile_asked_for(option: str, name: str) -> Profile:
    """The profile that an option names.  Errors: typer.Exit, once its mistakes have been said."""
    try:
        return read_profile(name)
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
    """What worlds are made of, and the devices that there are.

    ``backend``: torch's own for the device, where it is empty; ``device``: a type, or empty for the accelerator, or the
    host where there is none; ``imports``: modules that ranks import first; ``profile``: what else they need.
    Errors: typer.Exit, once it has been said what there is not.
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
    spec = WorldSpec(size, backend, there.kind, timeout=timeout, imports=tuple(dict.fromkeys(modules)), env=env)
    return spec, there


@contextlib.contextmanager
def devices_for(inventory: Inventory, ranks: int, ranks_per_device: int = 1) -> Iterator[tuple[str, ...]]:
    """Lease the devices of so many ranks: one for each rank, () on the host.

    Errors: typer.Exit if there are not as many.
    """
    from harness.devices import DeviceError, dealt
    from harness.leases import Leases
    from harness.leases.telling import Teller

    try:
        leases = Leases(inventory)
        for place in leases.refused:
            typer.echo(f"leases on devices are not kept in {place}", err=True)
        tell = Teller(lambda line: typer.echo(line, err=True))
        with leases.hold(inventory.demand(ranks, ranks_per_device), waiting=tell) as leased:
            yield () if inventory.on_host else dealt(leased, ranks, ranks_per_device, whole=False)
    except DeviceError as e:
        raise bad(str(e)) from e
