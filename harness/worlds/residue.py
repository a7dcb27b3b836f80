"""The residue of a test in a rank: the rank's state is recorded before the test and compared after it.

Some of it can be restored (random state, torch's switches, the current device and stream, Dynamo's caches).  The rest
(threads, processes, groups, file descriptors, memory of the device) can't, and then the rank is not used again.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from harness.worlds import switches
from harness.worlds.monitor import THREAD_NAME
from harness.worlds.seeding import seed


@dataclass(frozen=True)
class OnDevice:
    """The state of an accelerator in this process."""

    index: int
    stream: Any
    """The current stream."""
    allocated: int
    """Bytes that tensors take; 0 if the device does not count them."""

    @classmethod
    def take(cls) -> OnDevice:
        """Record the state after all work that was queued, with nothing cached."""
        import torch

        torch.accelerator.synchronize()
        gc.collect()
        torch.accelerator.empty_cache()
        index = torch.accelerator.current_device_index()
        try:
            allocated = torch.accelerator.memory_allocated()
        except (RuntimeError, NotImplementedError, AttributeError):  # the package of the device has no such figure
            allocated = 0
        return cls(index, torch.accelerator.current_stream(), allocated)

    def restore(self) -> None:
        """Make the device and the stream the current ones again."""
        import torch

        torch.accelerator.set_device_index(self.index)
        torch.accelerator.set_stream(self.stream)


@dataclass(frozen=True)
class Residue:
    """The state of a rank, as far as another test could notice it."""

    threads: frozenset[str]
    children: frozenset[int]
    groups: int
    default_group: Any
    """A weak reference: a group that a test destroys must go."""
    files: int
    cwd: str
    environ: dict[str, str]
    switches: dict[str, Any]
    device: OnDevice | None


def take(*, on_device: bool) -> Residue:
    """Record the state of this process, and of its accelerator if the rank has one (``on_device``)."""
    import torch.distributed as dist

    device = OnDevice.take() if on_device else None  # first: what is queued there may still open connections
    threads = frozenset(
        f"thread {t.name!r}"
        for t in threading.enumerate()
        if t.name != THREAD_NAME and t is not threading.main_thread()
    )
    return Residue(
        threads=threads,
        children=frozenset(_children()),
        groups=len(dist.distributed_c10d._world.pg_map),
        default_group=weakref.ref(dist.group.WORLD) if dist.is_initialized() else None,
        files=len(os.listdir("/proc/self/fd")),
        cwd=_cwd(),
        environ=dict(os.environ),
        switches=switches.take(),
        device=device,
    )


def compare(before: Residue, *, restore: bool = False) -> list[str]:
    """Return what is there now and was not before, as a list of phrases; [] if nothing.

    ``restore``: also restore what can be restored.  An empty list then means that the next test finds the rank as this
    one did.
    """

    if before.device is not None:
        before.device.restore()
    after = take(on_device=before.device is not None)
    left = sorted(after.threads - before.threads)
    left += [f"child process {pid}" for pid in sorted(after.children - before.children)]
    if after.groups != before.groups:
        left.append(f"{after.groups} process groups, {before.groups} before")
    elif after.default_group != before.default_group:
        left.append("another default process group than before")
    elif after.files > before.files:
        left.append(f"{after.files - before.files} open file descriptors more than before")
    if before.device is not None and after.device is not None and after.device.allocated > before.device.allocated:
        left.append(f"{after.device.allocated - before.device.allocated} bytes of device memory more than before")
    if restore:
        try:
            os.chdir(before.cwd)
        except OSError:
            left.append("no working directory any more")
        os.environ.clear()
        os.environ.update(before.environ)
        switches.restore(before.switches)
        seed()
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
    return left


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


def _children() -> list[int]:
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as f:
                pids.extend(int(pid) for pid in f.read().split())
        except OSError:
            continue
    return pids
