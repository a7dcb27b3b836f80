"""The residue of a test in a rank: the rank's state is recorded before the test and compared after it.

Some of it can be restored (random state, default dtype, Dynamo's caches).  The rest (threads, processes, groups, file
descriptors) can't, and then the rank is not used again.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from dataclasses import dataclass
from typing import Any

from harness.worlds.monitor import THREAD_NAME


@dataclass(frozen=True)
class Residue:
    """The state of a rank, as far as another test could notice it."""

    threads: frozenset[str]
    children: frozenset[int]
    groups: int
    files: int
    cwd: str
    environ: dict[str, str]
    default_dtype: str
    num_threads: int
    grad_enabled: bool
    deterministic: bool


def take() -> Residue:
    """Record the state of this process."""
    import torch
    import torch.distributed as dist

    threads = frozenset(
        f"thread {t.name!r}"
        for t in threading.enumerate()
        if t.name != THREAD_NAME and t is not threading.main_thread()
    )
    return Residue(
        threads=threads,
        children=frozenset(_children()),
        groups=len(dist.distributed_c10d._world.pg_map),
        files=len(os.listdir("/proc/self/fd")),
        cwd=_cwd(),
        environ=dict(os.environ),
        default_dtype=str(torch.get_default_dtype()),
        num_threads=torch.get_num_threads(),
        grad_enabled=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def compare(before: Residue, *, restore: bool = False) -> list[str]:
    """Return what is there now and was not before, as a list of phrases; [] if nothing.

    ``restore``: also restore what can be restored.  An empty list then means that the next test finds the rank as this
    one did.
    """
    import torch

    after = take()
    left = sorted(after.threads - before.threads)
    left += [f"child process {pid}" for pid in sorted(after.children - before.children)]
    if after.groups != before.groups:
        left.append(f"{after.groups} process groups, {before.groups} before")
    elif after.files > before.files:
        left.append(f"{after.files - before.files} open file descriptors more than before")
    if restore:
        try:
            os.chdir(before.cwd)
        except OSError:
            left.append("no working directory any more")
        os.environ.clear()
        os.environ.update(before.environ)
        torch.set_default_dtype(getattr(torch, before.default_dtype.removeprefix("torch.")))
        torch.set_num_threads(before.num_threads)
        torch.set_grad_enabled(before.grad_enabled)
        torch.use_deterministic_algorithms(before.deterministic)
        random.seed(0)
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
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
