"""The accelerators of this machine.

:mod:`harness.placement` decides which of them a world takes, and :mod:`harness.leases` reserves them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.entry_points import import_named, said


class DeviceError(RuntimeError):
    """The devices that were asked for are not available; the message says which ones are."""


class NoDeviceError(DeviceError):
    """torch has no device of the type that was asked for."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"no {kind} device: {why}")
        self.kind = kind
        self.why = why


@dataclass(frozen=True)
class Inventory:
    """The devices that worlds may use: of this machine, or of the hosts of agents."""

    kind: str
    """The type of device as torch names it: ``cpu``, or the accelerator's type."""
    devices: tuple[str, ...]
    """Names for :class:`torch.device`, in this process's own numbering. On the host: one ``cpu`` for each core.
    Those of agents' hosts have the number of their host as well (:func:`at_host`)."""
    keys: tuple[str, ...]
    """Names that identify each device to every process of the machine, whatever mask a process sees it through."""
    hosts: tuple[int, ...] = ()
    """The number of each device's host among those of agents; empty if all are of one host."""

    def __post_init__(self) -> None:
        if len(self.devices) != len(self.keys) or len(set(self.keys)) != len(self.keys):
            raise ValueError(f"each device needs a key of its own: {self.devices} and {self.keys}")
        if self.hosts and len(self.hosts) != len(self.devices):
            raise ValueError(f"each device needs a host: {self.devices} and {self.hosts}")

    @property
    def on_host(self) -> bool:
        """Whether it has no accelerator, only the host's cores."""
        return self.kind == "cpu"

    def host_of(self, index: int) -> int:
        """Return the number of the host of a device."""
        return self.hosts[index] if self.hosts else 0


_AT = "@"


def at_host(device: str, host: int) -> str:
    """Return the name of a device of an agent's host, as in ``cuda:3@1``."""
    return f"{device}{_AT}{host}"


def host_and_name(device: str) -> tuple[int | None, str]:
    """Return the number of a device's host, or None if no agent is asked for it, and its name for torch there."""
    name, _, host = device.partition(_AT)
    return int(host) if host else None, name


def cores() -> int:
    """Return how many cores this process may use: those of its affinity, or fewer if its control group has a quota."""
    return len(usable_cores())


def usable_cores() -> list[int]:
    """Return the numbers of the cores; with a quota, of as many as it is worth, rounded up."""
    allowed = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    return allowed if quota is None else allowed[: max(1, math.ceil(quota))]


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' worth of time the control groups of this process allow it; None: as much as there is.

    A container with 4 CPUs on a machine of 64 has a quota of 4, though its affinity may have all 64 cores. Versions 1
    and 2 of control groups are understood. ``membership``: the kernel's file on the groups of a process; ``mounted``:
    where groups are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0":
            quotas += _quotas(mounted, group, _quota_v2)
        elif "cpu" in controllers.split(","):
            for folder in (mounted / controllers, mounted / "cpu"):
                quotas += _quotas(folder, group, _quota_v1)
    return min(quotas, default=None)


def _quotas(root: Path, group: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """Yield the quotas of a group and of all groups above it; in a container, the group may be seen as the root."""
    folder = root / group.strip("/")
    for path in (folder, *folder.parents):
        if not path.is_relative_to(root):
            break
        try:
            quota = read(path)
        except (OSError, ValueError, ZeroDivisionError):  # no such group here, or no such controller
            continue
        if quota is not None:
            yield quota


def _quota_v2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())


def host_inventory() -> Inventory:
    """Return the host's cores as slots for worlds."""
    return slots_on(map(slot, usable_cores()))


def slot(core: int) -> str:
    """Return the key of one of this machine's cores."""
    return f"cpu-{core}"


def slots_on(keys: Iterable[str]) -> Inventory:
    """Return cores as slots for worlds."""
    keys = tuple(keys)
    return Inventory("cpu", ("cpu",) * len(keys), keys)


def inventory(kind: str | None = None, *, imports: Sequence[str] = (), mask: str = "") -> Inventory:
    """Return the accelerators that torch sees, or the host's cores if there are none (or if ``kind`` is ``cpu``).

    ``imports``: modules that register the type of device with torch. They are imported if torch sees none of ``kind``.
    ``mask``: the environment variable that masks devices, if it is known.

    Errors: :class:`NoDeviceError` if ``kind`` names an accelerator that is not there, or a module can't be imported.
    """
    if kind == "cpu":
        return host_inventory()
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and (accelerator is None or accelerator.type != kind) and imports:
        for name in imports:
            try:
                import_named(name)
            except (Exception, SystemExit) as e:
                raise NoDeviceError(kind, f"importing {name}: {said(e)}") from e
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        if kind is not None:
            raise NoDeviceError(kind, f"torch {torch.__version__} sees no accelerator on this machine")
        return host_inventory()
    if kind is not None and kind != accelerator.type:
        raise NoDeviceError(kind, f"the accelerator that torch {torch.__version__} sees is {accelerator.type}")
    count = torch.accelerator.device_count()
    return accelerators(accelerator.type, count, os.environ, mask, identities(accelerator.type, count))


def identities(kind: str, count: int) -> tuple[str, ...]:
    """Return what identifies each device on its machine, as its driver says: the UUID, or else the PCI address.

    Empty if the driver says neither of any device, or the same of two.
    """
    import torch

    properties_of = getattr(torch.get_device_module(kind), "get_device_properties", None)
    names = []
    for index in range(count if properties_of is not None else 0):
        try:
            properties = properties_of(index)  # type: ignore[misc]
        except Exception:  # whatever a driver raises: devices then have the names of the mask
            return ()
        address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if uuid := getattr(properties, "uuid", None):
            names.append(str(uuid))
        elif None not in address:
            names.append(":".join(f"{part:x}" for part in address))
    return tuple(names) if len(set(names)) == count else ()


def accelerators(
    kind: str, count: int, environ: Mapping[str, str], mask: str = "", identities: Sequence[str] = ()
) -> Inventory:
    """Return the accelerators as this process sees them through the caller's mask.

    ``identities``: what identifies each on the machine, if that is known: two processes may name one device in
    different ways, by number and by UUID, or by masks of two kinds. Otherwise the mask's names are its keys.

    The runtime has applied the mask already: device 0 of ``CUDA_VISIBLE_DEVICES=5,7`` is the machine's device 5. The
    mask is any variable whose name ends in ``VISIBLE_DEVICES`` or ``AFFINITY_MASK`` and which names at least ``count``
    devices (the runtime stops at the first one that it lacks). Without a mask, a device's number is its key. ``mask``:
    the name of the variable, if a profile gives it.
    """
    names = list(identities) or [str(i) for i in range(count)]
    for variable in sorted(environ) if not identities else ():
        if variable == mask if mask else variable.endswith(("VISIBLE_DEVICES", "AFFINITY_MASK")):
            entries = [entry.strip() for entry in environ[variable].split(",") if entry.strip()][:count]
            if len(entries) == count and len(set(entries)) == count:
                names = entries
                break
    devices = tuple(f"{kind}:{i}" for i in range(count))
    return Inventory(kind, devices, tuple(f"{kind}-{name}" for name in names))


def device_name(kind: str, index: int = 0) -> str:
    """Return torch's name for a device, or its type if torch has no name for it. Errors: those of its driver."""
    import torch

    named = getattr(torch.get_device_module(kind), "get_device_name", None)
    return str(named(index)) if named is not None else kind


def is_built_for(name: str) -> bool:
    """Return whether this build of torch is for a platform, as ``torch.version`` names it: ``cuda``, ``hip``, ``xpu``.

    A build for HIP calls its devices ``cuda`` and its backend ``nccl``, too: only this tells it from one for CUDA.
    """
    import torch

    return bool(getattr(torch.version, name, None))


def backend_for(kind: str) -> str:
    """Return the backend that torch itself would choose for a type of device."""
    import torch.distributed as dist

    return dist.Backend.default_device_backend_map.get(kind) or dist.get_default_backend_for_device(kind)


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the order in which to schedule tests of these world sizes: largest first, otherwise as they came."""
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])
