"""What figures depend on besides the code under test: machine and software."""

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
"""How those end that only say where something is."""
LABEL = "CONCORD_MACHINE"
"""Environment variable with a name for machines that look alike and are not."""


def fingerprint(kind: str = "cpu") -> Fingerprint:
    """Of this machine and what is installed; ``kind`` is the type of the ranks' device."""
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
        software |= {f"{kind} {what}": str(version) for what, version in _versions(kind).items()}
    return Fingerprint(machine=pairs(machine), software=pairs(software))


def _versions(kind: str) -> dict[str, str]:
    """What torch says it was built with for a type of device, and what packages of that name are installed."""
    import torch

    found = {}
    built_with = getattr(torch.version, kind, None)
    if built_with:
        found["toolkit"] = str(built_with)
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.search(rf"(^|[-_]){re.escape(kind)}|ccl", name):
            found[name] = distribution.version
    return found


def available() -> int:
    """Bytes of memory that this process can still have, by the kernel and by its control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        text = Path("/proc/meminfo").read_text()
        found = 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        pass  # an older kernel
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return found
    return found if limit == "max" else min(found, max(0, int(limit) - used))
