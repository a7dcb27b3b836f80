"""The residue of a test in a rank: the rank's state is recorded before the test and compared after it.

Some of it can be restored (random state, torch's switches, the current device and stream, Dynamo's caches, process
groups).  The rest (threads, processes, groups of meshes that something refers to, files, much memory of the device)
can't, and then the rank is not used again.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from harness.worlds import meshes, switches
from harness.worlds.kept import unwaited
from harness.worlds.monitor import THREAD_NAME
from harness.worlds.runtimes import target_of
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
        # cuBLAS keeps some 64 MiB of its own from its first product on; it makes them again when it needs them
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
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
    groups: tuple[Any, ...]
    """Weak references to all of them."""
    default_group: Any
    """A weak reference: a group that a test destroys must go."""
    unwaited: int
    """Functional collectives that nothing has waited for; their works outlive the groups that they are of."""
    files: int
    cwd: str
    environ: dict[str, str]
    switches: dict[str, Any]
    device: OnDevice | None


def take(*, on_device: bool) -> Residue:
    """Record the state of this process, and of its accelerator if the rank has one (``on_device``)."""
    return _take(OnDevice.take() if on_device else None)  # first: what is queued there may still open connections


def _take(device: OnDevice | None) -> Residue:
    import torch.distributed as dist

    threads = frozenset(
        f"thread {t.name!r}"
        for t in threading.enumerate()
        if t.name not in _KEPT_THREADS and t is not threading.main_thread()
    )
    return Residue(
        threads=threads,
        children=frozenset(_children()),
        groups=tuple(map(weakref.ref, dist.distributed_c10d._world.pg_map)),
        default_group=weakref.ref(dist.group.WORLD) if dist.is_initialized() else None,
        unwaited=unwaited(),
        files=_open_files(on_device=device is not None),
        cwd=_cwd(),
        environ=dict(os.environ),
        switches=switches.take(),
        device=device,
    )


_KEPT_THREADS = frozenset((THREAD_NAME, "tqdm_monitor"))
"""The monitor's thread, and the one that tqdm starts once when Inductor shows progress."""
_PATIENCE = 1.0
"""Seconds within which memory of a device must be given back: a library's own thread notices what has ended."""
_LITTLE = 16 << 20
"""Bytes of a device that tests may leave to all that follow, together: torch itself keeps some, as DDP does."""
_NAMES_OF_A_RUN = 1000
"""How many process groups a run may make before their names could be those of the next run's."""
_OF_A_MESH = "mesh_"
"""How the description of a process group begins that a device mesh made."""


def compare(before: Residue, *, restore: int = 0) -> list[str]:
    """Return what is there now and was not before, as a list of phrases; [] if nothing.

    ``restore``: also restore what can be restored, on all ranks in the same way: the number of the run, from 1.  An
    empty list then means that the next test finds the rank as this one did.
    """
    if before.device is not None:
        before.device.restore()
    if restore:
        dynamo: Any = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()  # first, because compiled code may refer to groups and meshes
        _destroy_groups(before, restore)
    after = _take(_released(before.device) if before.device is not None else None)
    left = sorted(after.threads - before.threads)
    left += [f"child process {pid}" for pid in sorted(after.children - before.children)]
    if len(after.groups) != len(before.groups):
        left.append(f"{len(after.groups)} process groups, {len(before.groups)} before")
    elif after.default_group != before.default_group:
        left.append("another default process group than before")
    elif after.groups != before.groups:
        left.append("other process groups than before")
    elif after.unwaited > before.unwaited:
        left.append(f"{after.unwaited - before.unwaited} functional collectives that nothing has waited for")
    elif after.files > before.files:
        left.append(f"{after.files - before.files} open file descriptors more than before")
    if before.device is not None and after.device is not None:
        more = after.device.allocated - before.device.allocated
        if more > _LITTLE:
            left.append(f"{more} bytes of device memory more than before")
    if restore:
        try:
            os.chdir(before.cwd)
        except OSError:
            left.append("no working directory any more")
        os.environ.clear()
        os.environ.update(before.environ)
        switches.restore(before.switches)
        meshes.forget_randomness()
        seed()
    return left


def _destroy_groups(before: Residue, run: int) -> None:
    """Destroy the process groups that a test left, in the order in which it made them.

    Those of a mesh stay as long as anything refers to a mesh, and the others with them.
    Groups are counted for their names, and a test may have made other groups on other ranks: all ranks count on from
    the same number, with which no name comes twice.
    """
    import torch
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    world.group_count = run * _NAMES_OF_A_RUN
    left = [group for group in world.pg_map if all(group is not known() for known in before.groups)]
    whole = dist.is_initialized() and weakref.ref(dist.group.WORLD) == before.default_group
    if not left or not whole or unwaited():
        return
    of_a_mesh = any(group.group_desc.startswith(_OF_A_MESH) for group in left)
    if of_a_mesh and not meshes.forget(left, on_device=before.device is not None):
        return
    if before.device is not None:
        torch.accelerator.synchronize()
    for group in left:
        if group in world.pg_map:  # its backend may have been that of another one, which is gone
            dist.destroy_process_group(group)


def _released(before: OnDevice) -> OnDevice:
    """Record the state of the device once its tensors take little more than before, or when patience ends."""
    until = time.monotonic() + _PATIENCE
    while (now := OnDevice.take()).allocated > before.allocated + _LITTLE and time.monotonic() < until:
        time.sleep(0.02)
    return now


def _open_files(*, on_device: bool) -> int:
    """Return how many file descriptors are open.

    ``on_device``: only those of files and pipes. A library connects its ranks when a collective first needs that, and
    opens devices and events as it likes.
    """
    if not on_device:
        return len(os.listdir("/proc/self/fd"))
    names = [target_of(fd) for fd in os.listdir("/proc/self/fd")]
    return sum(name.startswith(("/", "pipe:")) and not name.startswith("/dev/") for name in names)


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
