"""Keeps accelerator runtimes out of the process that ranks are forked from.

CUDA, ROCm and Level Zero do not survive a fork: a child of a process that has used one cannot use the device
("Cannot re-initialize CUDA in forked subprocess").  Importing torch uses none of them, but some of torch's modules ask
at import how many devices there are.  A forked child asks for them.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

_DEVICE_FILES = (
    "/dev/nvidia*",
    "/dev/nvhost*",
    "/dev/nvgpu*",
    "/dev/nvmap",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/render*",
    "/dev/mtia*",
    "/dev/davinci*",
    "/dev/hisi_hdc",
    "/dev/accel/*",
    "/dev/hl*",
    "/dev/cambricon*",
    "/dev/tenstorrent/*",
)
"""Where kernels show accelerators, as globs."""

_DRIVER = re.compile(r"lib(nvcuda|ze_intel_gpu|hccl_drv|ascend_hal|cndrv)\.so")
"""Driver libraries.  Runtimes load them at their first use, so a process that has mapped one has used its runtime.

``libcuda.so`` is none of them: cuBLAS loads it while torch is imported, and does not start it.
"""

_COUNT = re.compile(r"_([a-z]+)_getDeviceCount")
"""What torch calls before anything else of the runtime of a device that it was built for, in ``torch._C``."""


class RuntimeTouched(RuntimeError):
    """An import has asked for an accelerator in the process that ranks are forked from."""


@contextlib.contextmanager
def out_of_reach() -> Iterator[None]:
    """Have a forked child make torch's first calls of a runtime; :mod:`torch` is imported for that.

    The answer to "how many devices are there?" is a child's, or 0 where the kernel shows no accelerator.  Starting a
    runtime fails with :class:`RuntimeTouched`.  NVIDIA's management library is not asked: its own start loads the
    driver, opens the devices and starts a thread (driver 580), whatever torch says of it ("will NOT poison fork").
    """
    import torch

    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
        if hasattr(owner, name):
            replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, by)

    absent = not shown()
    for device in [match[1] for name in dir(torch._C) if (match := _COUNT.fullmatch(name))]:
        count = f"_{device}_getDeviceCount"
        replace(torch._C, count, _none if absent else _asked_by_a_child(getattr(torch._C, count)))
        replace(torch._C, f"_{device}_init", _refusal(f"torch._C._{device}_init"))
        module = getattr(torch, device, None)
        replace(module, "_nvml_based_avail", lambda: False)
        replace(module, "_device_count_nvml", lambda: -1)  # torch asks the runtime then
    try:
        yield
    finally:
        for owner, name, function in replaced:
            setattr(owner, name, function)


def shown() -> bool:
    """Whether the kernel shows an accelerator, of any vendor that is known here."""
    return any(map(glob.glob, _DEVICE_FILES))


def _none() -> int:
    return 0


def _asked_by_a_child(count: Callable[[], int]) -> Callable[[], int]:
    """Return a function that returns what ``count`` returns in a child of this process."""

    @functools.cache
    def ask() -> int:
        said = _said_by_a_child(lambda: str(count()))
        if not said:
            raise RuntimeTouched(f"it calls torch._C.{count.__name__}, which fails in a child of its process")
        return int(said)

    return ask


def _said_by_a_child(say: Callable[[], str]) -> str:
    """Return what a function returns in a child of this process; "" if it raises there, or ends the child."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writing, say().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any) -> Any:
        raise RuntimeTouched(f"it calls {name}, and ranks forked after that could not use the device")

    return refuse


def touched() -> list[str]:
    """Say how this process has used the runtime of an accelerator: a sentence each, none if it has not.

    Looks for device files that are open, for driver libraries, and asks torch in a forked child.
    """
    files = {path for pattern in _DEVICE_FILES for path in glob.glob(pattern)}
    opened = {target for fd in os.listdir("/proc/self/fd") if (target := target_of(fd)) in files}
    sentences = [f"{file} is open" for file in sorted(opened)]
    with open("/proc/self/maps") as maps:
        mapped = {os.path.basename(line.split()[-1]) for line in maps if "/" in line}
    sentences += [f"{library} is loaded" for library in sorted(mapped) if _DRIVER.match(library)]
    devices = _in_bad_fork() if "torch" in sys.modules else []
    return sentences + [f"torch.{name} says that it can't be used in a forked process" for name in devices]


def target_of(fd: str) -> str:
    """Return what a file descriptor of this process is open for, as the kernel names it; "" if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the descriptor of the listing itself
        return ""


def _in_bad_fork() -> list[str]:
    """The device modules of torch that are of no use in a fork of this process, by name."""
    import torch

    checks = {
        name: module._is_in_bad_fork
        for name, module in vars(torch).items()
        if isinstance(module, types.ModuleType) and hasattr(module, "_is_in_bad_fork")
    }

    def bad() -> Iterator[str]:
        for name, check in checks.items():
            with contextlib.suppress(Exception):  # a device that this build of torch does not have
                if check():
                    yield name

    return _said_by_a_child(lambda: " ".join(bad())).split()


def other_threads() -> list[str]:
    """Name the threads of this process but the main one: a fork copies none of them, with the locks that they hold."""
    by_id = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    names.append(by_id.get(int(task)) or comm.read().strip())
            except OSError:  # it has just ended
                continue
    return sorted(names)
