"""The placements, groups and meshes that tests give to compiled code, a collective, and how results are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from harness import Rank
from harness.stacks import dynamo
from harness.stacks.collectives import functional

PLACEMENTS: dict[str, Placement] = {
    "first rows": Shard(0),
    "columns": Shard(1),
    "whole": Replicate(),
    "sum": Partial(),
    "average": Partial("avg"),
}
"""Placements that differ in class, dimension or reduction. ``sum`` and the dimension 0 are the defaults."""


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks."""
    return functional.all_reduce(x, "sum", dist.group.WORLD)


@dataclass
class Holder:
    """An object with one attribute."""

    thing: Any


@dataclass
class Things:
    """What one of three ranks gives to compiled code."""

    pair: Any
    """A group of two ranks. Rank 2 has another group rank than rank in the world, and so has rank 1."""
    own: Any
    """The group of this rank alone."""
    mesh: Any
    """A mesh of 1 x 3 ranks with the dimensions ``a`` and ``b``."""
    renamed: Any
    """Such a mesh with the dimensions ``b`` and ``a``."""
    line: Any
    """A mesh of one dimension."""
    beside: Any
    """A mesh of ranks 1 and 0, which rank 2 is not part of."""

    def of(self, kind: str) -> dict[str, Any]:
        """Return the objects of one kind by name."""
        kinds: dict[str, dict[str, Any]] = {
            "placements": {name: PLACEMENTS[name] for name in ("columns", "whole", "average")},
            "groups": {"pair": self.pair, "own": self.own},
            "meshes": {"mesh": self.mesh, "line": self.line},
        }
        return kinds.get(kind, {})


def things(rank: Rank) -> Things:
    """Create the groups and meshes on three ranks."""
    pairs = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 2])]
    alone = [dist.new_group([member]) for member in range(3)]
    beside = DeviceMesh(rank.device.type, [1, 0])
    mesh, renamed = rank.mesh(1, 3, names=("a", "b")), rank.mesh(1, 3, names=("b", "a"))
    return Things(pairs[rank.index], alone[rank.index], mesh, renamed, rank.mesh(3, names=("r",)), beside)


Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a tensor and more arguments, and those arguments."""

KINDS = ("placements", "groups", "meshes")


def unlike(rank: Rank, cases: Mapping[str, Case], *, fullgraph: bool = False, least: int = 1) -> list[str]:
    """Call each function compiled and uncompiled, and return a sentence for each result that differs.

    The compiled function is called twice. ``least``: how many graphs it has at the least, if it raises no error.
    """
    wrong = []
    for name, (function, arguments) in cases.items():
        compiled, counter = dynamo.compiled(function, backend="eager", fullgraph=fullgraph)
        expected, *observed = [_outcome(call, rank, arguments) for call in (function, compiled, compiled)]
        wrong += [
            f"{name}, call {i}: {expected} uncompiled, {o} compiled" for i, o in enumerate(observed) if o != expected
        ]
        if counter.graphs < least and not _is_error(expected):
            wrong.append(f"{name}: {counter.graphs} graphs were compiled")
    return wrong


def replaced(
    rank: Rank, read: Callable[[torch.Tensor], Any], replace: Callable[[Any], None], objects: Iterable[Any]
) -> list[str]:
    """Compile a function once, and call it after each replacement. Return a sentence for each result that differs."""
    compiled, _ = dynamo.compiled(read, backend="eager", fullgraph=False)
    wrong = []
    for i, thing in enumerate(objects):
        replace(thing)
        expected, observed = (_outcome(call, rank, ()) for call in (read, compiled))
        if observed != expected:
            wrong.append(f"call {i}: {expected} uncompiled, {observed} compiled")
    return wrong


def _outcome(function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...]) -> Any:
    """Return what a call gives, or the class of its error. Containers are copied, so that no call changes the next."""
    mine = [copy.copy(a) if isinstance(a, list | dict | Holder) else a for a in arguments]
    try:
        return known(function(torch.arange(2.0, device=rank.device), *mine))
    except Exception as error:  # whatever it is, it is compared
        return ("error", type(error).__name__, str(error).partition("\n")[0][:200])


def _is_error(outcome: Any) -> bool:
    return isinstance(outcome, tuple) and outcome[:1] == ("error",)


def known(value: Any) -> Any:
    """Return a value as plain data: objects by identity if they are groups, and else by class and content."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(known(each) for each in value))
    if isinstance(value, dict):
        return ("dict", *((known(key), known(each)) for key, each in value.items()))
    if isinstance(value, Holder):
        return ("Holder", *((name, known(each)) for name, each in vars(value).items()))
    if isinstance(value, dist.ProcessGroup):
        return ("group", value.group_name, value.rank(), value.size(), id(value))
    if isinstance(value, DeviceMesh):
        return ("mesh", str(value), value.mesh.tolist(), value.mesh_dim_names, value.get_coordinate())
    if isinstance(value, Placement):
        return ("placement", type(value).__name__, repr(value))
    if callable(value) and not isinstance(value, type):
        return ("callable", known(value()))
    return value
