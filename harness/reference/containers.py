"""Tensors inside the inputs and outputs of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def mapped(change: Change, value: Any) -> Any:
    """Return a value with every tensor changed, inside lists, tuples, named tuples, sets, dicts and dataclasses.

    Containers keep their classes, which must take what they contain, as ``list`` does.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, item) for item in value))
    if isinstance(value, list | tuple | set):
        return type(value)([mapped(change, item) for item in value])
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update((key, mapped(change, item)) for key, item in value.items())
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: mapped(change, getattr(value, name)) for name in fields})
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in such containers, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, f.name) for f in dataclasses.fields(value)])


def cast(dtype: torch.dtype | None, value: Any) -> Any:
    """Cast floating-point tensors to a dtype.

    Other tensors stay as they are, and so do all of them if the dtype is None.
    """
    if dtype is None:
        return value
    return mapped(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
