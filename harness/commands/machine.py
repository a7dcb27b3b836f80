"""What a machine offers to ranks: the rows of ``concord doctor``, with a remedy for what is in the way."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.devices import DeviceError, Inventory, cores, cpu_quota, device_name, inventory

_LEAST_SHARED = 1 << 30  # bytes; a collective library keeps some megabytes for each pair of ranks
_LEAST_FILES = 4096
_LEAST_LOCKED = 64 << 20  # bytes
_GIB = 1 << 30
_CORE_MINUTES, _LEAST_MINUTES = 30, 4
"""What all suites take on the host: 12 to 17 minutes on two quiet cores, and no less than some tests take alone."""


@dataclass(frozen=True)
class Finding:
    """A row of the table: a property of ranks, its state on this machine, and what would change it."""

    what: str
    found: str
    remedy: str = ""


def machine() -> Iterator[Finding]:
    """Yield all rows about this machine.  Starts a server as a session would, which takes seconds."""
    yield build()
    try:
        there = inventory()
    except DeviceError as e:
        yield Finding("devices", f"none: {e}")
        there = inventory("cpu")
    else:
        yield devices(there)
    yield forking()
    yield processors(len(os.sched_getaffinity(0)), cpu_quota())
    yield shared_memory(Path("/dev/shm"))  # noqa: S108 - its own name, and nothing is written
    yield from limits(resource.getrlimit, accelerators=not there.on_host)
    yield interfaces([name for _, name in socket.if_nameindex()])
    yield plan(there, cores())


def build() -> Finding:
    """Describe the installed PyTorch, and what it was built for."""
    import torch

    # The versions of the runtimes that it was built for; None for the others.
    runtimes = {name: version for name, version in vars(torch.version).items() if name[0] != "_"}
    built = [
        f"{name} {v}" for name, v in runtimes.items() if isinstance(v, str) and name not in ("git_version", "version")
    ]
    built_for = ", ".join(built) or "the host alone"
    return Finding("PyTorch", f"{torch.__version__}, built for {built_for}")


def devices(there: Inventory, name_of: Callable[[str, int], str] = device_name) -> Finding:
    """Describe the accelerators that torch sees, or say why it sees none."""
    if not there.on_host:
        names = [name_of(there.kind, i) for i in range(len(there.devices))]
        counted = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        return Finding("devices", f"{counted} ({there.kind}); leases know them as {', '.join(there.keys)}")
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return Finding(
            "devices", "none: this PyTorch was built for the host alone", "install a build for the accelerator"
        )
    return Finding(
        "devices",
        f"none: this PyTorch was built for {accelerator.type}, and sees no such device",
        "install the driver, give the container its devices (docker run --gpus all), or check the variable that masks "
        "devices",
    )


def forking() -> Finding:
    """Start a server as a session does, and say whether ranks can be forked from it."""
    from harness.worlds.launch import LaunchError
    from harness.worlds.local import LocalLauncher

    began = time.monotonic()
    launcher = LocalLauncher()
    try:
        missing = launcher.wait_ready()["missing"]
    except LaunchError as e:
        return Finding("start of ranks", f"can't be forked: {e}", "--rank-start spawn, or start in a profile")
    finally:
        launcher.close()
    left = f"; left to the ranks: {'; '.join(missing)}" if missing else ""
    return Finding("start of ranks", f"forked from a process that was ready in {time.monotonic() - began:.1f} s{left}")


def processors(allowed: int, quota: float | None) -> Finding:
    """Describe the cores that this process may use.  ``quota``: how many cores' time its control group allows."""
    if quota is None or quota >= allowed:
        return Finding("cores", f"{allowed}")
    return Finding(
        "cores", f"{quota:g} of {allowed}, by the quota of the control group", "more CPUs for the container (--cpus)"
    )


def shared_memory(folder: Path) -> Finding:
    """Describe the shared memory, which collective libraries use between ranks of a machine."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as e:
        return Finding("shared memory", f"{folder}: {e.strerror}", "mount a tmpfs there")
    found = f"{usage.free / _GIB:.1f} GiB free of {usage.total / _GIB:.1f} in {folder}"
    return Finding("shared memory", found, "docker run --shm-size 8g" if usage.free < _LEAST_SHARED else "")


def limits(getrlimit: Callable[[int], tuple[int, int]], *, accelerators: bool) -> Iterator[Finding]:
    """Describe the limits of the shell that ranks run into.  ``accelerators``: whether there are any."""
    soft, hard = getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _LEAST_FILES
    more = f"ulimit -n {_LEAST_FILES if hard < 0 else min(hard, _LEAST_FILES)}" if few else ""
    yield Finding("open files", f"{_shown(soft)} per process, at most {_shown(hard)}", more)
    locked, _ = getrlimit(resource.RLIMIT_MEMLOCK)
    if accelerators:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1), if ranks use InfiniBand"
        found = "unlimited" if locked < 0 else f"{locked >> 20} MiB"
        yield Finding("locked memory", found, remedy if 0 <= locked < _LEAST_LOCKED else "")
    processes, _ = getrlimit(resource.RLIMIT_NPROC)
    yield Finding("processes and threads", _shown(processes), "")


def _shown(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def interfaces(names: list[str]) -> Finding:
    """Name the network interfaces, of which a collective library on the machine's network picks one."""
    others = [name for name in names if name != "lo"]
    found = ", ".join(names) or "none"
    several = "if ranks can't connect, name the right one in GLOO_SOCKET_IFNAME or your library's variable"
    return Finding("network interfaces", found, several if len(others) > 1 else "")


def plan(there: Inventory, usable: int) -> Finding:
    """Say what ``pytest suites/ -n gpus`` does here."""
    count = len(there.devices)
    if there.on_host:
        minutes = max(_LEAST_MINUTES, round(_CORE_MINUTES / usable))
        found = f"runs on gloo on the host, {usable} worlds side by side, of any size, in about {minutes} minutes"
    else:
        workers = f"{count} pytest worker{'s' if count > 1 else ''}"
        found = f"runs {workers} on {there.kind}, worlds of up to {count} ranks; nobody has measured for how long"
    more = "" if there.on_host else "--worlds-per-device 4 for more of them at once"
    more = f"--ranks-per-device 4 for larger worlds, {more}" if more and count < 4 else more
    return Finding("pytest suites/ -n gpus", found, more)
