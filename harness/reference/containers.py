"""Tensors in whatever a forward takes or gives back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def mapped(change: Change, value: Any) -> Any:
    """The same with every tensor changed, in lists, tuples, named tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(mapped(change, item) for item in value)
    if isinstance(value, dict):
        changed = copy.copy(value)
        changed.update((key, mapped(change, item)) for key, item in value.items())
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: mapped(change, getattr(value, name)) for name in fields})
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in such containers, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors([getattr(value, f.name) for f in dataclasses.fields(value)])
