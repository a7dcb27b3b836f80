"""A table of what compiled code promises for each construct of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from harness.oracles.tracing import Contract
from harness.stacks.collectives import coalescing_manager, functional
from harness.stacks.limit import runs_with
from harness.stacks.tracing import MESHES_ARE_OPAQUE, OPAQUE


@dataclass
class Setting:
    """The objects that constructs use, on one rank of two."""

    x: torch.Tensor
    """A tensor of two elements."""
    group: Any
    """The group of both ranks."""
    own: Any
    """The group of this rank alone."""
    mesh: Any
    """A mesh of 1 x 2 ranks with the dimensions ``a`` and ``b``."""
    line: Any
    """A one-dimensional mesh."""


@dataclass(frozen=True)
class Construct:
    """A function to compile, the arguments of each call, and its contract."""

    code: Callable[[Setting], Any]
    """Creates the function."""
    given: Callable[[Setting], list[tuple[Any, ...]]]
    contract: Contract

    def __str__(self) -> str:
        return self.contract.construct


def once(*more: str) -> Callable[[Setting], list[tuple[Any, ...]]]:
    """Return the arguments of two equal calls: the tensor and the named attributes of the setting."""
    return lambda s: [(s.x, *(getattr(s, name) for name in more))] * 2


def each(*names: str) -> Callable[[Setting], list[tuple[Any, ...]]]:
    """Return the arguments of a call with the tensor and each named attribute, and of one more call with the first."""
    return lambda s: [(s.x, getattr(s, name)) for name in (*names, names[0])]


SUM = ("all_reduce", "wait_tensor", "copy_")
ADD = ("add",)
AT_ONCE = hasattr(functional, "wait_tensors")
"""Whether compiled code waits for all tensors of one collective at once, which it does since PyTorch 2.15."""
WAITED = ("wait_tensors", "getitem") if AT_ONCE else ("wait_tensor", "wait_tensor")
"""The calls with which it waits for two tensors, and takes the second."""
TAKEN = ("1",) if AT_ONCE else ()
"""The constants of these calls."""

UNTRACED = "marked as skipped" if runs_with("<2.14") else "Unsupported method call"
"""The reason of the graph break at a barrier or a broadcast. Only the version tells which it is."""
MESH = "LAMBDA_GUARD" if MESHES_ARE_OPAQUE else "EQUALS_MATCH"
"""The guard on the contents of a mesh."""
MESH_ITSELF = OPAQUE if MESHES_ARE_OPAQUE else MESH
"""The guard on a mesh of which the code reads only the type."""
SLICE = ("__getitem__",) if MESHES_ARE_OPAQUE else ()
"""The operators that slice a mesh; before meshes were opaque, no graph had them."""
DTENSORS = (
    ("from_local", "redistribute", "to_local")
    if MESHES_ARE_OPAQUE
    else ("prim from_local", "prim_redistribute", "prim_to_local")
)
"""The operators that make a DTensor, redistribute it and take its local tensor."""


def named(group: str) -> tuple[str, str]:
    """Return the guard on a group whose name the code reads. ``group``: a pattern for its source."""
    return (rf"{group}\.group_name$", "EQUALS_MATCH") if MESHES_ARE_OPAQUE else (f"{group}$", "ID_MATCH")


NAMED = "gloo"
"""The name that one of the constructs compares with the name of its backend. Any name would do."""

GROUPS = [
    Construct(
        lambda s: lambda x: x + dist.get_rank() + dist.get_world_size(),
        once(),
        Contract("rank and size of the world", ADD * 2, ("{rank}", "2")),
    ),
    Construct(
        lambda s: lambda x, g: x + dist.get_rank(g) + dist.get_world_size(g) + g.rank() + g.size(),
        once("own"),
        Contract("rank and size of a group", ADD * 4, ("0", "1", "0", "1"), ((r"L\['g'\]$", OPAQUE),)),
    ),
    Construct(
        lambda s: lambda x, g: x + len(g.group_name) + (dist.get_backend(g) == "gloo"),
        once("group"),
        Contract("name and backend of a group", ADD * 2, ("{letters}", "{same_name}"), (named(r"L\['g'\]"),)),
    ),
    Construct(
        lambda s: (
            lambda x, g: x + dist.get_process_group_ranks(g)[0] + dist.get_group_rank(g, 1) + dist.get_global_rank(g, 1)
        ),
        once("group"),
        Contract("members of a group", ADD * 3, ("0", "1", "1"), ((r"L\['g'\]$", OPAQUE),)),
    ),
    Construct(
        lambda s: lambda x: x + dist.group.WORLD.rank() + dist.GroupMember.WORLD.size(),  # type: ignore[union-attr]
        once(),
        Contract(
            "WORLD", ADD * 2, ("{rank}", "2"), ((r"group\.WORLD$", "ID_MATCH"), (r"GroupMember\.WORLD$", "ID_MATCH"))
        ),
    ),
    Construct(
        lambda s: lambda x: x + dist.GroupMember.NON_GROUP_MEMBER,
        once(),
        Contract("NON_GROUP_MEMBER", ADD, ("-100",), ((r"GroupMember\.NON_GROUP_MEMBER$", "ID_MATCH"),)),
    ),
    Construct(
        lambda s: lambda x: x + dist.is_initialized() + dist.is_available(),
        once(),
        Contract("whether there is anything distributed", ADD * 2, ("True", "True")),
    ),
]

MESHES = [
    Construct(
        lambda s: lambda x, m: x + m.ndim + m.size(0) + m.size(1) + m.get_local_rank(1) + m.get_coordinate()[1],
        once("mesh"),
        Contract(
            "sizes and positions in a mesh",
            ADD * 5,
            ("2", "1", "2", "{rank}", "{rank}"),
            ((r"L\['m'\]$", MESH_ITSELF),),
        ),
    ),
    Construct(
        lambda s: lambda x, m: x + m.size() + m.size(0),
        each("line", "mesh"),
        Contract(
            "another mesh",
            ADD * 4,
            ("2", "2", "2", "1"),
            ((r"L\['m'\]$", MESH),),
            recompiles=("opaque_guard|m == ",),
        ),
    ),
    Construct(
        lambda s: lambda x, m: x + m["b"].size() + m["b"].get_local_rank(),
        once("mesh"),
        Contract(
            "a slice of a mesh",
            (*SLICE, "add") * 2,
            ("b", "2", "b", "{rank}") if SLICE else ("2", "{rank}"),
            ((r"L\['m'\]$", MESH),),
        ),
    ),
    Construct(
        lambda s: lambda x, m: dist.all_reduce(x, group=m.get_group(1)),
        once("mesh"),
        Contract(
            "the group of a mesh",
            SUM,
            ("sum", "{mesh_name}"),
            ((r"group_name$", "EQUALS_MATCH") if MESHES_ARE_OPAQUE else (r"L\['m'\]$", MESH),),
        ),
    ),
]

PLACEMENTS = [
    Construct(
        lambda s: lambda x: x + Shard(1).dim + (Shard(0) == Shard(1)) + Shard(0).is_shard() + Partial().is_partial(),
        once(),
        Contract("placements made and compared", ADD * 4, ("1", "False", "True", "True")),
    ),
    Construct(
        lambda s: lambda x, p: x + p.is_shard() + p.is_replicate(),
        lambda s: [(s.x, Shard(0)), (s.x, Replicate()), (s.x, Shard(0))],
        Contract(
            "placements given",
            ADD * 4,
            ("True", "False", "False", "True"),
            ((r"L\['p'\]$", "EQUALS_MATCH"),),
            recompiles=(r"^0/0: p == Shard\(dim=0\)",),
        ),
    ),
    Construct(
        lambda s: lambda x, m: DTensor.from_local(x, m, [Shard(0)]).redistribute(placements=[Replicate()]).to_local(),
        once("line"),
        Contract(
            "DTensors made and taken apart",
            DTENSORS,
            (),
            ((r"L\['m'\]$", MESH),),
        ),
    ),
]

COLLECTIVES = [
    Construct(
        lambda s: lambda x, g: dist.all_reduce(x, group=g),
        each("group", "own"),
        Contract(
            "a group as an argument",
            SUM * 2,
            ("sum", "{name}", "sum", "{own}"),
            (named(r"L\['g'\]"),),
            recompiles=("g.group_name == '{name}'" if MESHES_ARE_OPAQUE else r"___check_obj_id\(g, ",),
        ),
    ),
    Construct(
        lambda s: _closed(s.group),
        once(),
        Contract("a group in a closure", SUM, ("sum", "{name}"), (named(r"L\['g'\]"),)),
    ),
    Construct(
        lambda s: lambda x, holder: dist.all_reduce(x, group=holder.group),
        lambda s: [(s.x, s)] * 2,
        Contract("a group as an attribute", SUM, ("sum", "{name}"), (named(r"L\['holder'\]\.group"),)),
    ),
    Construct(
        lambda s: lambda x: dist.all_reduce(x),
        once(),
        Contract("the default group", SUM, ("sum", "0"), ((r"WORLD$", "ID_MATCH"),)),
    ),
    Construct(
        lambda s: lambda x: functional.all_reduce(x, "max", dist.group.WORLD) + 1,
        once(),
        Contract(
            "a functional collective",
            ("all_reduce", "wait_tensor", "add"),
            ("max", "0", "1"),
            ((r"WORLD$", "ID_MATCH"),),
        ),
    ),
    Construct(
        lambda s: lambda x: functional.all_reduce_coalesced([x, x * 2], "sum", dist.group.WORLD)[1] + 1,
        once(),
        Contract(
            "coalesced collectives",
            ("mul", "all_reduce_coalesced", "getitem", "getitem", *WAITED, "add"),
            ("2", "sum", "0", "0", "1", *TAKEN, "1"),
            ((r"WORLD$", "ID_MATCH"),),
        ),
    ),
    Construct(
        lambda s: lambda x: functional.all_gather_into_tensor_coalesced([x, x * 2], dist.group.WORLD)[1] + 1,
        once(),
        Contract(
            "coalesced collectives that gather",
            ("mul", "all_gather_into_tensor_coalesced", "getitem", "getitem", *WAITED, "add"),
            ("2", "2", "0", "0", "1", *TAKEN, "1"),
            ((r"WORLD$", "ID_MATCH"),),
        ),
    ),
    Construct(
        lambda s: _scattered,
        once(),
        Contract(
            "coalesced collectives that scatter",
            (
                *("repeat", "mul", "reduce_scatter_tensor_coalesced"),
                *("getitem", "getitem", *WAITED, "add"),
            ),
            ("2", "3", "sum", "2", "0", "0", "1", *TAKEN, "1"),
            ((r"WORLD$", "ID_MATCH"),),
        ),
    ),
    Construct(
        lambda s: _managed,
        once(),
        Contract(
            "collectives under a coalescing manager, one by one",
            ("mul", *SUM * 2, "add"),
            ("2", "sum", "0", "sum", "0"),
            ((r"WORLD$", "ID_MATCH"),),
        ),
    ),
    Construct(
        lambda s: lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1,
        once(),
        Contract(
            "a collective that knows the size of its group",
            ("all_gather_into_tensor", "wait_tensor", "add"),
            ("2", "0", "1"),
            ((r"WORLD$", "ID_MATCH"),),
        ),
    ),
    Construct(
        lambda s: lambda x, g: (dist.all_reduce(x, group=g, async_op=True).wait(), x + 1)[1],  # type: ignore[union-attr]
        once("group"),
        Contract(
            "an asynchronous collective",
            ADD,
            ("1",),
            breaks=("async_op=True for distributed collectives", "Unsupported"),
        ),
    ),
    Construct(
        lambda s: lambda x: (dist.barrier(), x + 1)[1],
        once(),
        Contract("a barrier", ADD, ("1",), breaks=(UNTRACED,)),
    ),
    Construct(
        lambda s: lambda x: (dist.broadcast(x, 0), x + 1)[1],
        once(),
        Contract("a broadcast", ADD, ("1",), breaks=(UNTRACED,)),
    ),
]


def _scattered(x: torch.Tensor) -> Any:
    parts = x.repeat(2)
    return functional.reduce_scatter_tensor_coalesced([parts, parts * 3], "sum", [0, 0], dist.group.WORLD)[1] + 1


def _managed(x: torch.Tensor) -> Any:
    y = x * 2
    with coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    return x + y


def _closed(g: Any) -> Any:
    return lambda x: dist.all_reduce(x, group=g)


NUMBERS = [
    Construct(
        lambda s: lambda x: x * dist.get_world_size(),
        lambda s: [(s.x.new_ones(rows),) for rows in (2, 2, 3, 5)],
        Contract(
            "another batch",
            ("mul", "mul"),
            ("2", "2"),
            ((r"L\['x'\]$", "TENSOR_MATCH"),),
            recompiles=("tensor 'x' size mismatch at index 0. expected 2, actual 3",),
        ),
    ),
    Construct(
        lambda s: lambda x, n: x * n,
        lambda s: [(s.x, n) for n in (1.5, 1.5, 2.5, 3.5)],
        Contract(
            "another number",
            ("mul", "item", "mul"),
            ("1.5",),
            ((r"L\['n'\]$", "EQUALS_MATCH"),),
            recompiles=(r"n == 1\.5",),
        ),
    ),
]

CONSTRUCTS = {
    "groups": GROUPS,
    "meshes": MESHES,
    "placements": PLACEMENTS,
    "collectives": COLLECTIVES,
    "numbers": NUMBERS,
}
