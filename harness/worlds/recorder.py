"""Concord's own record of collectives: the ones that a rank's Python code issues on its process groups.

``ProcessGroup`` is a C++ class, so its methods are wrapped where Python looks them up.  Collectives that C++ itself
issues (DDP's reducer, functional collectives) are not recorded.  The Flight Recorder has them, as long as the rank
lives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from harness.worlds import issued
from harness.worlds.blackbox import BlackBox
from harness.worlds.places import TORCH

# The names of ProcessGroup's methods in torch.distributed's public API.
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv(any source)",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}
CALLS = frozenset(_NAMES.values())
"""Every collective that is recorded."""


_NOT_THE_USERS = (TORCH, __file__)
_MOST_ENTRIES = 1000


def describe(args: Any, depth: int = 0) -> str:
    """Describe the tensors in a call's arguments: dtype and shape of the first, and how many: ``float32[4] x3``."""
    first, count = None, 0
    for arg in args if isinstance(args, (list, tuple)) else (args,):
        if hasattr(arg, "dtype") and hasattr(arg, "shape"):
            count += 1
            if first is None:
                first = f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
        elif isinstance(arg, (list, tuple)) and depth < 2 and first is None and arg:
            inner = describe(arg, depth + 1)
            if inner:
                return inner
    if first is None:
        return ""
    return f"{first} x{count}" if count > 1 else first


def caller() -> str:
    """Return ``file:line`` of the innermost frame outside torch and outside this file; empty if there is none."""
    frame = _calling(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _calling(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def issuing(frame: FrameType) -> dict[str, Any] | None:
    """Return the collective that a frame is in the middle of issuing, as plain data; None if it is no such frame.

    It is another thread's frame, which goes on meanwhile.
    """
    if frame.f_code is not _RECORDED:
        return None
    found = frame.f_locals
    if not found["issued_ns"]:
        return None
    tensor = found["first"]
    sized = hasattr(tensor, "dtype") and hasattr(tensor, "shape")
    return {
        "group": str(found["self"].group_name),
        "op": found["name"],
        "sizes": [list(tensor.shape)] if sized else [],
        "dtypes": [str(tensor.dtype).removeprefix("torch.")] if sized else [],
        "p2p": found["name"].startswith(("send", "recv")),
        "time_ns": found["issued_ns"],
    }


def install(box: BlackBox) -> None:
    """Start recording in this process, into ``box``."""
    from torch._C._distributed_c10d import ProcessGroup

    for method, name in _NAMES.items():
        original = getattr(ProcessGroup, method, None)
        if original is not None:
            setattr(ProcessGroup, method, _recorded(original, name, box))


def _recorded(original: Callable[..., Any], name: str, box: BlackBox) -> Callable[..., Any]:
    entries: dict[Any, bytes] = {}  # a cache: the same line writes the same call again and again

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        issued_ns = 0  # read by issuing(), from another thread
        try:
            frame = _calling(sys._getframe(1))  # Dynamo traces no further than this
            issued.count(name)
            place = (frame.f_code, frame.f_lineno) if frame is not None else None
            first = args[0] if args else None
            first = first[0] if type(first) is list and len(first) == 1 else first
            key = (place, self.group_name, getattr(first, "dtype", None), getattr(first, "shape", None))
            entry = entries.get(key) if key[2] is not None else None
            if entry is None:
                entry = box.entry(name, describe(args or tuple(kwargs.values())), str(key[1]), caller())
                if len(entries) < _MOST_ENTRIES:
                    entries[key] = entry
            issued_ns = box.write(entry)  # noqa: F841 - see issuing()
        except Exception:
            pass  # a record is evidence, never a reason to fail
        return original(self, *args, **kwargs)

    return method


_RECORDED = _recorded(len, "", BlackBox.__new__(BlackBox)).__code__
"""The code of every function that :func:`_recorded` makes."""
