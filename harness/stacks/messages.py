"""The collectives that a step launches, as PyTorch's Flight Recorder saw them: count them, and launch them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.stacks import training
from harness.worlds.monitor import flight_record

_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Int": torch.int32,
    "Long": torch.int64,
    "Bool": torch.bool,
}
"""Dtypes by the Flight Recorder's names."""
RECORDED = {dtype: name for name, dtype in _DTYPES.items()}
"""The Flight Recorder's names of dtypes."""


@dataclass(frozen=True)
class Message:
    """A collective that a rank launched."""

    op: str
    """The backend's name for it. To gloo, FSDP's reduce_scatter is an ``all_reduce``."""
    shape: tuple[int, ...]
    """The shape of its first input."""
    dtype: str
    members: tuple[int, ...]
    """The global ranks of the group; empty if they are not known."""

    @property
    def bytes(self) -> int:
        """The size of its first input in bytes; 0 if the dtype is not known."""
        dtype = _DTYPES.get(self.dtype)
        return math.prod(self.shape) * dtype.itemsize if dtype is not None else 0


def mark() -> dict[str, int]:
    """Return the current position for :func:`since`: by group, the last collective that the Flight Recorder knows."""
    last: dict[str, int] = {}
    for record in flight_record()["records"] or []:
        if not record["p2p"]:
            last[record["group"]] = max(last.get(record["group"], 0), record["seq"])
    return last


def since(mark: Mapping[str, int]) -> list[Message]:
    """Return the collectives that this rank launched after a mark; [] if nothing records them."""
    recorded = flight_record()
    return [
        Message(
            record["op"],
            tuple(record["sizes"][0]) if record["sizes"] else (),
            record["dtypes"][0] if record["dtypes"] else "",
            tuple(sorted(recorded["groups"].get(record["group"], ()))),
        )
        for record in recorded["records"] or []
        if not record["p2p"] and record["seq"] > mark.get(record["group"], 0)
    ]


def launched() -> int:
    """Return the number of collectives that this process has launched, on all of its groups."""
    return sum(training.launched().values())


def replayable(messages: Sequence[Message]) -> bool:
    """Return whether each message can be launched again: its group exists here, and its name says what it does."""
    groups = _groups()
    return all(m.op in _LAUNCH and m.members in groups and m.dtype in _DTYPES for m in messages)


def replay(messages: Sequence[Message], device: torch.device) -> Callable[[], None]:
    """Return a function that launches collectives of these sizes, one after the other, and waits for each."""
    groups = _groups()
    calls = [
        _LAUNCH[m.op](torch.zeros(m.shape, dtype=_DTYPES[m.dtype], device=device), groups[m.members]) for m in messages
    ]

    def again() -> None:
        for call in calls:
            call()

    return again


def _groups() -> dict[tuple[int, ...], Any]:
    return {tuple(sorted(dist.get_process_group_ranks(g))): g for g in dist.distributed_c10d._world.pg_map}


def _all_reduce(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    return lambda: dist.all_reduce(tensor, group=group)


def _broadcast(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    return lambda: dist.broadcast(tensor, group=group, group_src=0)


def _all_gather(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    gathered = tensor.new_empty(tensor.numel() * group.size())
    flat = tensor.reshape(-1)
    return lambda: dist.all_gather_into_tensor(gathered, flat, group=group)


def _reduce_scatter(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    scattered = tensor.new_empty(tensor.numel() // group.size())
    flat = tensor.reshape(-1)
    return lambda: dist.reduce_scatter_tensor(scattered, flat, group=group)


_LAUNCH: dict[str, Callable[[torch.Tensor, Any], Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "_all_gather_base": _all_gather,
    "_allgather_base": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter,
}
"""Functions that launch a collective again, by the names that gloo and NCCL record."""
