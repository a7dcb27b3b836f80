"""The fingerprint of machine and software, on which figures depend besides the code under test."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from harness.bench.records import Fingerprint, pairs
from harness.devices import cores, device_name
from harness.provenance import memory, processor
from harness.redaction import NOT_SHOWN, recorded

_VARIABLES = re.compile(r"(GLOO|NCCL|TORCH_NCCL|OMP|MKL|KMP|TORCHINDUCTOR)_\w+|LD_PRELOAD|MALLOC_\w+")
"""Environment variables that change how ranks run."""
_PLACES = ("_DIR", "_PATH", "_FILE")
"""Suffixes of variables that only say where something is."""
LABEL = "CONCORD_MACHINE"
"""Environment variable that names a machine, to tell it from others that look alike but differ."""


def fingerprint(kind: str = "cpu") -> Fingerprint:
    """Return the fingerprint of this machine and its software.  ``kind``: the device type of the ranks."""
    import torch

    machine = {
        "cores": str(cores()),
        "memory": memory(),
        "processor": processor() or platform.machine(),
        "label": recorded(LABEL, os.environ.get(LABEL, "")) or "",
    }
    software = {
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{
            name: recorded(name, value) or NOT_SHOWN
            for name, value in os.environ.items()
            if value and _VARIABLES.fullmatch(name) and not name.endswith(_PLACES)
        },
    }
    if kind != "cpu":
        machine["accelerators"] = f"{torch.accelerator.device_count()} x {device_name(kind)}"
        software |= {f"{kind} {part}": str(version) for part, version in _versions(kind).items()}
    return Fingerprint(machine=pairs(machine), software=pairs(software))


def _versions(kind: str) -> dict[str, str]:
    """Return versions for a device type: of the toolkit that torch was built with, and of installed packages."""
    import torch

    versions = {}
    built_with = getattr(torch.version, kind, None)
    if built_with:
        versions["toolkit"] = str(built_with)
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.search(rf"(^|[-_]){re.escape(kind)}|ccl", name):
            versions[name] = distribution.version
    return versions


def memory_of(kind: str) -> int | None:
    """Return the bytes of memory of an accelerator, the smallest of them; None if torch does not say."""
    import torch

    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    if properties is None:
        return None
    sizes = [getattr(properties(i), "total_memory", 0) for i in range(torch.accelerator.device_count())]
    return min(sizes, default=0) or None


def available() -> int:
    """Return how many bytes of memory this process can still use, according to the kernel and its control group."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        text = Path("/proc/meminfo").read_text()
        free = 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        pass  # an older kernel
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - used))
