"""Operators, allocations and copies of a call, as torch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.bench.counting.names import ALLOCATED, ALLOCATIONS, COLLECTIVES, COPIED, COPIES, OPERATORS

_COPYING = ("aten::copy_", "aten::_foreach_copy_")
_OF_GROUPS = "c10d::"
"""What process groups dispatch, whoever calls them: Python, DDP's reducer, functional collectives."""
_MEMORY, _TRANSFER = "[memory]", "Memcpy"


def profiled(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Return the counts of a call on this thread and those that autograd starts for it.

    Copies are those of tensors that PyTorch's operators make, and on accelerators the runtime's transfers as well.
    """
    activities = [ProfilerActivity.CPU] if device.type == "cpu" else None  # None: of all devices that are there
    with profile(activities=activities, profile_memory=True, record_shapes=True) as seen:
        call()
    assert seen.profiler is not None
    found = dict.fromkeys((COLLECTIVES, OPERATORS, ALLOCATIONS, ALLOCATED, COPIES, COPIED), 0.0)
    results: Any = seen.profiler.kineto_results
    for event in results.events():
        name = event.name()
        if name == _MEMORY:
            if event.nbytes() > 0:
                found[ALLOCATIONS] += 1
                found[ALLOCATED] += event.nbytes()
        elif name in _COPYING:
            found[COPIES] += 1
            found[COPIED] += _elements(event.shapes())
        elif name.startswith(_TRANSFER):
            found[COPIES] += 1
        if "::" in name:
            found[OPERATORS] += 1
        if name.startswith(_OF_GROUPS):
            found[COLLECTIVES] += 1
    return found


def _elements(shapes: Any) -> int:
    first = next(iter(shapes), ())
    count = 1
    for extent in first:
        count *= extent if isinstance(extent, int) else 1
    return count
