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
from suites.dynamo.objects import PLACEMENTS, Case, things, unlike

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
        shards = p.is_shard(), p.is_shard(0), p.is_shard(1), p.is_shard(dim=1), p.is_shard(None), p.is_shard(dim=None)
        partials = p.is_partial(), p.is_partial("sum"), p.is_partial("avg"), p.is_partial(reduce_op="avg")
        partials = *partials, p.is_partial(None), p.is_partial(reduce_op=None)
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
    """Return what a placement is to others that are made inside: its class, equality and hash."""
    answers = {
        "equal": (p == Shard(1), p == Partial("avg"), p == Partial(), p == Replicate(), p == 3, p is None),
        "unequal": (p != Shard(1), p != Partial("avg"), p in [Shard(1), Partial("avg")]),
        "as key": {Shard(0): 1, Shard(1): 2, Replicate(): 3, Partial(): 4, Partial("avg"): 5}[p],
        "in a set": (p in {Shard(1), Partial("avg")}, len({p, Shard(1)})),
        "isinstance": (isinstance(p, Shard), isinstance(p, Partial), isinstance(p, (Replicate, Partial))),
        "of the base": (isinstance(p, Placement), isinstance(p, int)),
        "made": (isinstance(Partial("avg"), Partial), type(Partial("avg")).__name__, isinstance(Shard(1), Partial)),
    }
    return x + 1, answers


def _class_of_placement(x: torch.Tensor, p: Any) -> Any:
    return x + 1, type(p), type(p) is Shard, type(p) is Partial, type(p).__name__


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
@pytest.mark.world(1)
def test_placements_compared(world: World) -> None:
    """Compare each placement with others that are made inside; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        for function, least in (_placement_among, 1), (_class_of_placement, 0):
            cases: dict[str, Case] = {name: (function, (placement,)) for name, placement in PLACEMENTS.items()}
            assert unlike(rank, cases, least=least) == []

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
        cases: dict[str, Case] = {name: (function, (placement,)) for name, placement in PLACEMENTS.items()}
        assert unlike(rank, cases, least=0) == []

    world.run(body)


@requirement(
    "DYN-PLACE-275",
    "With fullgraph=True, compiled code has the text of a placement or of a tuple of placements.",
    source=f"{PLACEMENT_TYPES}: Placement.__str__; torch.compile: fullgraph",
)
@pytest.mark.parametrize("of", ["dimensions", "placements"])
@pytest.mark.world(1)
def test_text_in_one_graph(world: World, of: str) -> None:
    """Ask for the text of placements, or of their dimensions."""

    def dimensions(x: torch.Tensor, p: Any) -> Any:
        return x + 1, str(p.dim), str((p.dim, p.dim))

    def placements(x: torch.Tensor, p: Any) -> Any:
        return x + 1, str(p), str((p, p))

    def body(rank: Rank) -> None:
        function = dimensions if of == "dimensions" else placements
        assert unlike(rank, {"shard": (function, (Shard(1),))}, fullgraph=True) == []

    world.run(body)


def _compared(x: torch.Tensor, a: Any, b: Any) -> Any:
    """Return what two groups, or two meshes, are to each other."""
    answers = {
        "equal": (a == b, a != b, a == a, a == 3, a in (b, a), a in [b]),
        "the same": (a is b, a is not b, a is None, a is dist.group.WORLD),
        "hash": (hash(a), hash(a) == hash(b), len({a, b}), a in {b}),
        "as key": ({b: 1, a: 2}[a], {b: 3}.get(a), {a: 4}.get(a)),
        "isinstance": (isinstance(a, dist.ProcessGroup), isinstance(a, DeviceMesh), isinstance(a, int | Shard)),
        "true": (bool(a), not a),
    }
    return x + 1 if a else x, answers


def _is_of_class(x: torch.Tensor, a: Any, b: Any) -> Any:
    return x + 1, type(a) is dist.ProcessGroup, type(a) is DeviceMesh


def _is_of_same_class(x: torch.Tensor, a: Any, b: Any) -> Any:
    return x + 1, type(a) is type(b), type(a) is int, type(a).__name__


@requirement(
    "DYN-PROTO-01",
    "Groups and meshes are equal, identical, hashed, true or instances of a class when compiled as when uncompiled.",
    source="torch.compile; torch.distributed.ProcessGroup; torch.distributed.device_mesh.DeviceMesh",
)
@pytest.mark.world(3)
def test_protocol(world: World) -> None:
    """Compare a group or mesh with itself and with another; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        about = things(rank)
        pairs = {
            "groups": (about.pair, about.own),
            "a group and itself": (about.own, about.own),
            "meshes": (about.mesh, about.line),
            "a mesh and itself": (about.line, about.line),
            "a mesh beside this rank": (about.beside, about.line),
        }
        assert unlike(rank, {name: (_compared, pair) for name, pair in pairs.items()}) == []

    world.run(body)


KEYS: dict[str, list[Any]] = {
    "others": [Shard(0), int, nn.Linear],
    "classes": [DeviceMesh, Shard, Replicate, dist.ProcessGroup],
}
"""What values may be kept for."""


@requirement(
    "DYN-PROTO-273",
    "With fullgraph=True, compiled code finds what a dictionary holds under a class of meshes, placements or groups.",
    source="torch.compile: fullgraph; torch.distributed.device_mesh.DeviceMesh; torch.distributed.tensor.Shard",
)
@pytest.mark.parametrize("how", ["found", "contained"])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.world(1)
def test_classes_as_keys(world: World, keys: str, how: str) -> None:
    """Keep a value for each, and ask for it by index and by get, or whether there is one."""
    kept = {key: 2 * number + 1 for number, key in enumerate(KEYS[keys])}

    def found(x: torch.Tensor, key: Any) -> Any:
        return x + kept[key], kept.get(key)

    def contained(x: torch.Tensor, key: Any) -> Any:
        return x + 1, key in kept

    def body(rank: Rank) -> None:
        function = found if how == "found" else contained
        cases: dict[str, Case] = {str(key): (lambda x, key=key: function(x, key), ()) for key in kept}
        assert unlike(rank, cases, fullgraph=True) == []

    world.run(body)


@requirement(
    "DYN-PROTO-02",
    "In compiled code, type() of a group or of a mesh is its class, as in uncompiled code.",
    source="torch.compile; torch.distributed.ProcessGroup; torch.distributed.device_mesh.DeviceMesh",
)
@pytest.mark.parametrize("function", [_is_of_class, _is_of_same_class], ids=["class", "same-class"])
@pytest.mark.world(3)
def test_type(world: World, function: Any) -> None:
    """Compare the type with the class, or with the type of another object and with another class."""

    def body(rank: Rank) -> None:
        about = things(rank)
        pairs = {"group": (about.pair, about.own), "mesh": (about.mesh, about.line)}
        assert unlike(rank, {name: (function, pair) for name, pair in pairs.items()}) == []

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
    size, rank = "size", "rank" if isinstance(thing, dist.ProcessGroup) else "get_rank"
    first, second = thing.size, thing.rank if isinstance(thing, dist.ProcessGroup) else thing.get_rank
    by_name = getattr(thing, rank)(), getattr(thing, size)()
    return x + first() * 10, second(), first(), [f() for f in (second, first)], by_name


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
        objects = {"pair": about.pair, "own": about.own, "mesh": about.mesh}
        assert unlike(rank, {name: (_bound, (thing,)) for name, thing in objects.items()}, fullgraph=True) == []
        broken: dict[str, Any] = {
            "unbound": (_unbound, (about.pair,)),
            "over a graph break": (_bound_before, (about.pair,)),
            "given": (lambda x, size: (x + size() * 10, size()), (about.pair.size,)),
            "closed over": (_method_in_closure(about.pair.rank), ()),
            "returned": (lambda x, g: (x + 1, g.rank), (about.pair,)),
        }
        assert unlike(rank, broken, least=0) == []

    world.run(body)


def _members(x: torch.Tensor, group: Any, mesh: Any) -> Any:
    of_group = group.group_desc, group.group_name, dist.get_backend(group), dist.get_process_group_ranks(group)
    return x + 1, of_group, mesh.mesh.tolist(), mesh.mesh + 1


def _name_and_device(x: torch.Tensor, group: Any, mesh: Any) -> Any:
    return x + 1, group.name(), group.bound_device_id


def _groups_of_mesh(x: torch.Tensor, group: Any, mesh: Any) -> Any:
    return x + 1, [each.size() for each in mesh.get_all_groups()]


@requirement(
    "DYN-METHOD-03",
    "Compiled code reads public members of groups and meshes as uncompiled code does, with graph breaks if needed.",
    source=f"torch.compile: fullgraph=False; {PROCESS_GROUP}; {DEVICE_MESH}",
)
@pytest.mark.parametrize(
    "function", [_members, _name_and_device, _groups_of_mesh], ids=["known", "name-and-device", "groups-of-mesh"]
)
@pytest.mark.world(3)
def test_members(world: World, function: Any) -> None:
    """Read members that Dynamo knows, and others that it does not."""

    def body(rank: Rank) -> None:
        about = things(rank)
        assert unlike(rank, {"members": (function, (about.pair, about.mesh))}) == []

    world.run(body)


def _asked(x: torch.Tensor, thing: Any) -> Any:
    return x + 1, hasattr(thing, "nothing"), getattr(thing, "nothing", 5), hasattr(thing, "__eq__")


def _asked_of_placements(x: torch.Tensor, placement: Any) -> Any:
    missing = hasattr(placement, "reduce_op"), getattr(placement, "reduce_op", "none"), hasattr(placement, "nothing")
    return x + 1, missing, hasattr(placement, "dim"), getattr(placement, "dim", 7)


def _called(x: torch.Tensor, thing: Any) -> Any:
    return x + 1, thing.nothing()


@requirement(
    "DYN-METHOD-04",
    "A member that a placement, group or mesh lacks is missing in compiled code too: hasattr is False, and a call "
    "raises AttributeError.",
    source=f"torch.compile: fullgraph=False; {PROCESS_GROUP}; {DEVICE_MESH}",
)
@pytest.mark.parametrize("of", ["placement", "group", "mesh"])
@pytest.mark.world(3)
def test_no_such_member(world: World, of: str) -> None:
    """Ask by hasattr, by getattr with a default, and by a call."""

    def body(rank: Rank) -> None:
        about = things(rank)
        cases: dict[str, Any] = {
            "placement": {
                "shard": (_asked_of_placements, (Shard(1),)),
                "sum": (_asked_of_placements, (Partial("avg"),)),
            },
            "group": {"asked": (_asked, (about.pair,)), "called": (_called, (about.pair,))},
            "mesh": {"asked": (_asked, (about.mesh,)), "called": (_called, (about.mesh,))},
        }[of]
        assert unlike(rank, cases) == []

    world.run(body)


def _place(x: torch.Tensor, mesh: Any) -> Any:
    where = mesh.get_coordinate()
    about = mesh.size(), mesh.shape, mesh.ndim, mesh.mesh_dim_names, mesh.device_type
    return x + mesh.get_rank() * 10, mesh.get_rank(), where is None, where, about


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
        assert unlike(rank, {name: (_place, (mesh,)) for name, mesh in meshes.items()}, fullgraph=True) == []
        compiled, _ = dynamo.compiled(_place, backend="eager")
        for name, mesh in meshes.items():  # one function for all
            _, place, outside, where, _ = compiled(torch.zeros(1, device=rank.device), mesh)
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
    "With the fake backend, compiled code sees ranks, sizes, meshes and the shapes of collectives as uncompiled code "
    "does.",
    source="torch.distributed.Backend: FAKE; torch.compile",
)
@pytest.mark.world(1)
def test_fake_backend(world: World) -> None:
    """Pretend to be rank 5 of 8, with a group of three ranks and a mesh of 2 x 4; tensors have a dimension or none."""

    def places(x: torch.Tensor, group: Any, mesh: Any) -> Any:
        world = dist.get_rank(), dist.get_world_size(), dist.get_backend(group)
        members = group.rank(), group.size(), dist.get_rank(group), dist.get_process_group_ranks(group)
        return x + 1, world, members, mesh.get_rank(), mesh.get_coordinate(), mesh["b"].size(), group

    def shapes(x: torch.Tensor, group: Any) -> Any:
        dist.all_reduce(x, group=group)
        gathered = functional.all_gather_tensor(x, 0, group)
        scattered = functional.reduce_scatter_tensor(x.repeat(6), "sum", 0, group)
        return x.shape, gathered.shape, scattered.shape

    def without_dimensions(x: torch.Tensor, group: Any) -> Any:
        one = x.sum()
        every = [torch.zeros_like(one) for _ in range(3)]
        dist.all_gather(every, one, group=group)
        dist.all_reduce(one, group=group)
        results = [functional.all_gather_tensor(one, 0, group), functional.all_reduce(one, "sum", group)]
        results += [functional.broadcast(one, 0, group), *functional.all_reduce_coalesced([one, one], "max", group)]
        results += functional.all_gather_into_tensor_coalesced([one, x], group)
        return one.shape, [each.shape for each in every], [result.shape for result in results]

    def body(rank: Rank) -> None:
        with pretended(5, 8):
            group: Any = dist.new_group([2, 5, 7])
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
            cases: dict[str, Any] = {
                "places": (places, (group, mesh)),
                "shapes": (shapes, (group,)),
                "without dimensions": (without_dimensions, (group,)),
            }
            assert unlike(rank, cases, fullgraph=True) == []
            compiled, _ = dynamo.compiled(places, backend="eager")
            _, everyone, members, *in_mesh, _ = compiled(torch.ones(1), group, mesh)
            assert everyone == (5, 8, "fake")
            assert members == (1, 3, 1, [2, 5, 7])
            assert [in_mesh[0], list(in_mesh[1]), in_mesh[2]] == [5, [1, 1], 4]
            torch.compiler.reset()

    world.run(body)
