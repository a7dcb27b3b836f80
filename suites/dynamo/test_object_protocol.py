"""What compiled code sees of placements, groups and meshes: properties, equality, hashes, classes, text and methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.pretended import pretended
from suites.dynamo.objects import PLACEMENTS, things, unlike

PLACEMENT_TYPES = "torch/distributed/tensor/placement_types.py"
PROCESS_GROUP, DEVICE_MESH = "torch.distributed.ProcessGroup", "torch/distributed/device_mesh.py: DeviceMesh"


@requirement(
    "DYN-PLACE-01",
    "is_shard, is_replicate and is_partial of placements answer in one graph as in uncompiled code, with or without "
    "an argument.",
    source=f"{PLACEMENT_TYPES}: Placement.is_shard, is_replicate, is_partial",
)
@requirement(
    "DYN-PLACE-02",
    "In one graph, placements that are given or made have the dim and reduce_op that they have uncompiled.",
    source=f"{PLACEMENT_TYPES}: Shard.dim, Partial.reduce_op",
)
@pytest.mark.world(1)
def test_properties(world: World) -> None:
    """Ask for the default dimension and reduction, and for others, by position and by name."""

    def asked(x: torch.Tensor, p: Any) -> Any:
        shards = p.is_shard(), p.is_shard(0), p.is_shard(1), p.is_shard(dim=1)
        partials = p.is_partial(), p.is_partial("sum"), p.is_partial("avg"), p.is_partial(reduce_op="avg")
        return x + 1, shards, partials, p.is_replicate()

    def made(x: torch.Tensor) -> Any:
        shard, partial = Shard(2), Partial("avg")
        about = shard.dim, Shard(dim=3).dim, partial.reduce_op, Partial().reduce_op
        return x + 1, about, shard.is_shard(0), shard.is_shard(dim=2), partial.is_partial("sum"), partial.is_partial()

    def body(rank: Rank) -> None:
        cases: dict[str, Any] = {name: (asked, (placement,)) for name, placement in PLACEMENTS.items()}
        cases["given"] = (lambda x, s, p: (x + s.dim, s.dim, p.reduce_op), (Shard(2), Partial("avg")))
        cases["made"] = (made, ())
        assert unlike(rank, cases, fullgraph=True) == []

    world.run(body)


def _placement_among(x: torch.Tensor, p: Any) -> Any:
    equal = p == Shard(1), p == Partial("avg"), p == Partial(), p == Replicate(), p == 3
    return x + 1, equal, p != Shard(1), p != Partial("avg"), p is None, p in [Shard(1), Partial("avg")]


def _placement_as_key(x: torch.Tensor, p: Any) -> Any:
    of = {Shard(0): 1, Shard(1): 2, Replicate(): 3, Partial(): 4, Partial("avg"): 5}
    return x + of[p], of[p], p in {Shard(1), Partial("avg")}, len({p, Shard(1)})


def _placement_class(x: torch.Tensor, p: Any) -> Any:
    classes = isinstance(p, Shard), isinstance(p, Partial), isinstance(p, (Replicate, Partial)), isinstance(p, int)
    return x + 1, classes, isinstance(p, Placement)


def _class_of_placement(x: torch.Tensor, p: Any) -> Any:
    return x + 1, type(p), type(p) is Shard, type(p) is Partial, type(p).__name__


def _class_of_made(x: torch.Tensor, p: Any) -> Any:
    return x + 1, type(Shard(1)) is type(p), type(Partial("avg")).__name__, isinstance(Partial("avg"), Partial)


def _text(x: torch.Tensor, p: Any) -> Any:
    return x + 1, str(p), f"{p}", f"{[p]}", str(Partial("avg"))


def _representation(x: torch.Tensor, p: Any) -> Any:
    return x + 1, repr(p), f"{p!r}"


@requirement(
    "DYN-PLACE-03",
    "Equality and hashes of placements are the same compiled as uncompiled.",
    source=f"{PLACEMENT_TYPES}: Placement.__eq__, __hash__",
)
@requirement(
    "DYN-PLACE-04",
    "isinstance() and type() of a placement give the same answers compiled as uncompiled.",
    source=f"{PLACEMENT_TYPES}: Placement, Shard, Replicate, Partial",
)
@pytest.mark.parametrize(
    "function",
    [_placement_among, _placement_as_key, _placement_class, _class_of_placement, _class_of_made],
    ids=lambda f: f.__name__.strip("_"),
)
@pytest.mark.world(1)
def test_placements_compared(world: World, function: Any) -> None:
    """Compare each placement with others, given or made; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        assert unlike(rank, {name: (function, (placement,)) for name, placement in PLACEMENTS.items()}) == []

    world.run(body)


@requirement(
    "DYN-PLACE-05",
    "The text of a placement is the same in compiled code as in uncompiled code.",
    source=f"{PLACEMENT_TYPES}: Placement.__str__, __repr__",
)
@pytest.mark.parametrize("function", [_text, _representation], ids=["str", "repr"])
@pytest.mark.world(1)
def test_text_of_placements(world: World, function: Any) -> None:
    """Ask for it by a function or in a formatted string; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        assert unlike(rank, {name: (function, (placement,)) for name, placement in PLACEMENTS.items()}) == []

    world.run(body)


GROUPS: dict[str, Any] = {
    "equality": lambda x, g, h: (x + 1, g == h, g != h, g == g, g == 3, g in (h, g), g in [h]),
    "identity": lambda x, g, h: (x + 1, g is h, g is not h, g is None, g is dist.group.WORLD),
    "hash": lambda x, g, h: (x + 1, hash(g), hash(g) == hash(h), len({g, h}), g in {h}),
    "key": lambda x, g, h: (x + {h: 1, g: 2}[g], {h: 1, g: 2}[g], {h: 3}.get(g), {g: 4}.get(g)),
    "isinstance": lambda x, g, h: (x + 1, isinstance(g, dist.ProcessGroup), isinstance(g, int | DeviceMesh)),
    "truth": lambda x, g, h: (x + 1 if g else x, bool(g), not g),
    "type": lambda x, g, h: (x + 1, type(g) is dist.ProcessGroup),
    "same type": lambda x, g, h: (x + 1, type(g) is type(h), type(g) is int, type(g).__name__),
}
MESHES: dict[str, Any] = {
    "equality": lambda x, m, n: (x + 1, m == n, m != n, m == m, m == 3, m in (n, m), m in [n]),
    "identity": lambda x, m, n: (x + 1, m is n, m is not n, m is None),
    "hash": lambda x, m, n: (x + 1, hash(m), hash(m) == hash(n), len({m, n}), m in {n}),
    "key": lambda x, m, n: (x + {n: 1, m: 2}[m], {n: 1, m: 2}[m], {n: 3}.get(m), {m: 4}.get(m)),
    "isinstance": lambda x, m, n: (x + 1, isinstance(m, DeviceMesh), isinstance(m, int | dist.ProcessGroup)),
    "truth": lambda x, m, n: (x + 1 if m else x, bool(m), not m),
    "type": lambda x, m, n: (x + 1, type(m) is DeviceMesh),
    "same type": lambda x, m, n: (x + 1, type(m) is type(n), type(m) is int, type(m).__name__),
}
SAME = ["equality", "identity", "hash", "key", "isinstance", "truth"]


@requirement(
    "DYN-PROTO-01",
    "Equality, identity, hash, truth value and isinstance() of groups and meshes are the same compiled as uncompiled.",
    source="torch.compile; torch.distributed.ProcessGroup; torch.distributed.device_mesh.DeviceMesh",
)
@pytest.mark.world(3)
def test_protocol(world: World) -> None:
    """Compare a group or mesh with itself and with another; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        about = things(rank)
        cases: dict[str, Any] = {}
        for name in SAME:
            for g, h in ((about.pair, about.own), (about.own, about.own)):
                cases[f"{name} of a group{' and itself' * (g is h)}"] = (GROUPS[name], (g, h))
            for m, n in ((about.mesh, about.line), (about.line, about.line), (about.beside, about.line)):
                cases[f"{name} of a mesh {m} and {n}"] = (MESHES[name], (m, n))
        assert unlike(rank, cases) == []

    world.run(body)


@requirement(
    "DYN-PROTO-02",
    "In compiled code, type() of a group or of a mesh is its class, as in uncompiled code.",
    source="torch.compile; torch.distributed.ProcessGroup; torch.distributed.device_mesh.DeviceMesh",
)
@pytest.mark.parametrize("asked", ["type", "same type"])
@pytest.mark.world(3)
def test_type(world: World, asked: str) -> None:
    """Compare the type with the class, or with the type of another object and with another class."""

    def body(rank: Rank) -> None:
        about = things(rank)
        cases: dict[str, Any] = {
            "group": (GROUPS[asked], (about.pair, about.own)),
            "mesh": (MESHES[asked], (about.mesh, about.line)),
        }
        assert unlike(rank, cases) == []

    world.run(body)


@requirement(
    "DYN-PROTO-03",
    "The text of a mesh is the same in compiled code as in uncompiled code.",
    source=f"{DEVICE_MESH}.__repr__",
)
@pytest.mark.parametrize("of", ["mesh", "shape"])
@pytest.mark.world(3)
def test_text_of_meshes(world: World, of: str) -> None:
    """Ask for the text of a mesh, or of its shape and names; graph breaks are allowed."""

    def whole(x: torch.Tensor, mesh: Any) -> Any:
        return x + 1, str(mesh), repr(mesh)

    def parts(x: torch.Tensor, mesh: Any) -> Any:
        return x + 1, str(mesh.shape), f"{mesh.mesh_dim_names} on {mesh.device_type}"

    def body(rank: Rank) -> None:
        about = things(rank)
        given = {"two dimensions": about.mesh, "one dimension": about.line, "ranks 1 and 0": about.beside}
        function = whole if of == "mesh" else parts
        assert unlike(rank, {name: (function, (mesh,)) for name, mesh in given.items()}) == []

    world.run(body)


def _bound(x: torch.Tensor, thing: Any) -> Any:
    first, second = thing.size, thing.rank if isinstance(thing, dist.ProcessGroup) else thing.get_rank
    return x + first() * 10, second(), first(), [f() for f in (second, first)]


def _by_name(x: torch.Tensor, thing: Any) -> Any:
    size, rank = "size", "rank" if isinstance(thing, dist.ProcessGroup) else "get_rank"
    return x + getattr(thing, rank)(), getattr(thing, size)()


def _unbound(x: torch.Tensor, group: Any) -> Any:
    return x + dist.ProcessGroup.rank(group), dist.ProcessGroup.size(group)


def _bound_before(x: torch.Tensor, group: Any) -> Any:
    size = group.size
    y = x + 1
    dynamo.graph_break()
    return y + size(), size()


def _method_in_closure(method: Any) -> Any:
    return lambda x: (x + method() * 10, method())


@requirement(
    "DYN-METHOD-01",
    "In one graph, bound methods of a group or a mesh, taken first and called later, answer for that object.",
    source=f"torch.compile: fullgraph; {PROCESS_GROUP}; {DEVICE_MESH}",
)
@requirement(
    "DYN-METHOD-02",
    "Bound methods of a group that are given, closed over, returned or carried over a graph break work as uncompiled.",
    source=f"torch.compile: fullgraph=False; {PROCESS_GROUP}",
)
@pytest.mark.world(3)
def test_bound_methods(world: World) -> None:
    """Take two methods of one object and call them in another order, by each way to get a method."""

    def body(rank: Rank) -> None:
        about = things(rank)
        objects = {"pair": about.pair, "own": about.own, "line": about.line, "mesh": about.mesh}
        whole = {
            f"{how.__name__} {name}": (how, (thing,)) for how in (_bound, _by_name) for name, thing in objects.items()
        }
        assert unlike(rank, whole, fullgraph=True) == []
        for name, group in {"pair": about.pair, "own": about.own}.items():
            broken: dict[str, Any] = {
                f"{name}, unbound": (_unbound, (group,)),
                f"{name}, over a graph break": (_bound_before, (group,)),
                f"{name}, given": (lambda x, size: (x + size() * 10, size()), (group.size,)),
                f"{name}, closed over": (_method_in_closure(group.rank), ()),
                f"{name}, returned": (lambda x, g: (x + 1, g.rank), (group,)),
            }
            assert unlike(rank, broken, least=0) == []

    world.run(body)


MEMBERS: dict[str, Any] = {
    "name": lambda x, g, m: (x + 1, g.name(), g.bound_device_id),
    "description": lambda x, g, m: (x + 1, g.group_desc, g.group_name),
    "backend": lambda x, g, m: (x + 1, dist.get_backend(g), dist.get_process_group_ranks(g)),
    "groups of a mesh": lambda x, g, m: (x + 1, [each.size() for each in m.get_all_groups()]),
    "tensor of a mesh": lambda x, g, m: (x + 1, m.mesh.tolist(), m.mesh + 1),
    "a member of each": lambda x, g, m: (
        x + 1,
        (hasattr(g, "rank"), getattr(g, "group_name", "none"), hasattr(m, "get_rank"), getattr(m, "ndim", 7)),
        (hasattr(Shard(1), "dim"), getattr(Shard(1), "dim", 7), getattr(Partial("avg"), "reduce_op", "none")),
    ),
    "no such member of a placement": lambda x, g, m: (
        x + 1,
        (hasattr(Shard(1), "reduce_op"), getattr(Shard(1), "reduce_op", "none"), getattr(Partial("avg"), "dim", 7)),
    ),
    "no such member of a group": lambda x, g, m: (x + 1, hasattr(g, "nothing"), getattr(g, "nothing", 5)),
    "no such member of a mesh": lambda x, g, m: (x + 1, hasattr(m, "nothing"), getattr(m, "nothing", 5)),
    "call of no such method of a group": lambda x, g, m: (x + 1, g.nothing()),
    "call of no such method of a mesh": lambda x, g, m: (x + 1, m.nothing()),
}


@requirement(
    "DYN-METHOD-03",
    "Compiled code reads public members of groups and meshes as uncompiled code does, with graph breaks if needed.",
    source=f"torch.compile: fullgraph=False; {PROCESS_GROUP}; {DEVICE_MESH}",
)
@pytest.mark.parametrize("member", [m for m in MEMBERS if "no such" not in m])
@pytest.mark.world(3)
def test_members(world: World, member: str) -> None:
    """Read members that Dynamo knows, and others that it does not."""

    def body(rank: Rank) -> None:
        about = things(rank)
        cases = {f"{g.size()} ranks": (MEMBERS[member], (g, about.mesh)) for g in (about.pair, about.own)}
        assert unlike(rank, cases) == []

    world.run(body)


@requirement(
    "DYN-METHOD-04",
    "A member that a placement, group or mesh lacks is missing in compiled code too: hasattr is False, and a call "
    "raises AttributeError.",
    source=f"torch.compile: fullgraph=False; {PROCESS_GROUP}; {DEVICE_MESH}",
)
@pytest.mark.parametrize("member", [m for m in MEMBERS if "no such" in m])
@pytest.mark.world(3)
def test_no_such_member(world: World, member: str) -> None:
    """Ask by hasattr, by getattr with a default, and by a call."""

    def body(rank: Rank) -> None:
        about = things(rank)
        assert unlike(rank, {member: (MEMBERS[member], (about.pair, about.mesh))}) == []

    world.run(body)


def _place(x: torch.Tensor, mesh: Any) -> Any:
    where = mesh.get_coordinate()
    return x + mesh.get_rank() * 10, mesh.get_rank(), where is None, where


def _description(x: torch.Tensor, mesh: Any) -> Any:
    return x + mesh.size(), mesh.shape, mesh.ndim, mesh.mesh_dim_names, mesh.device_type


@requirement(
    "DYN-MESH-03",
    "In one graph, get_rank() of a mesh is the rank in the world, and get_coordinate() is None on ranks outside it.",
    source=f"{DEVICE_MESH}.get_rank, get_coordinate",
)
@pytest.mark.world(3)
def test_ranks_of_meshes(world: World) -> None:
    """One mesh has ranks 1 and 0 in this order, and so not rank 2; others have all ranks."""

    def body(rank: Rank) -> None:
        about = things(rank)
        meshes = {"beside": about.beside, "line": about.line, "mesh": about.mesh, "slice": about.mesh["b"]}
        cases = {f"{f.__name__} {name}": (f, (mesh,)) for f in (_place, _description) for name, mesh in meshes.items()}
        assert unlike(rank, cases, fullgraph=True) == []
        compiled, _ = dynamo.compiled(_place, backend="eager")
        for name, mesh in meshes.items():  # one function for all
            _, place, outside, where = compiled(torch.zeros(1, device=rank.device), mesh)
            expected = [rank.index] if name != "beside" else {0: [1], 1: [0], 2: None}[rank.index]
            expected = [0, rank.index] if name == "mesh" else expected
            assert (place, outside, None if where is None else list(where)) == (rank.index, expected is None, expected)

    world.run(body)


class Forwarding(nn.Module):
    """A module that finds attributes that it does not have in another object."""

    def __init__(self, group: Any, how: str) -> None:
        super().__init__()
        self.inner, self.how, self._group = nn.Linear(1, 1), how, group
        self.inner.group = group

    def __getattr__(self, name: str) -> Any:
        if name == "found" and self.how == "made up":
            return self._group
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "found":
                return self.inner.group
            return getattr(self.inner, name)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.found.rank() * 10 + self.found.size(), self.found


@requirement(
    "DYN-GETATTR-01",
    "A compiled module uses the group that its own __getattr__ finds, as it does uncompiled.",
    source="torch.compile; torch.nn.Module.__getattr__",
)
@pytest.mark.parametrize("how", ["forwarded", "made up"])
@pytest.mark.world(3)
def test_custom_getattr(world: World, how: str) -> None:
    """The attribute is that of a submodule, or one under another name."""

    def body(rank: Rank) -> None:
        about = things(rank)
        groups = {"pair": about.pair, "own": about.own}
        assert unlike(rank, {name: (Forwarding(group, how), ()) for name, group in groups.items()}) == []

    world.run(body)


@requirement(
    "DYN-FAKE-01",
    "With the fake backend, compiled code sees the ranks, sizes and meshes of the pretended world, and the shapes that "
    "its collectives give.",
    source="torch.distributed.Backend: FAKE; torch.compile",
)
@pytest.mark.world(1)
def test_fake_backend(world: World) -> None:
    """Pretend to be rank 5 of 8, with a group of three ranks and a mesh of 2 x 4."""

    def places(x: torch.Tensor, group: Any, mesh: Any) -> Any:
        world = dist.get_rank(), dist.get_world_size(), dist.get_backend(group)
        members = group.rank(), group.size(), dist.get_rank(group), dist.get_process_group_ranks(group)
        return x + 1, world, members, mesh.get_rank(), mesh.get_coordinate(), mesh["b"].size(), group

    def shapes(x: torch.Tensor, group: Any) -> Any:
        dist.all_reduce(x, group=group)
        gathered = functional.all_gather_tensor(x, 0, group)
        scattered = functional.reduce_scatter_tensor(x.repeat(6), "sum", 0, group)
        return x.shape, gathered.shape, scattered.shape

    def body(rank: Rank) -> None:
        with pretended(5, 8):
            group: Any = dist.new_group([2, 5, 7])
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
            cases: dict[str, Any] = {"places": (places, (group, mesh)), "shapes": (shapes, (group,))}
            assert unlike(rank, cases, fullgraph=True) == []
            compiled, _ = dynamo.compiled(places, backend="eager")
            _, everyone, members, *in_mesh, _ = compiled(torch.ones(1), group, mesh)
            assert everyone == (5, 8, "fake")
            assert members == (1, 3, 1, [2, 5, 7])
            assert [in_mesh[0], list(in_mesh[1]), in_mesh[2]] == [5, [1, 1], 4]
            torch.compiler.reset()

    world.run(body)
