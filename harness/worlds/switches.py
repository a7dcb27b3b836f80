"""The process-wide switches of torch that a test can set: recorded before it, and set back after it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

Switch = tuple[Callable[[], Any], Callable[[Any], object]]
"""Reads a value, and sets it."""


def take() -> dict[str, Any]:
    """Read all switches, by name."""
    return {name: read() for name, (read, _) in _switches()}


def restore(before: dict[str, Any]) -> None:
    """Set back those that have changed since."""
    for name, (read, write) in _switches():
        if name in before and read() != before[name]:
            write(before[name])


def _switches() -> Iterator[tuple[str, Switch]]:
    import torch
    import torch.distributed as dist

    yield "default dtype", (torch.get_default_dtype, torch.set_default_dtype)
    yield "default device", (torch.get_default_device, _set_default_device)
    yield "number of threads", (torch.get_num_threads, torch.set_num_threads)
    yield "grad mode", (torch.is_grad_enabled, torch.set_grad_enabled)
    yield "deterministic algorithms", (_deterministic, lambda modes: _set_deterministic(*modes))
    yield "anomaly detection", (torch.is_anomaly_enabled, torch.set_anomaly_enabled)
    yield "float32 matmul precision", (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    if dist.is_available():
        yield "debug level of torch.distributed", (dist.get_debug_level, dist.set_debug_level)  # type: ignore[attr-defined]
    backends = [module for module in vars(torch.backends).values() if isinstance(module, types.ModuleType)]
    for module in backends:
        for flag in _flags(module):
            yield f"{module.__name__}.{flag}", _flag(module, flag)


def _flags(module: types.ModuleType) -> list[str]:
    """Return the names of a module's flags, which torch makes attributes that can be set."""
    from torch.backends import ContextProp

    return sorted(name for name, value in vars(type(module)).items() if isinstance(value, ContextProp))


def _flag(module: types.ModuleType, flag: str) -> Switch:
    return (lambda: getattr(module, flag)), (lambda value: setattr(module, flag, value))


def _deterministic() -> tuple[bool, bool]:
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(enabled: bool, warn_only: bool) -> None:
    import torch

    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_default_device(device: Any) -> None:
    """Set a default device; the host's is what there is without one, and setting it would cost every factory call."""
    import torch

    torch.set_default_device(None if device == torch.device("cpu") else device)
